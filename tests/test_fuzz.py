"""A short run of the fuzzer; `make fuzz` is the long one."""

import fuzz
import pytest


def test_damaged_files_are_read_or_named() -> None:
    outcomes, failures = fuzz.run(400, seed=1)

    assert failures == []
    assert sum(outcomes.values()) == 400
    assert {name.split(":")[0] for name in outcomes} == {"picture", "caption", "table", "whole"}
    assert outcomes["picture: damaged picture"] > 50 < outcomes["picture: read"] + outcomes["table: metadata"]


def test_the_fuzzer_notices_what_must_not_happen(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(file: object, channels: int = 0, max_pixels: int = 0) -> None:
        raise KeyError("a decoder's bug")

    monkeypatch.setattr(fuzz, "find_pictures", crash)
    monkeypatch.setattr(fuzz, "load_image", crash)
    _, failures = fuzz.run(10, seed=0)

    assert len(failures) == 10
    assert all("--seed 0 --first" in failure and "KeyError" in failure for failure in failures)


def test_a_case_can_be_made_again() -> None:
    alone, _ = fuzz.run(1, seed=1, first=17)
    before, _ = fuzz.run(17, seed=1)
    with_it, _ = fuzz.run(18, seed=1)

    assert with_it - before == alone

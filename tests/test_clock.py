"""How far a run is."""

import pytest

from unet_attn import clock
from unet_attn.clock import RunClock


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    time = [1000.0]
    monkeypatch.setattr(clock, "monotonic", lambda: time[0])
    return time


def test_steps_are_counted_without_a_clock(now: list[float]) -> None:
    run = RunClock(max_steps=7, max_minutes=None)
    assert [run.progress(step, seconds_at_end=5.0) for step in (0, 3, 7, 8)] == [0, 3 / 7, 1, 1]


def test_the_clock_leaves_time_for_the_end_and_begins_no_step_that_would_end_late(now: list[float]) -> None:
    run = RunClock(max_steps=None, max_minutes=1.0)
    run.start()
    now[0] += 20
    assert run.progress(3, seconds_at_end=10.0) == pytest.approx(20 / 50)

    with run.timed("step"):
        now[0] += 4
    assert run.durations == {"step": 4}
    assert run.progress(4, seconds_at_end=10.0) == pytest.approx((24 + 2) / 50)
    now[0] += 24.5
    assert run.progress(5, seconds_at_end=10.0) == 1


def test_an_end_that_takes_longer_than_the_run_leaves_half_of_it_for_training(now: list[float]) -> None:
    run = RunClock(max_steps=None, max_minutes=1.0)
    run.start()
    now[0] += 15
    assert run.progress(1, seconds_at_end=500.0) == pytest.approx(15 / 30)


def test_the_further_of_both_ends_counts_and_earlier_sessions_too(now: list[float]) -> None:
    run = RunClock(max_steps=100, max_minutes=1.0)
    run.seconds_before = 30.0
    run.start()
    assert run.seconds() == 30
    assert run.progress(10, seconds_at_end=0.0) == pytest.approx(0.5)
    assert run.progress(90, seconds_at_end=0.0) == pytest.approx(0.9)

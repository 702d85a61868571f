"""How far a run is."""

from pathlib import Path

import pytest
import test_training
import torch
from test_training import pictures, trainer_for  # noqa: F401  a fixture

from unet_attn import clock, training
from unet_attn.clock import RunClock
from unet_attn.training import Trainer


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


def test_a_run_by_the_clock_leaves_time_for_both_a_snapshot_and_a_checkpoint_at_its_end(
    pictures: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    time = [0.0]

    def spend(seconds: float) -> float:
        time[0] += seconds
        return time[0]

    class Slow(Trainer):
        def _write_checkpoint(self, tensors: dict[str, dict[str, torch.Tensor]]) -> None:
            super()._write_checkpoint(tensors)
            spend(1.5)

    monkeypatch.setattr(clock, "monotonic", lambda: spend(0.05))
    monkeypatch.setattr(training, "write_snapshot", lambda *_, is_main: spend(0.2))
    monkeypatch.setattr(test_training, "Trainer", Slow)
    options = {"max_steps": None, "max_minutes": 0.2, "checkpoint_every": 20, "ema_snapshot_every": 4}
    trainer = trainer_for(pictures, tmp_path, **options)
    trainer.run()

    # its last duration before the end is that of a snapshot
    assert trainer.saved_step == trainer.step > 24
    assert 11.0 < time[0] <= 12.0 * 1.03

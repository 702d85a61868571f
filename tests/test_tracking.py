"""What a run tells: files of JSON lines, trackers by name."""

import json
from pathlib import Path

import processes
import pytest
import torch
import two_processes
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_training import trainer_for
from test_watching import pictures  # noqa: F401  a fixture

from unet_attn.tracking import check_trackers, drop_later_lines, keep_config, peak_memory


def test_lines_beyond_a_step_and_torn_ones_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step}) + "\n" for step in (1, 2, 3)]
    path.write_text("".join(lines) + '{"step": 2, "lo')

    drop_later_lines(path, last_step=2)

    assert path.read_text() == "".join(lines[:2])
    drop_later_lines(tmp_path / "absent.jsonl", last_step=2)
    assert sorted(tmp_path.iterdir()) == [path]


def test_trackers_that_would_stay_silent_are_refused() -> None:
    check_trackers(["tensorboard"])
    check_trackers([])
    with pytest.raises(ValueError, match=r"train.trackers must be among aim, .*wandb, got 'tensorbord'"):
        check_trackers(["tensorbord"])
    with pytest.raises(ValueError, match=r"has 'aim', which is not installed: pip install aim"):
        check_trackers(["aim"])


def test_tensorboard_holds_metrics_validation_and_settings(pictures: Path, tmp_path: Path) -> None:  # noqa: F811
    run = tmp_path / "icons"
    trainer_for(pictures, run, max_steps=2, validate_every=2).run()
    events = EventAccumulator(str(run / "logs" / "icons")).Reload()

    assert {"loss", "lr", "grad_norm", "data_wait", "memory_gib", "validation/gap_exchanged"} <= set(
        events.Tags()["scalars"]
    )
    assert [event.step for event in events.Scalars("loss")] == [1, 2]
    assert [event.step for event in events.Scalars("validation/true")] == [2]
    assert list((run / "logs" / "icons").rglob("hparams.yml"))


def test_settings_that_trained_nothing_that_is_left_are_not_kept(tmp_path: Path) -> None:
    def kept() -> dict[str, str]:
        return {path.name: path.read_text() for path in tmp_path.iterdir()}

    assert keep_config(tmp_path, "rate: 1\n", step=0) == []
    assert keep_config(tmp_path, "rate: 2\n", step=500) == ["rate 1 -> 2"]
    # killed before the next checkpoint, so that it is from 500 on again that others hold
    assert keep_config(tmp_path, "rate: 3\n", step=500) == ["rate 1 -> 3"]
    assert kept() == {"config.yaml": "rate: 3\n", "config-until-step-000500.yaml": "rate: 1\n"}
    assert keep_config(tmp_path, "rate: 4\n", step=1000) == ["rate 3 -> 4"]
    # the checkpoint of 1000 is damaged: of steps beyond 700 nothing is left
    assert keep_config(tmp_path, "rate: 5\n", step=700) == ["rate 3 -> 5"]
    assert kept() == {
        "config.yaml": "rate: 5\n",
        "config-until-step-000500.yaml": "rate: 1\n",
        "config-until-step-000700.yaml": "rate: 3\n",
    }
    assert keep_config(tmp_path, "rate: 3\n", step=700) == []
    assert kept() == {"config.yaml": "rate: 3\n", "config-until-step-000500.yaml": "rate: 1\n"}


def test_peak_memory_is_in_gib_and_rises_with_what_is_held() -> None:
    # in a process that has not held more before, which would hide it
    processes.run_group(two_processes.hold_a_block, size=1)
    assert 0.2 < peak_memory(torch.device("cpu")) < 64

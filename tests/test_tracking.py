"""What a run tells: files of JSON lines, trackers by name."""

import json
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_training import trainer_for
from test_watching import pictures  # noqa: F401  a fixture

from unet_attn.tracking import check_trackers, drop_later_lines, peak_memory


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


def test_peak_memory_is_in_gib() -> None:
    before = peak_memory(torch.device("cpu"))
    block = torch.ones(2**28, dtype=torch.uint8)  # 256 MiB
    assert peak_memory(torch.device("cpu")) >= before
    assert 0.2 < peak_memory(torch.device("cpu")) < 64
    del block

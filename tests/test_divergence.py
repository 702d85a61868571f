"""A loss or gradient that is not finite: the step is skipped, many in a row end the run, and saved weights work."""

from pathlib import Path

import pytest
import torch
from test_training import TroubledImages, metrics, pictures, trainer_for, weights  # noqa: F401

from unet_attn.data import DataOptions
from unet_attn.divergence import TrainingDiverged
from unet_attn.sampler import SampleKey
from unet_attn.training import Trainer


def test_a_batch_that_is_not_finite_is_skipped_and_its_file_named(pictures: Path, tmp_path: Path, capsys) -> None:  # noqa: F811
    data = TroubledImages(DataOptions(path=str(pictures), resolution=8), channels=1)
    data.infinite_in = frozenset({3})
    trainer = trainer_for(pictures, tmp_path / "run", data=data, checkpoint_every=1, keep_checkpoints=None)
    live: dict[int, dict[str, torch.Tensor]] = {}
    step = trainer._train_step

    def remembered() -> None:
        step()
        live[trainer.step] = {name: value.detach().clone() for name, value in trainer.parameters.items()}

    trainer._train_step = remembered
    trainer.run()
    guilty = next(key for key in list(iter_keys(trainer, 3)) if key.position == 1)

    assert [name for name in live[3] if not torch.equal(live[3][name], live[2][name])] == []
    assert not (tmp_path / "run" / "checkpoints" / "step-000003").exists()
    assert [line["loss"] is None for line in metrics(tmp_path / "run")] == [False, False, True, False, False, False]
    assert trainer.ema.updates == 5
    assert all(value.isfinite().all() for value in weights(tmp_path / "run", 6).values())
    error = capsys.readouterr().err
    assert f"warning: step 3 is skipped: its loss is not finite; pictures: {data.paths[guilty.index]}\n" in error


def iter_keys(trainer: Trainer, step: int) -> list[SampleKey]:
    """The keys of one step of a run that is over."""
    return next(trainer.data.batches(trainer.options.batch_size, start_step=step))["key"]


def test_ten_bad_steps_in_a_row_stop_the_run_and_the_checkpoint_before_them_stays(
    pictures: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    data = TroubledImages(DataOptions(path=str(pictures), resolution=8), channels=1)
    data.infinite_in = frozenset(range(4, 100))

    with pytest.raises(TrainingDiverged, match=r"10 steps in a row .* up to step 13: lower train.learning_rate"):
        trainer_for(pictures, tmp_path, data=data, max_steps=50, keep_checkpoints=1, checkpoint_every=3).run()

    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000003"]
    assert all(value.isfinite().all() for value in weights(tmp_path, 3).values())
    data.infinite_in = frozenset()
    assert trainer_for(pictures, tmp_path, data=data, max_steps=15, resume="latest").run()


def test_a_run_that_ends_in_bad_steps_is_not_complete(pictures: Path, tmp_path: Path) -> None:  # noqa: F811
    data = TroubledImages(DataOptions(path=str(pictures), resolution=8), channels=1)
    data.infinite_in = frozenset({5, 6})

    with pytest.raises(TrainingDiverged, match=r"2 steps in a row .* up to step 6"):
        trainer_for(pictures, tmp_path / "run", data=data, checkpoint_every=2).run()
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved == ["step-000002", "step-000004"]
    data.infinite_in = frozenset({6})  # one bad batch is no sign of broken weights
    assert trainer_for(pictures, tmp_path / "other", data=data).run()
    assert all(value.isfinite().all() for value in weights(tmp_path / "other", 6).values())


def test_weights_that_are_not_finite_are_never_saved(pictures: Path, tmp_path: Path) -> None:  # noqa: F811
    trainer = trainer_for(pictures, tmp_path)
    with torch.no_grad():
        next(iter(trainer.parameters.values())).view(-1)[0] = torch.inf

    with pytest.raises(TrainingDiverged, match="the weights are not finite after step 0"):
        trainer._save()
    assert not (tmp_path / "checkpoints").exists()

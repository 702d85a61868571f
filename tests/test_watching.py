"""Looking at a run as it goes: validation, grids, what is held out, and that none of it disturbs the training."""

import json
import shutil
from pathlib import Path

import numpy as np
import processes
import pytest
import torch
import two_processes
from PIL import Image
from test_training import assert_same_run, metrics, trainer_for

from unet_attn.data import CaptionedImages, DataError, DataOptions, open_data
from unet_attn.sampler import held_out


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    random = np.random.default_rng(0)
    for number in range(23):
        Image.fromarray(random.integers(0, 256, (8, 8), dtype=np.uint8)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"thing {number}")
    return folder


def opened(pictures: Path, **options: object) -> CaptionedImages:
    return CaptionedImages(DataOptions(path=str(pictures), resolution=8, **options), channels=1)


def validations(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "logs" / "validation.jsonl").read_text().splitlines()]


def test_validation_changes_nothing_in_training(pictures: Path, tmp_path: Path) -> None:
    trainer_for(pictures, tmp_path / "unwatched", checkpoint_every=6).run()
    watched = trainer_for(pictures, tmp_path / "watched", checkpoint_every=6, validate_every=2)
    watched.run()

    assert_same_run(tmp_path / "watched", tmp_path / "unwatched", 6)
    assert all(module.training for module in watched.model.modules())
    assert [line["step"] for line in validations(tmp_path / "watched")] == [2, 4, 6]


def test_a_validation_tells_losses_and_gaps_at_fixed_noise_and_times(pictures: Path, tmp_path: Path) -> None:
    trainer = trainer_for(pictures, tmp_path, validate_every=6, ema_decay=0.0)
    trainer.run()
    line = validations(tmp_path)[0]

    assert line["held_out"] is False
    assert line["pictures"] == 23
    assert line["gap_exchanged"]["value"] == pytest.approx(line["exchanged"]["value"] - line["true"]["value"])
    assert np.mean(line["by_time"]["true"]) == pytest.approx(line["true"]["value"], rel=1e-6)
    # the same weights have the same figures again
    assert trainer.watcher.validate(6)["validation/true"] == line["true"]["value"]


def test_pictures_that_are_held_out_are_validated_on_and_never_trained_on(pictures: Path, tmp_path: Path) -> None:
    data = opened(pictures, validation_share=0.3)
    kept = {index for index, out in enumerate(data.held_out) if out}
    batches = data.batches(4)
    trained = {index for _ in range(30) for index in next(batches)["index"].tolist()}

    assert 2 <= len(kept) <= 12
    assert trained == set(range(23)) - kept
    assert set(data.validation_indices(100)) == kept
    assert f"{len(kept)} pictures held out for validation" in data.summary()

    trainer_for(pictures, tmp_path, data=data, validate_every=6).run()
    assert validations(tmp_path)[0]["held_out"] is True


def test_what_is_held_out_depends_on_each_name_alone() -> None:
    names = [f"{number}.png" for number in range(1009)]
    chosen = held_out(names, 0.1)

    assert sum(chosen) == pytest.approx(101, abs=30)
    assert held_out([*names, "new.png"], 0.1)[:-1] == chosen
    assert all(out for out, before in zip(held_out(names, 0.2), chosen, strict=True) if before)


def test_too_few_pictures_left_to_train_on_are_counted(pictures: Path) -> None:
    data = opened(pictures, validation_share=0.3)
    left = 23 - sum(data.held_out)

    with pytest.raises(DataError, match=rf"has {left} pictures \({23 - left} pictures held out\), fewer than .* 20"):
        data.check_batch_size(20)


def test_a_share_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"data.validation_share must be at least 0 and below 1, got 1.0"):
        DataOptions(path="x", validation_share=1.0)


def test_validation_of_a_resumed_run_continues_its_file(pictures: Path, tmp_path: Path) -> None:
    trainer_for(pictures, tmp_path / "straight", validate_every=2).run()
    cut = tmp_path / "cut"
    trainer_for(pictures, cut, validate_every=2, max_steps=3).run()
    # 3 was the end of the first session, so it was looked at; the straight run did not
    trainer_for(pictures, cut, validate_every=2, resume="latest").run()

    assert [line["step"] for line in validations(cut)] == [2, 3, 4, 6]
    assert validations(cut)[0] == validations(tmp_path / "straight")[0]


def test_one_caption_for_all_has_no_exchanged_captions_and_trains(tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(5):
        Image.new("L", (8, 8), 50 * number).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text("thing")
    trainer_for(folder, tmp_path / "run", validate_every=6).run()

    assert validations(tmp_path / "run")[0]["gap_exchanged"] is None
    assert validations(tmp_path / "run")[0]["gap_empty"] is not None


def test_live_weights_and_modes_return_after_a_look_that_fails(pictures: Path, tmp_path: Path) -> None:
    trainer = trainer_for(pictures, tmp_path, sample_prompts=("a",), validate_every=2)
    trainer.run()
    before = {name: value.clone() for name, value in trainer.parameters.items()}

    class Disk(Exception):
        pass

    def fail(module: torch.nn.Module, inputs: object) -> None:
        raise Disk

    trainer.model.unet.register_forward_pre_hook(fail)
    for look in (trainer.watcher.sample, trainer.watcher.validate):
        with pytest.raises(Disk):
            look(6)

    assert all(torch.equal(value, before[name]) for name, value in trainer.parameters.items())
    assert all(module.training for module in trainer.model.modules())


def test_a_grid_that_overflows_or_finds_no_memory_is_told_and_the_training_goes_on(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = {"sample_every": 2, "sample_prompts": ("thing 1",), "validate_every": 6}
    trainer_for(pictures, tmp_path / "unwatched").run()
    trainer = trainer_for(pictures, tmp_path / "watched", **looks)

    def overflow(module: torch.nn.Module, inputs: object, output: object) -> None:
        if not module.training and trainer.step == 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if not module.training:
            output.sample.mul_(torch.inf)

    hook = trainer.model.unet.register_forward_hook(overflow)
    step = trainer._train_step
    trainer._train_step = lambda: (step(), hook.remove() if trainer.step == 6 else None)
    assert trainer.run()

    told = [line for line in capsys.readouterr().err.splitlines() if "no samples" in line]
    assert [line.split(" came out as NaN")[0] for line in told] == [
        "warning: step 2: no samples: picture 0 of 1 (counted from 0)",
        "warning: step 4: no samples: CUDA out of memory. Tried to allocate 2.00 GiB.",
    ]
    assert [path.name for path in (tmp_path / "watched" / "samples").iterdir()] == ["step-000006.png"]
    assert [line["step"] for line in validations(tmp_path / "watched")] == [6]
    assert_same_run(tmp_path / "watched", tmp_path / "unwatched", 6)


def test_looks_that_fail_in_the_main_process_leave_no_other_waiting(pictures: Path, tmp_path: Path) -> None:
    run, options = tmp_path / "run", {"batch_size": 4, "max_steps": 4, "trackers": ()}
    options |= {"validate_every": 2, "sample_every": 1, "sample_prompts": ("a",)}
    processes.run_group(two_processes.train_without_looks, pictures, run, options, seconds=60)

    assert len(metrics(run)) == 4


def test_the_loss_by_noise_level_is_the_loss_in_parts(pictures: Path, tmp_path: Path) -> None:
    trainer = trainer_for(pictures, tmp_path, batch_size=16, max_steps=2)
    trainer.objective.time_sampling = "uniform"  # two times in every eighth
    trainer.run()

    for line in metrics(tmp_path):
        assert len(line["loss_by_noise"]) == 8
        assert np.mean(line["loss_by_noise"]) == pytest.approx(line["loss"], rel=1e-6)
        assert 0 <= line["data_wait"] < 1 / line["pictures_per_second"] * 16
        assert 0.1 < line["memory_gib"] < 64


def test_levels_without_a_sample_are_null(pictures: Path, tmp_path: Path) -> None:
    trainer_for(pictures, tmp_path, batch_size=4, max_steps=1).run()

    assert sum(value is None for value in metrics(tmp_path)[0]["loss_by_noise"]) >= 4


def test_other_pictures_at_resume_are_told_and_the_earlier_config_is_kept(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    trainer_for(pictures, run, max_steps=2).run()
    trainer_for(pictures, run, max_steps=3, resume="latest").run()
    assert "data set" not in capsys.readouterr().err
    assert not list(run.glob("config-until*"))

    data = opened(pictures, validation_share=0.0)
    data.captions[3], data.captions[4] = data.captions[4], data.captions[3]
    trainer = trainer_for(pictures, run, data=data, max_steps=4, resume="latest")
    trainer.config = "b: 2\n"
    trainer.run()

    captured = capsys.readouterr()
    assert "the data set is not what it was when the run was left" in captured.err
    assert "goes on with other settings than it had: a 1 -> None; b None -> 2" in captured.out
    assert (run / "config-until-step-000003.yaml").read_text() == "a: 1\n"
    assert (run / "config.yaml").read_text() == "b: 2\n"
    assert "23 pictures" in (run / "data.txt").read_text()


def test_snapshots_of_an_interrupted_run_are_those_of_the_straight_one(pictures: Path, tmp_path: Path) -> None:
    trainer_for(pictures, tmp_path / "without").run()
    trainer_for(pictures, tmp_path / "straight", ema_snapshot_every=2, max_steps=5).run()
    cut = tmp_path / "cut"
    trainer_for(pictures, cut, ema_snapshot_every=2, max_steps=3).run()
    shutil.rmtree(cut / "ema_snapshots" / "step-000003")  # the end of the first session had one more
    trainer_for(pictures, cut, ema_snapshot_every=2, max_steps=5, resume="latest").run()

    def snapshots(run: Path) -> dict[str, bytes]:
        files = sorted((run / "ema_snapshots").rglob("*.safetensors"))
        return {str(file.relative_to(run)): file.read_bytes() for file in files}

    assert len(snapshots(cut)) >= 3
    assert snapshots(cut) == snapshots(tmp_path / "straight")
    assert [line["loss"] for line in metrics(cut)] == [line["loss"] for line in metrics(tmp_path / "without")][:5]


def test_streamed_data_train_without_validation(tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    datasets = pytest.importorskip("datasets")
    rows = {"image": [Image.new("L", (8, 8), 20 * n) for n in range(11)], "text": [f"thing {n}" for n in range(11)]}
    datasets.Dataset.from_dict(rows).to_parquet(folder / "train.parquet")
    data = open_data(DataOptions(path=str(folder), resolution=8, streaming=True), channels=1)
    trainer_for(folder, tmp_path / "run", data=data, validate_every=2, max_steps=3).run()

    assert not (tmp_path / "run" / "logs" / "validation.jsonl").exists()
    with pytest.raises(ValueError, match=r"data.streaming cannot hold pictures out: set data.validation_share to 0"):
        DataOptions(path="x", streaming=True, validation_share=0.1)


def test_a_list_of_skipped_files_of_an_earlier_session_goes(pictures: Path, tmp_path: Path) -> None:
    trainer_for(pictures, tmp_path, max_steps=1).run()
    (tmp_path / "skipped.tsv").write_text("kind\tpath\treason\n")
    trainer_for(pictures, tmp_path, max_steps=2, resume="latest").run()

    assert not (tmp_path / "skipped.tsv").exists()


def test_a_share_that_holds_out_nothing_is_told(pictures: Path) -> None:
    assert "no picture falls into data.validation_share" in opened(pictures, validation_share=0.001).summary()

"""What a training does about files that are bad, or become so."""

import json
import multiprocessing
import os
import signal
from pathlib import Path
from time import monotonic, sleep

import processes  # noqa: F401  the server that it prepares has imported what the process needs
import psutil
import pytest
import torch
import two_processes
from PIL import Image
from test_training import trainer_for
from torture import write_config

from unet_attn.data import CaptionedImages, DataError, DataOptions, _in_plain_words


def pictures_in(folder: Path, count: int) -> Path:
    """Grey pictures of increasing value, each with a caption."""
    folder = folder / "pictures"
    folder.mkdir()
    for number in range(count):
        Image.new("L", (8, 8), number).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text("thing")
    return folder


def test_a_picture_that_breaks_during_training_is_replaced_and_many_of_them_stop_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unet_attn.data.MEMORY_LIMIT", 0)  # so that files are read again
    folder = pictures_in(tmp_path, 40)
    data = CaptionedImages(DataOptions(path=str(folder), resolution=8), channels=1)
    (folder / "7.png").unlink()
    assert trainer_for(folder, tmp_path / "run", data=data, batch_size=20, max_steps=8, checkpoint_every=8).run()
    error = capsys.readouterr().err
    assert error.count("a picture that cannot be read any more is replaced: ") == 4  # once an epoch of two steps
    assert f"replaced: {folder / '7.png'}: No such file or directory" in error

    for number in range(10, 13):
        (folder / f"{number}.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"of 1\d0 pictures could not be read any more during training, over 5%"):
        trainer_for(folder, tmp_path / "run2", data=data, batch_size=20, max_steps=8, checkpoint_every=8).run()


def test_a_validation_leaves_out_what_breaks_during_training_and_ends_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unet_attn.data.MEMORY_LIMIT", 0)
    folder, run = pictures_in(tmp_path, 23), tmp_path / "run"
    data = CaptionedImages(DataOptions(path=str(folder), resolution=8, validation_share=0.3), channels=1)
    held_out = [data.paths[index] for index in data.validation_indices(128)]
    held_out[0].unlink()
    assert trainer_for(folder, run, data=data, max_steps=2, validate_every=2).run()

    (line,) = (run / "logs" / "validation.jsonl").read_text().splitlines()
    assert json.loads(line)["pictures"] == len(held_out) - 1 > 0
    gone = f"{held_out[0]}: No such file or directory"
    said = f"step 2: a picture that cannot be read any more is left out of the validation: {gone}\n"
    assert said in capsys.readouterr().err

    for path in held_out[1:]:
        path.unlink()
    assert trainer_for(folder, tmp_path / "blind", data=data, max_steps=2, validate_every=2).run()
    assert "step 2: no validation: none of its pictures can be read any more\n" in capsys.readouterr().err
    assert not (tmp_path / "blind" / "logs" / "validation.jsonl").exists()


def test_a_signal_to_the_process_group_leaves_the_loader_processes_until_the_run_is_saved(tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = {"checkpoint_every": 10**6, "sample_every": "null", "validate_every": "null", "trackers": "[]"}
    arguments = ["--config", str(write_config(tmp_path, steps=10**6)), "--data.num_workers", "2"]
    arguments += [part for key, value in options.items() for part in (f"--train.{key}", str(value))]
    # other than those of `processes`, one that may have children
    process = multiprocessing.get_context("forkserver").Process(
        target=two_processes.train_in_a_group, args=([*arguments, "--train.output_dir", str(run)],)
    )
    process.start()
    try:
        metrics, late = run / "logs" / "metrics.jsonl", monotonic() + 60
        while not (metrics.exists() and metrics.read_text().count("\n") > 1):
            assert process.is_alive() and monotonic() < late
            sleep(0.05)
        loaders = psutil.Process(process.pid).children()
        os.killpg(process.pid, signal.SIGTERM)
        process.join(60)

        assert len(loaders) == 2
        assert process.exitcode == 75
        steps = len(metrics.read_text().splitlines())
        assert (run / "checkpoints" / f"step-{steps:06d}" / "manifest.json").exists()
        assert psutil.wait_procs(loaders, timeout=10)[1] == []
    finally:
        process.kill()
        process.join()


def test_what_was_skipped_is_listed_in_the_run_folder(tmp_path: Path) -> None:
    folder = pictures_in(tmp_path, 5)
    (folder / "bad.png").write_bytes(b"")
    data = CaptionedImages(DataOptions(path=str(folder), resolution=8, on_error="skip"), channels=1)
    trainer_for(folder, tmp_path / "run", data=data, max_steps=1).run()
    listed = (tmp_path / "run" / "skipped.tsv").read_text().splitlines()
    assert listed == ["kind\tpath\treason", f"empty file\t{folder / 'bad.png'}\tthe file is empty"]


def test_pictures_of_several_shapes_train_in_batches_of_one(tmp_path: Path) -> None:
    folder = pictures_in(tmp_path, 3)
    for number in range(5):
        Image.new("L", (8, 14), number).save(folder / f"high {number}.png")
    data = CaptionedImages(DataOptions(path=str(folder), resolution=8, buckets=True), channels=1, multiple_of=2)
    assert {tuple(batch["image"].shape) for batch, _ in zip(data.batches(4), range(8), strict=False)} == {
        (4, 1, 8, 8),
        (4, 1, 10, 6),
    }
    assert trainer_for(folder, tmp_path / "run", data=data, max_steps=8, checkpoint_every=8).run()


class Broken(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> None:
        raise DataError("a.png: the file is empty")


def test_an_error_in_a_loader_process_comes_out_as_its_own_line() -> None:
    with pytest.raises(DataError) as raised:
        next(_in_plain_words(iter(torch.utils.data.DataLoader(Broken(), num_workers=1))))
    assert str(raised.value) == "a.png: the file is empty"

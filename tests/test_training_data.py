"""What a training does about files that are bad, or become so."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from test_training import trainer_for

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

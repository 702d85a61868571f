"""What judge and captioner share: the held-out part, training's moves, and a folder that is whole or refused."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from unet_attn.captioner import Captioner, CaptionerSize
from unet_attn.judge import Judge, JudgeSize
from unet_attn.picture_model import PictureModel, caption_key, split_held_out, train_on_pictures
from unet_attn.tokenizer import train_tokenizer

SMALL = {"image_size": 12, "channels": 1, "patch_size": 4, "dim": 8, "depth": 1, "heads": 2}
SIZES = [JudgeSize(**SMALL, text_dim=8, text_depth=1, embedding_dim=8), CaptionerSize(**SMALL, writer_depth=1)]


def new_model(size: JudgeSize | CaptionerSize) -> PictureModel:
    torch.manual_seed(0)
    return (Judge if isinstance(size, JudgeSize) else Captioner)(size, train_tokenizer(["a b"], 259, 7)).eval()


def test_a_tenth_is_held_out_and_at_least_100() -> None:
    trained, held_out = split_held_out(2003, seed=5)

    assert (len(trained), len(held_out)) == (1803, 200)
    assert sorted(trained + held_out) == list(range(2003))
    assert split_held_out(2003, seed=5)[1] == held_out != split_held_out(2003, seed=6)[1]
    assert len(split_held_out(211, seed=0)[1]) == 100
    message = "^199 captioned pictures are too few: 200 are needed, 100 of them to be held out$"
    with pytest.raises(ValueError, match=message):
        split_held_out(199, seed=0)


def test_case_and_spacing_do_not_make_another_caption() -> None:
    assert caption_key(" Arrow  LEFT ") == caption_key("arrow left") != caption_key("left arrow")


def test_each_picture_is_visited_once_an_epoch_and_moved_by_two_pixels_at_most() -> None:
    model = new_model(SIZES[0])
    pictures = torch.full((21, 1, 12, 12), -1.0)
    for number, picture in enumerate(pictures):
        picture[0, 5:7, 5:7] = number / 21  # two pixels wide in the middle: the edge that is drawn out is empty
    visits: list[int] = []

    def loss(batch: Tensor, chosen: list[int]) -> Tensor:
        for picture, number in zip(batch, chosen, strict=True):
            rows, columns = torch.where(picture[0] > -1)
            assert picture.shape == (1, 12, 12) and len(rows) == 4
            assert picture[0, rows[0], columns[0]] == pytest.approx(number / 21)
            corners.add((int(rows[0]), int(columns[0])))
        visits.extend(chosen)
        return model.fitted(batch).sum() * model.eye.position.sum()

    corners: set[tuple[int, int]] = set()
    train_on_pictures(model, pictures, loss, steps=42, batch_size=7, learning_rate=1e-3, seed=0, on_step=None)

    assert [sorted(visits[at : at + 21]) for at in range(0, 14 * 21, 21)] == [list(range(21))] * 14
    assert corners == {(row, column) for row in range(3, 8) for column in range(3, 8)}
    assert not model.training


@pytest.mark.parametrize("size", SIZES, ids=["judge", "captioner"])
def test_a_broken_folder_is_refused_in_one_line(size: JudgeSize | CaptionerSize, tmp_path: Path) -> None:
    model = new_model(size)
    model.save(tmp_path)
    path = tmp_path / f"{model.kind}.json"
    about = json.loads(path.read_text(encoding="utf-8"))

    def refusal() -> str:
        with pytest.raises(ValueError, match=f"^the {model.kind} in {tmp_path} cannot be read: ") as caught:
            type(model).load(tmp_path)
        return str(caught.value)

    for broken, reason in (
        (about | {"format_version": 9}, "it has format_version 9, this release of unet-attn reads 1"),
        (about | {"size": about["size"] | {"arms": 8}}, "arms"),
        (about | {"size": about["size"] | {"dim": 16}}, "size mismatch"),
        ({key: about[key] for key in ("format_version", "size")}, "record"),
        ([about], "list"),
    ):
        path.write_text(json.dumps(broken), encoding="utf-8")
        assert reason in refusal() and "\n" not in refusal()
    path.write_text(json.dumps(about), encoding="utf-8")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "\n" not in refusal()
    with pytest.raises(
        FileNotFoundError, match=f"holds no {model.kind} .no {model.kind}.json.: train one with scripts"
    ):
        type(model).load(tmp_path / "tokenizer")

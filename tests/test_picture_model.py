"""What judge and captioner share: the held-out part, training's moves, and a folder that is whole or refused."""

import json
import shutil
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
        (
            about | {"size": about["size"] | {"dim": 16}},
            f"holds the weights of another model than {path.name} describes",
        ),
        (about | {"size": about["size"] | {"patch_size": 0}}, "zero"),
        ({key: about[key] for key in ("format_version", "size")}, "record"),
        ([about], "list"),
        (about | {"record": [1]}, "cannot convert"),
    ):
        path.write_text(json.dumps(broken), encoding="utf-8")
        assert reason in refusal() and "\n" not in refusal()
    path.write_text(json.dumps(about), encoding="utf-8")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "\n" not in refusal()
    shutil.rmtree(tmp_path / "tokenizer")
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        FileNotFoundError, match=f"holds no {model.kind} .no {model.kind}.json.: train one with scripts"
    ):
        type(model).load(tmp_path / "empty")


def test_a_model_of_the_other_kind_is_named_in_one_short_line(tmp_path: Path) -> None:
    judge, captioner = map(new_model, SIZES)
    judge.save(tmp_path / "judge")
    captioner.save(tmp_path / "captioner")

    with pytest.raises(FileNotFoundError, match=r"/captioner holds a captioner, not a judge: train one with \S+$"):
        Judge.load(tmp_path / "captioner")
    with pytest.raises(FileNotFoundError, match=r"/judge holds a judge, not a captioner: train one with "):
        Captioner.load(tmp_path / "judge")

    # what an earlier release left where one was saved over the other
    for name in ("captioner.json", "model.safetensors"):
        shutil.copy(tmp_path / "captioner" / name, tmp_path / "judge")
    with pytest.raises(ValueError, match=r"holds the weights of another model than judge\.json describes") as caught:
        Judge.load(tmp_path / "judge")
    assert len(str(caught.value)) < len(str(tmp_path)) + 150


def test_it_is_not_saved_over_anything_but_its_own_kind(tmp_path: Path) -> None:
    judge, captioner = map(new_model, SIZES)
    (tmp_path / "run" / "tokenizer").mkdir(parents=True)
    (tmp_path / "run" / "tokenizer" / "tokenizer.json").write_text("the run's", encoding="utf-8")
    judge.save(tmp_path / "judge")
    before = (tmp_path / "judge" / "model.safetensors").read_bytes()

    with pytest.raises(ValueError, match="run holds something else than a judge, which would be damaged"):
        judge.save(tmp_path / "run")
    with pytest.raises(ValueError, match="judge holds something else than a captioner"):
        captioner.save(tmp_path / "judge")

    assert [path.name for path in (tmp_path / "run").rglob("*")] == ["tokenizer", "tokenizer.json"]
    assert (tmp_path / "run" / "tokenizer" / "tokenizer.json").read_text(encoding="utf-8") == "the run's"
    assert (tmp_path / "judge" / "model.safetensors").read_bytes() == before
    judge.record = {"seed": 7}
    judge.save(tmp_path / "judge")
    assert Judge.load(tmp_path / "judge").record == {"seed": 7}

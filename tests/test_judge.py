"""The judge: its loss written out, that it learns, that it is saved whole, and what its script refuses."""

import json
import sys
from collections.abc import Callable
from importlib import import_module
from itertools import product
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.testing import assert_close

from unet_attn.judge import (
    Judge,
    JudgeFeatures,
    JudgeSize,
    best_first,
    caption_agreement,
    captions_found,
    contrastive_loss,
    similarities,
    train_judge,
)
from unet_attn.tokenizer import train_tokenizer

ROOT = Path(__file__).resolve().parent.parent
SIZE = JudgeSize(
    image_size=12, channels=1, patch_size=4, dim=16, depth=1, heads=2, text_dim=16, text_depth=1, embedding_dim=16
)
SPOTS = list(product(range(0, 12, 4), range(0, 12, 4)))
CAPTIONS = [f"row {row // 4} column {column // 4}" for row, column in SPOTS]


def spots(count: int, seed: int = 0) -> tuple[Tensor, list[str]]:
    """Pictures (count, 1, 12, 12) with a white patch at one of nine places, some noise, and what they are called."""
    generator = torch.Generator().manual_seed(seed)
    pictures = -1 + 0.2 * torch.rand(count, 1, 12, 12, generator=generator)
    captions = []
    for picture in pictures:
        which = int(torch.randint(len(SPOTS), (), generator=generator))
        row, column = SPOTS[which]
        picture[0, row : row + 4, column : column + 4] += 1.7
        captions.append(CAPTIONS[which])
    return pictures, captions


def new_judge(seed: int = 0) -> Judge:
    torch.manual_seed(seed)
    return Judge(SIZE, train_tokenizer(CAPTIONS, vocab_size=300, max_length=13))


@pytest.fixture(scope="module")
def trained() -> Judge:
    judge = new_judge()
    train_judge(judge, *spots(300), steps=250, batch_size=50, learning_rate=3e-3)
    return judge


def test_the_loss_is_the_cross_entropy_both_ways_without_pictures_of_the_same_caption() -> None:
    similarity = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    captions = ["A  cat", "dog", "a cat", "bird"]  # 0 and 2 are the same

    def entropy(scores: Tensor, right: int, wrong: list[int]) -> Tensor:
        return -(scores[right] - scores[[right, *wrong]].logsumexp(0))

    wrong = [[1, 3], [0, 2, 3], [1, 3], [0, 1, 2]]
    rows = torch.stack([entropy(similarity[n], n, wrong[n]) for n in range(4)]).mean()
    columns = torch.stack([entropy(similarity[:, n], n, wrong[n]) for n in range(4)]).mean()

    assert_close(contrastive_loss(similarity, captions), (rows + columns) / 2)


def test_it_finds_the_captions_of_pictures_it_has_not_seen(trained: Judge) -> None:
    pictures, captions = spots(100, seed=1)

    known = caption_agreement(trained, pictures, captions, CAPTIONS, candidates=9)
    before = caption_agreement(new_judge().eval(), pictures, captions, CAPTIONS, candidates=9)
    exchanged = caption_agreement(trained, pictures, captions[1:] + captions[:1], CAPTIONS, candidates=9)

    assert known.value > 0.9
    found = captions_found(trained, pictures, captions, CAPTIONS, candidates=9)
    assert found.shape == (100,) and found.double().mean().item() == pytest.approx(known.value)
    assert before.value < 0.4 and exchanged.value < 0.4


def test_the_best_picture_of_a_caption_comes_first(trained: Judge) -> None:
    pictures, captions = spots(40, seed=2)
    right = [number for number, caption in enumerate(captions) if caption == CAPTIONS[4]]

    ranking = best_first(trained, pictures, CAPTIONS[4])

    assert sorted(ranking) == list(range(40))
    assert set(ranking[: len(right)]) == set(right) and len(right) > 1


def test_training_repeats_with_its_seed() -> None:
    losses: list[list[float]] = [[], [], []]
    for run, seed in enumerate((3, 3, 4)):
        judge, record = new_judge(), losses[run]
        train_judge(
            judge, *spots(31), steps=7, batch_size=11, seed=seed, on_step=lambda _, loss, r=record: r.append(loss)
        )

    assert losses[0] == losses[1] != losses[2]
    assert len(losses[0]) == 7


def test_a_saved_judge_judges_the_same(trained: Judge, tmp_path: Path) -> None:
    trained.record = {"held_out_agreement": 0.5}
    trained.save(tmp_path / "judge")

    loaded = Judge.load(tmp_path / "judge")

    pictures, _ = spots(5)
    assert_close(similarities(loaded, pictures, CAPTIONS), similarities(trained, pictures, CAPTIONS))
    assert loaded.record == {"held_out_agreement": 0.5} and not loaded.training


def test_pictures_of_other_sizes_and_colours_are_brought_to_its_own(trained: Judge) -> None:
    pictures, captions = spots(60, seed=3)
    large = torch.nn.functional.interpolate(pictures, scale_factor=3).expand(-1, 3, -1, -1)

    assert_close(trained.features(pictures.expand(-1, 3, -1, -1)), trained.features(pictures), atol=1e-5, rtol=0)
    assert caption_agreement(trained, large, captions, CAPTIONS, candidates=9).value > 0.9
    assert JudgeFeatures(trained)(large).shape == (60, trained.num_features)


def captioned_folder(folder: Path, count: int, captions: int) -> Path:
    folder.mkdir()
    rows = []
    for number in range(count):
        Image.new("L", (8, 8), number % 256).save(folder / f"{number}.png")
        rows.append({"file_name": f"{number}.png", "text": f"shade {number % captions}"})
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


@pytest.fixture
def train_script(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The script in this process, where its imports are already paid for."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    script = import_module("train_judge")

    def run(*arguments: str | Path) -> int:
        monkeypatch.setattr(sys, "argv", ["train_judge.py", *map(str, arguments)])
        return script.main()

    return run


def test_the_script_trains_says_how_good_it_is_and_saves(
    train_script: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = captioned_folder(tmp_path / "data", 211, captions=103)

    done = train_script(data, "--out", tmp_path / "judge", "--resolution", "8", "--channels", "1", "--steps", "3")

    assert done == 0
    record = Judge.load(tmp_path / "judge").record
    assert (record["held_out_pictures"], record["trained_pictures"], record["candidates"]) == (100, 111, 100)
    assert (record["steps"], record["seed"]) == (3, 0)
    told = f"of 100 held-out pictures among 100 (of trained ones {100 * record['trained_agreement']:.1f} %"
    assert told in capsys.readouterr().out


def test_the_script_reads_pictures_and_captions_as_a_training_does(
    train_script: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = captioned_folder(tmp_path / "data", 211, captions=103)
    (data / "metadata.jsonl").write_text((data / "metadata.jsonl").read_text().replace('"text"', '"title"'))
    (data / "damaged.png").write_bytes(b"no picture")
    config = tmp_path / "my.yaml"
    section = "{path: elsewhere, resolution: 8, text_column: title, on_error: skip, caption_dropout: 0.5}"
    config.write_text(f"data: {section}\nunet: {{in_channels: 1}}\n")

    assert train_script(data, "--out", tmp_path / "judge", "--steps", "3") == 2  # nothing says where captions are
    assert train_script(data, "--out", tmp_path / "judge", "--steps", "3", "--config", config) == 0

    judge = Judge.load(tmp_path / "judge")
    assert (judge.size.image_size, judge.size.channels) == (8, 1)
    assert judge.record["held_out_pictures"] + judge.record["trained_pictures"] == 211

    capsys.readouterr()
    for text, told in (
        ("data: {resolution: tall}", f"{config}: data.resolution must be a whole number, got 'tall'"),
        ("- a list", f"{config} must have sections"),
        ("data: 5", f"{config}: data must be a section with keys of its own, got 5"),
    ):
        config.write_text(f"{text}\nunet: {{}}\n" if text.startswith("data") else text)
        assert train_script(data, "--out", tmp_path / "other", "--config", config) == 2
        assert capsys.readouterr().err.startswith(f"error: {told}")


def test_near_doubles_of_trained_pictures_are_counted_and_left_out(
    train_script: Callable[..., int], trained: Judge
) -> None:
    script = import_module("train_judge")
    pictures = 2 * torch.rand(131, 1, 12, 12, generator=torch.Generator().manual_seed(0)) - 1
    pictures[7] = 0.5 * pictures[0]  # paler
    pictures[11] = 0.5 * (pictures[1] + pictures[2])  # correlates, but less
    captions = [f"{number} {CAPTIONS[number % 9]}" for number in range(131)]
    best = int(similarities(trained, pictures[7:8], captions).argmax())  # the double's caption is found
    captions[7], captions[best] = captions[best], captions[7]
    parts = {"trained": [*range(5), *range(12, 131)], "held_out": list(range(5, 12))}

    doubles = script.near_doubles(pictures, **parts)
    figures = script.judged(trained, pictures, captions, **parts, seed=3)

    assert doubles.tolist() == [False, False, True, False, False, False, False]
    found = captions_found(trained, pictures[5:12], captions[5:12], captions, seed=3).double()
    assert figures["held_out_near_doubles"] == 1
    assert figures["held_out_agreement"] == pytest.approx(found.mean().item())
    assert found[2] and figures["agreement_without_near_doubles"] == pytest.approx(found[~doubles].mean().item())
    assert figures["agreement_without_near_doubles"] < figures["held_out_agreement"]
    counts = {"held_out_pictures": 7, "trained_pictures": 124}
    share = 100 * figures["agreement_without_near_doubles"]
    assert script.told(figures | counts).endswith(
        f"1 of the 7 are near doubles of a trained picture; without them {share:.1f} %"
    )
    pictures[5:12] = pictures[:1]
    figures = script.judged(trained, pictures, captions, **parts, seed=3)
    assert figures["held_out_near_doubles"] == 7 and figures["agreement_without_near_doubles"] is None
    assert script.told(figures | counts).endswith("7 of the 7 are near doubles of a trained picture")


def test_a_place_where_something_would_be_lost_is_refused_before_the_pictures_are_read(
    train_script: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"  # not even there: nothing of it is looked at
    run, locked = tmp_path / "run", tmp_path / "a file"
    (run / "tokenizer").mkdir(parents=True)
    (run / "tokenizer" / "tokenizer.json").write_text("the run's", encoding="utf-8")
    new_judge().save(tmp_path / "judge")
    locked.write_text("mine", encoding="utf-8")
    (tmp_path / "lost").symlink_to(tmp_path / "nowhere")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def refusal(out: str | Path) -> str:
        assert train_script(data, "--out", out) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: --out {out} ") and error.count("\n") == 1
        return error

    for filled in (run, tmp_path / "judge", locked, tmp_path / "lost"):
        assert "exists and is no empty folder, and nothing is written over: give another" in refusal(filled)
    for within in (data, data / "judge", data / "a" / "b", run / ".." / "data" / "judge"):
        assert "lies in the data folder, which is never written to" in refusal(within)
    assert "cannot be made" in refusal(locked / "judge")
    assert "cannot be written" in refusal("/proc/j")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("script", ["train_judge", "caption"])
def test_a_number_that_is_out_of_range_is_refused_in_one_line(
    train_script: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    script: str,
) -> None:
    out = tmp_path / ("judge" if script == "train_judge" else "new.jsonl")
    command = [f"{script}.py", str(tmp_path / "data"), "--out", str(out)]
    for name, value, told in (
        ("patch_size", 0, "at least 1, got 0"),
        ("resolution", -32, "at least 1, got -32"),
        ("dim", 0, "at least 1, got 0"),
        ("steps", 1, "at least 2, got 1"),
        ("batch_size", 1, "at least 2, got 1"),
        ("seed", -1, "at least 0 and below 2^63, got -1"),
        ("seed", 2**63, f"at least 0 and below 2^63, got {2**63}"),
    ):
        monkeypatch.setattr(sys, "argv", [*command, f"--{name}", str(value)])
        assert import_module(script).main() == 2
        assert capsys.readouterr().err == f"error: --{name} must be {told}\n"


@pytest.mark.parametrize(("name", "value"), [("patch_size", 3), ("patch_size", 64), ("dim", 7)])
def test_sizes_that_do_not_divide_are_refused_in_one_line(
    train_script: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str], *, name: str, value: int
) -> None:
    data = captioned_folder(tmp_path / "data", 200, captions=101)

    assert train_script(data, "--out", tmp_path / "judge", "--resolution", "8", f"--{name}", value) == 2

    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"of {value}" in error and "divide" in error


@pytest.mark.parametrize(
    ("count", "captions", "message"),
    [
        (7, 7, "7 captioned pictures are too few: 200 are needed, 100 of them to be held out"),
        (211, 13, "13 different captions are too few to find one among 100"),
    ],
)
def test_the_script_refuses_data_that_cannot_be_judged_in_one_line(
    train_script: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    *,
    count: int,
    captions: int,
    message: str,
) -> None:
    data = captioned_folder(tmp_path / "data", count, captions=captions)

    assert train_script(data, "--out", tmp_path / "judge") == 2
    assert capsys.readouterr().err == f"error: {message}\n"
    assert not (tmp_path / "judge").exists()


def test_the_figure_of_a_judge_is_made_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.chdir(tmp_path)
    new_judge().save(tmp_path / "judge")
    Image.new("L", (12, 12), 255).save("white.png")

    def make(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["figures.py", *arguments])
        code = import_module("figures").main()
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    asked = ("--judge", "judge", "white.png", "heads.png")
    assert make(*asked) == (0, "wrote heads.png\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["heads.png", "judge", "white.png"]
    told = "error: --judge makes one figure, of a judge that is trained: leave out DIR, --out, --steps\n"
    assert make("emoji", *asked, "--out", "out", "--steps", "3") == (2, told)
    assert make() == (2, "error: give DIR, colour pictures to learn from such as data/emoji, or --judge\n")
    assert make("emoji", "--out", "out", "--steps", "0") == (2, "error: --steps must be at least 1, got 0\n")
    assert not (tmp_path / "out").exists()


def test_the_figure_of_its_heads_tints_the_patches_by_what_they_give(
    trained: Judge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    figures = import_module("figures")
    picture = Image.new("L", (12, 12), 255)
    picture.paste(0, (4, 8, 8, 11))
    picture.save(tmp_path / "spot.png")
    trained.save(tmp_path / "judge")

    sheet = figures.figure_of_judge(tmp_path / "judge", tmp_path / "spot.png")

    side = 12 * (160 // 12)
    seen = torch.full((1, 1, 12, 12), 1.0)
    seen[..., 8:11, 4:8] = -1
    weights = trained.eye.attention_weights(seen)[0, :, 7]  # of the patch in row 2, column 1
    assert sheet.size == (3 * (side + 2) + 2 * 12, side + 26)
    for head, map_of_head in enumerate(weights.unflatten(1, (3, 3)), start=1):
        left, cell = (side + 2 + 12) * head + 1, side // 3
        # blue of a white patch falls with its share of the tint
        blue = torch.tensor(
            [[sheet.getpixel((left + cell * c + cell // 2, 25 + cell * r + 5))[2] for c in range(3)] for r in (0, 1)]
        )
        expected = 255 - (255 - figures.ACCENT[2]) * 170 / 255 * map_of_head[:2] / map_of_head.max()
        assert_close(blue.float(), expected, atol=2, rtol=0)

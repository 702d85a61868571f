"""scripts/inspect_data.py: what the model will see, what is wrong, and whether training would start."""

import base64
import io
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from mixed_folder import Mixed, noise, write_mixed_folder
from PIL import Image

from unet_attn.data import CaptionedImages, DataOptions
from unet_attn.inspection import as_picture, inspect, near_duplicates, same_files
from unet_attn.options import TrainOptions
from unet_attn.tokenizer import train_tokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import inspect_data  # noqa: E402  a script, found through the line above


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data") / "my pictures"


@pytest.fixture(scope="module")
def mixed(folder: Path) -> Mixed:
    return write_mixed_folder(folder)


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, object]]:
    code = inspect_data.main([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def small(folder: Path, count: int = 5) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        noise(i, 17, 13).save(folder / f"{i}.png")
        (folder / f"{i}.txt").write_text(f"Thing number {i}")
    return folder


# a folder made of real mixed files


def test_every_good_file_of_a_mixed_folder_is_counted_and_every_bad_one_named(
    folder: Path, mixed: Mixed, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = report(capsys, str(folder), "--data.on_error", "skip", "--train.batch_size", "8")

    assert code == 0 and found["would_start"] is True
    assert found["pictures"] == len(mixed.good) and found["captions"]["count"] == len(mixed.good)
    named = {Path(fault["path"]).relative_to(folder).as_posix() for fault in found["faults"]}
    assert named == (mixed.bad - {"bad/caption.png"}) | {"bad/caption.txt"}
    assert {fault["kind"] for fault in found["faults"]} == {
        "caption",
        "too many pixels",
        "damaged picture",
        "empty file",
        "unsupported pixels",
        "not a picture",
    }


@pytest.mark.parametrize("buckets", [False, True])
def test_the_data_set_of_training_has_the_same_files(folder: Path, mixed: Mixed, buckets: bool) -> None:
    options = DataOptions(path=str(folder), resolution=16, on_error="skip", buckets=buckets)
    images = CaptionedImages(options, multiple_of=4)

    assert {path.relative_to(folder).as_posix() for path in images.paths} == mixed.good
    assert all(len(variants) == 1 for variants in images.captions)
    seen = {index for batch, _ in zip(images.batches(8), range(20), strict=False) for index in batch["index"].tolist()}
    assert seen == set(range(len(mixed.good)))


def test_all_phone_orientations_are_the_same_picture_upright(folder: Path, mixed: Mixed) -> None:
    images = CaptionedImages(DataOptions(path=str(folder), resolution=16, on_error="skip"))
    sizes = {path.name: size for path, size in zip(images.paths, images.image_sizes, strict=True)}

    assert [sizes[f"IMG_{n}.JPEG"] for n in range(10)] == [(41, 31)] * 5 + [(31, 41)] * 4 + [(41, 31)]


def test_with_faults_training_would_not_start_unless_they_are_skipped(
    folder: Path, mixed: Mixed, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = report(capsys, str(folder), "--train.batch_size", "8")

    assert code == 1 and found["problems"] == [
        f"{len(mixed.bad)} faults, and data.on_error is fail: mend them, or set data.on_error to skip"
    ]
    assert found["pictures"] == len(mixed.good)


def test_no_file_of_the_user_is_touched(folder: Path, mixed: Mixed, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    report(capsys, str(folder))

    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


# the page


class Page(HTMLParser):
    """Collects what a page refers to and the tags it uses."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.sources: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [value or "" for name, value in attributes if name in ("src", "href", "srcset", "action")]


def test_the_page_needs_nothing_else_and_shows_the_very_tensors(tmp_path: Path) -> None:
    small(tmp_path / "<b>&", 7)
    page = tmp_path / "report.html"
    options = ["--data.horizontal_flip", "true", "--data.crop", "random", "--train.batch_size", "7"]
    code = inspect_data.main([str(tmp_path / "<b>&"), "--html", str(page), *options])
    text = page.read_text(encoding="utf-8")
    parsed = Page(text)

    assert code == 0 and not {"script", "link", "iframe", "b"} & set(parsed.tags)
    assert parsed.sources and all(source.startswith("data:image/png;base64,") for source in parsed.sources)
    assert "://" not in re.sub(r"base64,[^\"]*", "", text) and "@import" not in text
    images = CaptionedImages(
        DataOptions(path=str(tmp_path / "<b>&"), horizontal_flip=True, crop="random"), channels=3, seed=0
    )
    expected = [np.asarray(as_picture(image)) for image in next(images.batches(7))["image"]]
    shown = [decoded(source) for source in parsed.sources[:7]]
    assert all(np.array_equal(one, other) for one, other in zip(shown, expected, strict=True))
    assert "Training would start." in text and "&lt;b&gt;&amp;" in text


def decoded(source: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(source.partition("base64,")[2]))))


def test_the_page_of_a_mixed_folder_lists_faults_and_duplicates(folder: Path, mixed: Mixed, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    code = inspect_data.main([str(folder), "--html", str(page), "--data.buckets", "true"])
    text = page.read_text(encoding="utf-8")

    assert code == 1 and "Training would not start" in text
    for name in ("bad/cut.jpg", "bad/bomb.png", "moving/gif.gif", "28 x 36"):
        assert name in text


def test_the_contact_sheet_can_be_kept_as_a_picture(tmp_path: Path) -> None:
    inspect_data.main([str(small(tmp_path / "in")), "--sheet", str(tmp_path / "sheet.png")])

    assert Image.open(tmp_path / "sheet.png").width > 500


# captions


def test_captions_are_shown_as_the_tokenizer_leaves_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small(tmp_path / "in", 3)
    (tmp_path / "in/0.txt").write_text("A LONG caption " + "word " * 500)
    options = ("--data.caption_dropout", "0", "--tokenizer.max_length", "6", "--train.batch_size", "3")
    _, found = report(capsys, str(tmp_path / "in"), *options)

    assert found["captions"]["cut"] == 1 and found["captions"]["longest"] > 500
    assert found["captions"]["token_limit"] == 6
    assert {"thing number 1", "thing number 2", "a long caption word"} <= set(found["sheet"])
    assert next(iter(found["captions"]["words"].items())) == ("word", 500)


def test_dropped_captions_show_as_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, found = report(capsys, str(small(tmp_path / "in")), "--data.caption_dropout", "1.0")

    assert set(found["sheet"]) == {""} and found["captions"]["count"] == 5


# duplicates


def test_equal_files_and_nearly_equal_pictures_are_told_apart(tmp_path: Path) -> None:
    for i in range(6):
        noise(i, 64, 48).save(tmp_path / f"{i}.png")
    shutil.copy(tmp_path / "0.png", tmp_path / "copy.png")
    noise(1, 64, 48).save(tmp_path / "as.jpg", quality=80)
    noise(1, 64, 48).resize((48, 36)).save(tmp_path / "small.png")
    noise(2, 64, 48).point(lambda value: value // 2 + 60).save(tmp_path / "pale.png")
    noise(3, 64, 48).transpose(Image.Transpose.ROTATE_180).save(tmp_path / "turned.png")
    images = CaptionedImages(DataOptions(path=str(tmp_path)), require_captions=False)
    exact = same_files(images)
    names = [[images.paths[index].name for index in group] for group in [*exact, *near_duplicates(images, exact)]]

    assert names == [["0.png", "copy.png"], ["1.png", "as.jpg", "small.png"], ["2.png", "pale.png"]]


def test_flat_pictures_of_other_colours_are_no_duplicates(tmp_path: Path) -> None:
    for name, colour in {"red": (200, 0, 0), "green": (0, 200, 0), "white": (255,) * 3, "snow": (254,) * 3}.items():
        Image.new("RGB", (11, 11), colour).save(tmp_path / f"{name}.png")
    images = CaptionedImages(DataOptions(path=str(tmp_path)), require_captions=False)

    assert near_duplicates(images, []) == [[2, 3]]


# whether training would start


@pytest.mark.parametrize(
    ("prepare", "options", "problem"),
    [
        (lambda folder: None, [], "does not exist: 0 pictures found"),
        (lambda folder: folder.mkdir(), [], "holds 0 pictures among 0 files"),
        (lambda folder: small(folder, 3), [], "3 pictures, fewer than train.batch_size 4"),
        (lambda folder: [small(folder), *(p.unlink() for p in folder.glob("*.txt"))], [], "none of the 5 images"),
        (lambda folder: small(folder), ["--tokenizer.vocab_size", "5"], "vocab_size must be at least 259"),
    ],
)
def test_what_would_stop_training_is_said_and_exits_with_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], prepare: object, options: list[str], problem: str
) -> None:
    prepare(tmp_path / "in")
    code, found = report(capsys, str(tmp_path / "in"), "--train.batch_size", "4", *options)

    assert code == 1 and not found["would_start"] and any(problem in each for each in found["problems"])


def test_a_model_without_text_needs_no_captions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    noise(0).save(tmp_path / "a.png")
    code, found = report(capsys, str(tmp_path), "--without_text", "--train.batch_size", "1")

    assert code == 0 and found["captions"] is None and set(found["sheet"]) == {""}


def test_the_options_of_a_training_are_taken_from_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        f"data: {{path: {small(tmp_path / 'in')}, resolution: 16, caption_dropout: 0.0, on_error: skip}}\n"
        "text_encoder: unet_attn.text_encoder.TextEncoder\n"
        "tokenizer: {vocab_size: 300, max_length: 4}\n"
        "unet: {in_channels: 1, block_channels: [8, 16]}\ntrain: {output_dir: runs/x, batch_size: 5, seed: 3}\n"
    )
    code, found = report(capsys, "--config", str(config))
    assert code == 0 and found["captions"]["token_limit"] == 4 and found["pictures"] == 5
    assert inspect_data.main(["--config", str(config), "--train.batch_size", "6"]) == 1
    assert "5 pictures, fewer than train.batch_size 6" in capsys.readouterr().out
    config.write_text(config.read_text().replace("resolution", "resolutoin"))
    assert inspect_data.main(["--config", str(config)]) == 2
    assert "Group 'data' does not accept option 'resolutoin'" in capsys.readouterr().err


def test_a_config_without_text_encoder_is_a_model_without_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noise(0).save(tmp_path / "a.png")
    config = tmp_path / "run.yaml"
    config.write_text(f"data: {{path: {tmp_path}}}\ntext_encoder: null\ntrain: {{batch_size: 1}}\n")

    assert report(capsys, "--config", str(config))[0] == 0


def test_the_defaults_are_those_of_training() -> None:
    parser, training = inspect_data.make_parser(), TrainOptions(output_dir="runs/x", max_steps=1)

    assert parser.get_defaults().train.batch_size == training.batch_size
    assert parser.get_defaults().train.seed == training.seed


def test_a_wrong_command_line_is_an_error_without_a_traceback(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts/inspect_data.py"), str(tmp_path), "--data.resolution", "many"]
    done = subprocess.run(command, capture_output=True, text=True)

    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error:") and "resolution" in done.stderr and "Traceback" not in done.stderr


def test_a_reader_who_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts/inspect_data.py"), str(small(tmp_path / "in"))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()  # before the first line: what `head -0` does
    assert process.stderr.read() == ""
    assert process.wait() == 1  # that of the report: five pictures are no batch of 64


@pytest.mark.parametrize(
    ("option", "place", "reason"),
    [
        ("--html", "none/report.html", "there is no folder"),
        ("--html", "", "is a folder: give the file's name too"),
        ("--html", "/proc/report.html", "cannot be written"),
        ("--sheet", "sheet.gif", "must end in .png"),
        ("--sheet", "in/sheet.png", "lies in the data folder, where it would be trained on"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_before_the_check(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    option: str,
    place: str,
    reason: str,
) -> None:
    monkeypatch.setattr(inspect_data, "inspect", lambda *_: pytest.fail("it looked at the pictures first"))
    before = sorted(small(tmp_path / "in").parent.rglob("*"))

    assert inspect_data.main([str(tmp_path / "in"), option, str(tmp_path / place)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {option} ") and reason in error and len(error.splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_one_of_anything_is_told_in_the_singular(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        noise(ord(name), 17, 13).save(tmp_path / f"{name}.png")
    (tmp_path / "a.txt").write_text("one two three four five")
    (tmp_path / "bad.png").write_bytes(b"")
    inspect_data.main([str(tmp_path), "--data.buckets", "true", "--tokenizer.max_length", "4"])
    text = capsys.readouterr().out

    for line in (
        "in 1 bucket, width x height: ",
        "1 of 2 images has no caption: it trains the empty caption",
        "1 caption\n",
        "1 caption is longer than the limit and gets cut",
        "1 picture has no caption: it trains the empty caption",
        "1 fault, and data.on_error is fail: mend it, or set data.on_error to skip",
    ):
        assert line in text
    assert not re.search(r"\b1 (pictures|captions|faults|files|folders|buckets|groups)\b", text)


def test_a_long_list_says_where_the_rest_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small(tmp_path / "in")
    for number in range(15):
        (tmp_path / f"in/bad{number:02d}.png").write_bytes(b"")
    inspect_data.main([str(tmp_path / "in"), "--html", str(tmp_path / "page.html")])

    assert "bad11.png: the file is empty\n  and 3 more: --json lists all" in capsys.readouterr().out
    assert "and 3 more: --json lists all" in (tmp_path / "page.html").read_text()


def test_the_report_is_words_and_bars_on_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect_data.main([str(small(tmp_path / "in")), "--train.batch_size", "5"]) == 0
    text = capsys.readouterr().out

    assert "8 to 15 px ██████████████████████████████ 5" in text
    assert "about 4:3 ██████████████████████████████ 5" in text
    assert "thing 5, number 5" in text and text.rstrip().endswith("training would start")


def test_the_inspection_is_through_the_code_of_training(tmp_path: Path) -> None:
    options = DataOptions(path=str(small(tmp_path / "in")), resolution=11, caption_dropout=0.5, horizontal_flip=True)
    found = inspect(
        options,
        channels=1,
        seed=5,
        batch_size=4,
        multiple_of=1,
        make_tokenizer=lambda captions: train_tokenizer(captions, 300, 16),
        sheet_size=9,
    )
    images = CaptionedImages(options, channels=1, seed=5)
    batches = images.batches(4)
    items = [(image, caption) for _ in range(3) for image, caption in zip(*take(next(batches)), strict=True)]

    assert len(found.sheet) == 9
    for (picture, caption), (image, trained) in zip(found.sheet, items, strict=False):
        assert np.array_equal(np.asarray(picture), np.asarray(as_picture(image))) and caption == trained.lower()


def test_a_resolution_that_the_network_refuses_is_told_beforehand(tmp_path: Path) -> None:
    options = DataOptions(path=str(small(tmp_path / "in")), resolution=18)
    found = inspect(options, channels=1, seed=0, batch_size=4, multiple_of=4, make_tokenizer=None, sheet_size=1)
    assert found.problems == ["data.resolution must be a multiple of 4 for this U-Net, got 18"]


def take(batch: dict[str, object]) -> tuple[object, object]:
    return batch["image"], batch["caption"]

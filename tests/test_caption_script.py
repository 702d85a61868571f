"""caption.py: proposals for a person to read, scores beside, nothing overwritten, and one line for bad input."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
from PIL import Image

from unet_attn.captioner import Captioner, Proposal
from unet_attn.data import CaptionedImages, DataOptions
from unet_attn.judge import Judge, JudgeSize
from unet_attn.measures import Estimate
from unet_attn.picture_model import split_held_out
from unet_attn.tokenizer import train_tokenizer

ROOT = Path(__file__).resolve().parent.parent
DOCS = (ROOT / "docs" / "captions.md").read_text(encoding="utf-8")
SMALL = ("--resolution", "8", "--channels", "1", "--dim", "8", "--steps", "3", "--batch_size", "13")
UNCAPTIONED = ["ä 3.png", "more/7.png", "more/11.png"]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return import_module("caption")


@pytest.fixture
def caption(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The script in this process, where its imports are already paid for."""

    def run(*arguments: str | Path) -> int:
        monkeypatch.setattr(sys, "argv", ["caption.py", *SMALL, *map(str, arguments)])
        return script.main()

    return run


def picture_folder(folder: Path, captioned: int, *, captions: int = 103, uncaptioned: list[str] | None = None) -> Path:
    """Grey pictures, `captioned` of them with one of so many captions, the others without."""
    rows = [{"file_name": f"{number}.png", "text": f"shade {number % captions}"} for number in range(captioned)]
    for place, name in enumerate([row["file_name"] for row in rows] + (uncaptioned or [])):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), place % 256).save(folder / name)
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def saved_judge(
    folder: Path, *, image_size: int = 8, channels: int = 1, record: dict[str, object] | None = None
) -> Path:
    torch.manual_seed(0)
    size = JudgeSize(image_size, channels, 4, dim=8, depth=1, heads=2, text_dim=8, text_depth=1, embedding_dim=8)
    judge = Judge(size, train_tokenizer(["shade 0 1 2 3"], vocab_size=300, max_length=11))
    judge.record = record or {}
    judge.save(folder)
    return folder


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_it_proposes_for_each_picture_without_a_caption_and_leaves_the_folder_as_it_was(
    caption: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = picture_folder(tmp_path / "data", 211, uncaptioned=UNCAPTIONED)
    before = everything(data)

    assert caption(data, "--judge", saved_judge(tmp_path / "judge"), "--save", tmp_path / "kept") == 0

    assert everything(data) == before
    rows = [json.loads(line) for line in (tmp_path / "data.captions.jsonl").read_text(encoding="utf-8").splitlines()]
    assert sorted(row["file_name"] for row in rows) == sorted(UNCAPTIONED)
    assert all(list(row) == ["file_name", "text", "confidence"] and row["text"] for row in rows)
    confidences = [row["confidence"] for row in rows]
    assert confidences == sorted(confidences, reverse=True) and all(0 <= each <= 1 for each in confidences)

    result = json.loads((tmp_path / "data.captions.scores.json").read_text(encoding="utf-8"))
    assert (result["held_out_pictures"], result["trained_pictures"], result["steps"]) == (100, 111, 3)
    assert set(result["scores"]) == {"captioner", "most_frequent", "true"}
    # one caption for all is right as often as it is the true one: at most twice among 211
    assert result["scores"]["most_frequent"]["exact_match"]["value"] <= 0.03
    assert result["scores"]["most_frequent"]["token_accuracy"]["value"] > 0.3  # "shade" and the end
    parts = ("", "_surer_half", "_other_half", "_without_doubles")
    assert set(result["scores"]["true"]) == {f"agreement{part}" for part in parts}
    assert result["held_out_near_doubles"] == 0  # an even picture is like none
    assert 0 <= result["scores"]["captioner"]["confidence"]["value"] < 1
    assert Captioner.load(tmp_path / "kept").record == result
    out = capsys.readouterr().out
    assert "3 proposals in" in out and "one for all" in out and "agreement by the judge" in out


def test_merged_as_the_docs_say_the_proposals_are_captions(caption: Callable[..., int], tmp_path: Path) -> None:
    data = picture_folder(tmp_path / "my_pictures", 200, uncaptioned=UNCAPTIONED)
    metadata = data / "metadata.jsonl"
    metadata.write_text(metadata.read_text(encoding="utf-8").rstrip("\n"), encoding="utf-8")  # no end of line
    assert caption(data) == 0

    options = DataOptions(path=str(data), resolution=8)
    assert sum(not variants for variants in CaptionedImages(options).captions) == 3

    (command,) = [block for block in re.findall(r"```sh\n(.*?)```", DOCS, flags=re.S) if "awk" in block]
    before, in_the_way = metadata.read_bytes(), tmp_path / "my_pictures.merged.jsonl"
    in_the_way.write_text("mine", encoding="utf-8")
    refused = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert refused.returncode and in_the_way.read_text(encoding="utf-8") == "mine" and metadata.read_bytes() == before
    in_the_way.unlink()
    for shell in ("sh", "bash"):
        metadata.write_bytes(before)
        assert subprocess.run([shell, "-c", command], cwd=tmp_path, capture_output=True).returncode == 0
        merged = CaptionedImages(options)
        assert all(merged.captions) and not merged.faults and not in_the_way.exists()
    assert len(metadata.read_text(encoding="utf-8").splitlines()) == 203


def test_near_doubles_are_told_and_scored_without(caption: Callable[..., int], tmp_path: Path) -> None:
    data = picture_folder(tmp_path / "data", 211)
    generator = torch.Generator().manual_seed(0)
    for n, pixels in enumerate(torch.randint(0, 256, (106, 8, 8), dtype=torch.uint8, generator=generator)):
        for name in {n, min(n + 106, 210)}:  # all have a double, not always on the other side
            Image.fromarray(pixels.numpy()).save(data / f"{name}.png")

    assert caption(data) == 0

    result = json.loads((tmp_path / "data.captions.scores.json").read_text(encoding="utf-8"))
    names = CaptionedImages(DataOptions(path=str(data), resolution=8)).paths
    trained, held_out = split_held_out(211, seed=0)
    pictures = [path.read_bytes() for path in names]
    doubled = sum(pictures[n] in {pictures[each] for each in trained} for n in held_out)
    assert result["held_out_near_doubles"] == doubled and 0 < doubled < 100
    assert "exact_match_without_doubles" in result["scores"]["captioner"]


def test_a_judge_of_another_part_of_the_data_is_told(
    caption: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = picture_folder(tmp_path / "data", 200)
    alike = {"data": f"{tmp_path}/data/../data", "seed": 0, "trained_pictures": 100, "held_out_pictures": 100}
    others = ({"seed": 1}, {"data": "data"}, {"trained_pictures": 150, "held_out_pictures": 50}, {"data": None})

    for number, change in enumerate(({}, *others)):
        judge = saved_judge(tmp_path / f"judge-{number}", record=alike | change)
        assert caption(data, "--judge", judge, "--out", tmp_path / f"{number}.jsonl") == 0
        error = capsys.readouterr().err
        result = json.loads((tmp_path / f"{number}.scores.json").read_text(encoding="utf-8"))
        assert result["judge_trained_alike"] is (number == 0)
        assert error.count("\n") == (number > 0)
        if number:
            assert error.startswith(f"warning: the judge {judge} learned from other pictures (data ")
            assert error.endswith(f"train it on {data} as it is now with --seed 0\n")


def test_where_all_have_captions_it_still_scores(
    caption: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = picture_folder(tmp_path / "data", 200)

    assert caption(data) == 0

    assert "all 200 pictures have captions: there is nothing to propose" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "data.captions.scores.json"]
    scores = json.loads((tmp_path / "data.captions.scores.json").read_text(encoding="utf-8"))["scores"]
    assert set(scores) == {"captioner", "most_frequent"} and "agreement" not in scores["captioner"]
    halves = [scores["captioner"][f"exact_match_{half}_half"]["value"] for half in ("surer", "other")]
    assert sum(halves) / 2 == pytest.approx(scores["captioner"]["exact_match"]["value"])


def test_what_cannot_be_done_is_refused_in_one_line_before_training(
    caption: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = picture_folder(tmp_path / "data", 200, captions=97, uncaptioned=UNCAPTIONED)
    bare = picture_folder(tmp_path / "bare", 0, uncaptioned=UNCAPTIONED)
    few = picture_folder(tmp_path / "few", 199)
    (tmp_path / "there.jsonl").write_text("mine", encoding="utf-8")
    (tmp_path / "free.scores.json").write_text("mine", encoding="utf-8")
    before = everything(tmp_path)

    def refusal(*arguments: str | Path) -> str:
        assert caption(*arguments) == 2
        captured = capsys.readouterr()
        assert captured.err.count("\n") == 1 and captured.err.startswith("error: ") and not captured.out
        return captured.err

    assert "none of the 3 pictures in" in refusal(bare) and "200 at least" in refusal(bare)
    assert "199 captioned pictures are too few: 200 are needed, 100 of them to be held out" in refusal(few)
    assert "there.jsonl exists already and is never written over" in refusal(data, "--out", tmp_path / "there.jsonl")
    assert "free.scores.json exists already" in refusal(data, "--out", tmp_path / "free.jsonl")
    for out in (data / "new.jsonl", data / "metadata.jsonl", tmp_path / "METADATA.CSV", data / ".." / "data" / "x"):
        assert "would become training data before anyone has read it" in refusal(data, "--out", out)
    assert "lies in the data folder, which is never written to" in refusal(data, "--save", data / "kept")
    assert "there is no folder" in refusal(data, "--out", tmp_path / "nowhere" / "new.jsonl")
    assert "cannot be written" in refusal(data, "--out", "/proc/new.jsonl")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "judge.json").write_text("a judge's", encoding="utf-8")
    told = refusal(data, "--save", tmp_path / "kept")
    assert "kept exists and is no empty folder, and nothing is written over" in told
    assert "--save /proc/j cannot be written" in refusal(data, "--save", "/proc/j")
    (tmp_path / "empty").mkdir()
    for out, save in (
        ("a.jsonl", "a.jsonl"),
        ("a.jsonl", "a.jsonl/b"),
        ("a.jsonl", "a.scores.json"),
        ("empty/a", "empty"),
    ):
        told = refusal(data, "--out", tmp_path / out, "--save", tmp_path / save)
        assert told.startswith(f"error: --save {tmp_path / save} is in the way of ")
    wrong = saved_judge(tmp_path / "wrong", image_size=16, channels=3)
    told = refusal(data, "--judge", wrong)
    assert "sees pictures of 16 px in 3 channels, this captioner 8 px in 1" in told
    assert "give --resolution 16 --channels 3, or another judge" in told
    assert "97 different captions are too few to find one among 100" in refusal(
        data, "--judge", saved_judge(tmp_path / "judge")
    )
    assert "holds no judge" in refusal(data, "--judge", bare)
    assert "--steps must be at least 2, got 1" in refusal(data, "--steps", "1")
    assert "does not exist" in refusal(tmp_path / "nothing")
    after = everything(tmp_path)
    assert {name: after[name] for name in before} == before
    assert {Path(name).parts[len(tmp_path.parts)] for name in after.keys() - before.keys()} == {
        "wrong",
        "judge",
        "kept",
    }


def test_a_table_leaves_out_what_was_not_measured(script: ModuleType) -> None:
    scores = {
        "captioner": {"token_accuracy": Estimate(0.5, 0.01), "agreement": Estimate(0.25, 0.02)},
        "true": {"agreement": Estimate(0.75, 0.03)},
    }

    assert script.table(scores).splitlines() == [
        "                        captioner         true captions",
        "token accuracy          0.500 +- 0.010",
        "agreement by the judge  0.250 +- 0.020    0.750 +- 0.030",
    ]


def test_a_name_that_is_no_text_is_written_as_json_can_hold_it(script: ModuleType, tmp_path: Path) -> None:
    name = b"caf\xe9.png".decode("utf-8", "surrogateescape")

    script.write_new(
        tmp_path / "new.jsonl", script.proposal_lines([name, "é.png"], [Proposal("a", 0.25), Proposal("ü", 0.5)])
    )

    lines = (tmp_path / "new.jsonl").read_text(encoding="utf-8").splitlines()
    assert lines[0] == '{"file_name": "é.png", "text": "ü", "confidence": 0.5}'
    assert json.loads(lines[1]) == {"file_name": name, "text": "a", "confidence": 0.25}
    with pytest.raises(FileExistsError):
        script.write_new(tmp_path / "new.jsonl", "other")
    assert len((tmp_path / "new.jsonl").read_text(encoding="utf-8").splitlines()) == 2

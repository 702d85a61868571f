"""evaluate.py with a judge and with the run's training pictures, and what it refuses of them."""

import json
import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from PIL import Image
from pipeline_parts import tiny_pipeline, tiny_unconditional

from unet_attn.data import load_image, to_tensor
from unet_attn.extractors import EXTRACTORS
from unet_attn.judge import Judge, JudgeSize
from unet_attn.measures import Estimate, nearest_pictures
from unet_attn.tokenizer import train_tokenizer

ROOT = Path(__file__).resolve().parent.parent
SIZE = JudgeSize(image_size=12, patch_size=4, dim=8, depth=1, heads=2, text_dim=8, text_depth=1, embedding_dim=8)


@pytest.fixture
def evaluate(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The script in this process, where its imports are already paid for."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    script = import_module("evaluate")

    def run(*arguments: str | Path) -> int:
        monkeypatch.setattr(sys, "argv", ["evaluate.py", "--num_pictures", "67", "--steps", "1", *map(str, arguments)])
        return script.main()

    return run


def noise_folder(folder: Path, *, count: int = 107, caption: str = "noise {}") -> Path:
    """Pictures of coloured noise; {} in the caption stands for the number of the picture."""
    folder.mkdir()
    pixels = torch.randint(0, 256, (count, 12, 12, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for number, picture in enumerate(pixels):
        Image.fromarray(picture.numpy()).save(folder / f"{number}.png")
    rows = [{"file_name": f"{number}.png", "text": caption.format(number)} for number in range(count)]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def saved_judge(folder: Path) -> Path:
    torch.manual_seed(0)
    judge = Judge(SIZE, train_tokenizer(["noise 0 1 2 3"], vocab_size=300, max_length=11))
    judge.record = {"held_out_agreement": 0.625}
    judge.save(folder)
    return folder


def test_a_judge_adds_the_agreement_beside_its_ceiling_and_its_features(
    evaluate: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, data, judge = tmp_path / "run", noise_folder(tmp_path / "data"), saved_judge(tmp_path / "judge")
    tiny_pipeline().save_pretrained(run)
    (run / "config.yaml").write_text(f"data: {{path: {data}}}\n", encoding="utf-8")

    assert evaluate(run, "--data.path", data, "--judge", judge, "--features", "judge") == 0

    report = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))
    assert 0 <= report["agreement"]["rate"]["value"] <= 1 and report["agreement"]["pictures"] == 67
    assert report["agreement"]["judge_record"] == {"held_out_agreement": 0.625}
    assert 0 <= report["agreement"]["real"]["value"] <= 1 and report["agreement"]["real"]["error"] > 0
    assert report["agreement"]["chance"] == pytest.approx(0.01)  # no caption occurs twice
    assert report["agreement"]["held_out"] is None  # nothing says that the judge is one of these data
    assert (report["real_pictures"], report["sampled_pictures"]) == (107, 67)
    assert report["extractor"] == "a judge's image transformer at 12 px" and len(report["extractor_weights"]) == 32
    # all noise is different, and the run was trained on it
    assert report["copies"]["rate_among_training"]["value"] == 0 and report["copies"]["training_pictures"] == 107
    assert report["loss"]["on_training_data"] is True
    assert report["loss"]["trained_on"] == report["loss"]["pictures"] == 107
    out = capsys.readouterr().out
    assert "loss on training data" in out and "new to the judge" not in out
    beside = re.search(r"caption agreement +0\.\d{3} \+- 0\.\d{3} \((.*)\)\n", out)[1]
    assert beside == f"their real pictures {shown(report['agreement']['real'])}, chance 0.010"
    excess = report["copies"]["excess"]
    assert excess["value"] == report["copies"]["rate"]["value"] and excess["error"] > 0.007
    assert f"near copies, excess      {shown(excess)}\n" in out
    assert "training pictures of one another 0.000 +- 0.007" in out  # half of Wilson's 1 / (67 + 1)
    assert "a judge's image transformer at 12 px; 12 px; 1 sampling steps; guidance 3.0; scheduler" in out
    ElementTree.parse(run / "evaluation.svg")  # raises where it is no XML


def shown(figure: dict[str, float]) -> str:
    return f"{figure['value']:.3f} +- {figure['error']:.3f}"


@pytest.mark.parametrize(
    ("record", "shown"),
    [
        ({}, ""),
        ({"held_out_agreement": 0.625, "data": "DATA", "trained_pictures": 97, "held_out_pictures": 10}, "0.625"),
        ({"held_out_agreement": 0.625, "data": "DATA", "trained_pictures": 96, "held_out_pictures": 10}, ""),
        ({"held_out_agreement": 0.625, "data": "other", "trained_pictures": 97, "held_out_pictures": 10}, ""),
    ],
)
def test_what_the_judge_found_of_its_own_pictures_stands_beside_those_data_alone(
    evaluate: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    record: dict[str, object],
    shown: str,
) -> None:
    run, data, judge = tmp_path / "run", noise_folder(tmp_path / "data"), saved_judge(tmp_path / "judge")
    tiny_pipeline().save_pretrained(run)
    about = json.loads((judge / "judge.json").read_text(encoding="utf-8"))
    about["record"] = {name: str(data) if value == "DATA" else value for name, value in record.items()}
    (judge / "judge.json").write_text(json.dumps(about), encoding="utf-8")

    assert evaluate(run, "--data.path", data, "--judge", judge, "--features", "judge") == 0

    said = re.search(r", pictures new to the judge (\S+), chance", capsys.readouterr().out)
    assert (said[1] if said else "") == shown


def test_the_ceiling_is_what_the_judge_finds_of_the_real_pictures_and_chance_what_the_blind_find(
    evaluate: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, data, judge = tmp_path / "run", noise_folder(tmp_path / "data", count=131), saved_judge(tmp_path / "judge")
    tiny_pipeline().save_pretrained(run)
    rows = [{"file_name": f"{n}.png", "text": "noise" if n < 30 else f"noise {n}"} for n in range(131)]
    (data / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    asked: list[tuple[torch.Tensor, list[str]]] = []

    def all_found(
        judge: Judge, pictures: torch.Tensor, captions: list[str], known: list[str], *, seed: int
    ) -> Estimate:
        asked.append((pictures, captions))
        return Estimate(0.75, 0.0)

    monkeypatch.setattr("unet_attn.judge.caption_agreement", all_found)
    assert evaluate(run, "--data.path", data, "--judge", judge, "--features", "judge") == 0

    (_, sampled_for), (pictures, captions) = asked
    assert sampled_for == captions and len(captions) == 67
    for picture, caption in zip(pictures, captions, strict=True):
        if caption != "noise":
            assert torch.equal(picture, to_tensor(load_image(data / f"{caption.split()[1]}.png")))
    agreement = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))["agreement"]
    assert agreement["real"]["value"] == 0.75
    share = captions.count("noise") / 67
    # "noise" is more frequent than all others, and they among themselves are found if it is not among the 100
    assert agreement["chance"] == pytest.approx(share + (1 - share) * (2 / 101) / 100, rel=0.02)


def test_pictures_without_a_caption_are_left_out_on_both_sides(
    evaluate: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, data, judge = tmp_path / "run", noise_folder(tmp_path / "data", count=150), saved_judge(tmp_path / "judge")
    tiny_pipeline().save_pretrained(run)
    lines = (data / "metadata.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    options = (run, "--data.path", data, "--judge", judge, "--features", "judge")

    (data / "metadata.jsonl").write_text("".join(lines[:103]), encoding="utf-8")
    assert evaluate(*options) == 0
    report = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))
    assert (report["real_pictures"], report["pictures"], report["without_caption"]) == (103, 150, 47)
    assert report["agreement"]["pictures"] == 67
    assert "without a caption        47 pictures, left out\n" in capsys.readouterr().out

    (data / "metadata.jsonl").write_text("".join(lines[:23]), encoding="utf-8")
    assert evaluate(run, "--data.path", data) == 2
    few = f"error: 23 of the 150 pictures in {data} have a caption: 64 are needed to measure a distance\n"
    assert capsys.readouterr().err == few


def test_a_model_without_text_is_compared_with_all_pictures(evaluate: Callable[..., int], tmp_path: Path) -> None:
    run, data, judge = tmp_path / "run", noise_folder(tmp_path / "data"), saved_judge(tmp_path / "judge")
    (data / "metadata.jsonl").unlink()
    tiny_unconditional().save_pretrained(run)

    assert evaluate(run, "--data.path", data, "--judge", judge, "--features", "judge") == 0

    report = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))
    assert report["real_pictures"] == 107 and report["without_caption"] is None and "agreement" not in report


def test_coloured_pictures_beside_a_grey_model_are_said_to_be_compared_in_grey(
    evaluate: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, data, judge = tmp_path / "run", noise_folder(tmp_path / "data"), saved_judge(tmp_path / "judge")
    tiny_pipeline(channels=1).save_pretrained(run)
    line = "compared in grey         the pictures are in colour, the run draws grey ones\n"
    options = (run, "--data.path", data, "--judge", judge, "--features", "judge")

    assert evaluate(*options) == 0
    assert line in capsys.readouterr().out
    for path in data.glob("*.png"):
        load_image(path).convert("L").convert("RGB").save(path)
    assert evaluate(*options) == 0
    assert "in grey" not in capsys.readouterr().out


@pytest.mark.parametrize("taken", ["x.json", "x.svg", "x_nearest.png"])
def test_what_is_not_of_an_earlier_evaluation_is_neither_overwritten_nor_deleted(
    evaluate: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str], taken: str
) -> None:
    run, data = tmp_path / "run", noise_folder(tmp_path / "data")
    tiny_pipeline().save_pretrained(run)
    (tmp_path / taken).write_text('{"kid": "a drawing of mine"}', encoding="utf-8")

    assert evaluate(run, "--data.path", data, "--json", tmp_path / "x.json") == 2

    said = f"{tmp_path / taken} is not from an earlier evaluation: move it away, or name another --json FILE"
    assert capsys.readouterr().err == f"error: {said}\n"
    assert sorted(path.name for path in tmp_path.glob("x*")) == [taken]
    assert (tmp_path / taken).read_text(encoding="utf-8") == '{"kid": "a drawing of mine"}'


def test_the_files_of_an_earlier_evaluation_are_replaced_and_others_beside_it_are_not(
    evaluate: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, data, judge = tmp_path / "run", noise_folder(tmp_path / "data"), saved_judge(tmp_path / "judge")
    tiny_pipeline().save_pretrained(run)
    options = (run, "--data.path", data, "--judge", judge, "--features", "judge")
    assert evaluate(*options) == 0  # its training pictures are not known: there is no sheet
    first = (run / "evaluation.json").stat().st_mtime_ns
    assert evaluate(*options) == 0
    assert (run / "evaluation.json").stat().st_mtime_ns > first

    (run / "evaluation_nearest.png").write_bytes(b"mine")
    assert evaluate(*options) == 2
    assert "evaluation_nearest.png is not from an earlier evaluation" in capsys.readouterr().err
    assert (run / "evaluation_nearest.png").read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("kept", "name", "on_training_data"),
    [(107, "loss on training data", True), (40, "loss, 40 of 107 trained on", None), (0, "validation loss", False)],
)
def test_the_loss_is_named_by_how_many_of_its_pictures_were_trained_on_wherever_they_lie(
    evaluate: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kept: int,
    name: str,
    on_training_data: bool | None,
) -> None:
    run, trained, judge = tmp_path / "run", noise_folder(tmp_path / "trained"), saved_judge(tmp_path / "judge")
    tiny_pipeline().save_pretrained(run)
    (run / "config.yaml").write_text(f"data: {{path: {trained}}}\n", encoding="utf-8")
    data = noise_folder(tmp_path / "data")
    for number in range(kept, 107):
        turned = load_image(data / f"{number}.png").transpose(Image.Transpose.ROTATE_90)
        turned.save(data / f"{number}.png")

    assert evaluate(run, "--data.path", data, "--judge", judge, "--features", "judge") == 0

    loss = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))["loss"]
    assert (loss["trained_on"], loss["on_training_data"]) == (kept, on_training_data)
    assert f"\n{name} " in capsys.readouterr().out


def test_what_a_judge_cannot_do_is_refused_in_one_line(
    evaluate: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, data, judge = tmp_path / "run", noise_folder(tmp_path / "data", count=71), saved_judge(tmp_path / "judge")
    tiny_pipeline().save_pretrained(run)
    tiny_unconditional().save_pretrained(tmp_path / "wordless")

    def refusal(*arguments: str | Path) -> str:
        assert evaluate(*arguments, "--data.path", data) == 2
        return capsys.readouterr().err

    few = refusal(run, "--judge", judge)
    assert few == "error: 71 different captions are too few to find one among 100\n"
    wordless = refusal(tmp_path / "wordless", "--judge", judge)
    assert wordless.endswith("was trained without text: there is no agreement with captions for --judge\n")
    assert refusal(run, "--features", "judge").startswith("error: --features judge needs --judge")
    assert "holds no judge" in refusal(run, "--judge", data)
    assert not (run / "evaluation.json").exists()


def test_the_pictures_most_like_a_training_picture_are_listed_and_drawn_above_it(
    evaluate: Callable[..., int], tmp_path: Path
) -> None:
    run, data, judge = tmp_path / "run", noise_folder(tmp_path / "data"), saved_judge(tmp_path / "judge")
    pipeline = tiny_pipeline()
    pipeline.save_pretrained(run)
    (run / "config.yaml").write_text(f"data: {{path: {data}}}\n", encoding="utf-8")
    options = ("--data.path", data, "--judge", judge, "--features", "judge", "--seed", 5)

    assert evaluate(run, *options) == 0

    nearest = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))["nearest"]
    assert len(nearest) == 16
    correlations = [each["correlation"] for each in nearest]
    assert correlations == sorted(correlations, reverse=True)
    first = nearest[0]
    generator = torch.Generator().manual_seed(first["seed"])
    sampled = pipeline(first["caption"], num_inference_steps=1, guidance_scale=3.0, generator=generator).images[0]
    trained = [to_tensor(load_image(data / f"{number}.png")) for number in range(107)]
    again = nearest_pictures(to_tensor(sampled)[None], trained)
    assert first["training_picture"] == str(data / f"{again.index[0]}.png")
    assert first["correlation"] == pytest.approx(again.correlation[0].item(), abs=0.02)

    sheet = Image.open(run / "evaluation_nearest.png")
    # 8 in a row; a picture of 12 px is enlarged to 96, with two lines of words and a gap beneath
    assert sheet.size == (8 * 102 + 6, 4 * 132 + 6)
    below = sheet.crop((6, 6 + 132, 102, 102 + 132)).resize((12, 12), Image.Resampling.NEAREST)
    assert torch.equal(to_tensor(below), trained[again.index[0]])

    (run / "config.yaml").unlink()
    assert evaluate(run, *options) == 0  # the training pictures are not known any more
    report = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))
    assert report["nearest"] == [] and "skipped" in report["copies"]
    assert not (run / "evaluation_nearest.png").exists()


def test_held_out_pictures_give_the_validation_loss_and_are_no_training_pictures(
    evaluate: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, data, judge = tmp_path / "run", noise_folder(tmp_path / "data"), saved_judge(tmp_path / "judge")
    tiny_pipeline().save_pretrained(run)
    section = f"data: {{path: {data}, validation_share: 0.3, on_error: skip}}\n"
    (run / "config.yaml").write_text(section, encoding="utf-8")
    (data / "broken.png").write_bytes(b"\x89PNG")

    assert (
        evaluate(run, "--data.path", data, "--judge", judge, "--features", "judge", "--json", tmp_path / "x.json") == 0
    )

    report = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))
    assert report["loss"]["on_training_data"] is False and 0 < report["loss"]["pictures"] < 60
    assert report["copies"]["training_pictures"] == 107 - report["loss"]["pictures"]
    assert (report["pictures"], report["skipped"]) == (107, 1)
    out = capsys.readouterr().out
    assert "validation loss" in out and "files skipped            1, 107 pictures read" in out
    assert (tmp_path / "x_nearest.png").exists() and (tmp_path / "x.svg").exists()
    assert not (run / "evaluation.json").exists()


def test_captions_that_are_all_the_same_leave_out_the_gap_alone(
    evaluate: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, data = tmp_path / "run", noise_folder(tmp_path / "data", caption="noise")
    tiny_pipeline().save_pretrained(run)

    assert evaluate(run, "--data.path", data) == 0

    loss = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))["loss"]
    assert "gap_exchanged" not in loss and loss["gap_empty"]["error"] > 0
    assert "gap, exchanged captions  not measured: all captions are the same" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--seed", "-1"), "--seed must be at least 0 and below 2^63, got -1"),
        (("--seed", str(2**63)), f"--seed must be at least 0 and below 2^63, got {2**63}"),
        (("--batch_size", "0"), "--batch_size must be at least 1, got 0"),
        (("--num_pictures", "0"), "0 sampled pictures are too few to measure a distance: 64 are needed"),
        (("--steps", "0"), "num_inference_steps must be a whole number of at least 1, got 0"),
        (("--guidance_scale", "nan"), "guidance_scale must be a finite number, got nan"),
        (("--inception_weights", "x.pth"), "--inception_weights are for --features inception"),
        (
            ("--features", "inception", "--inception_weights", "x.pth"),
            "there is no file x.pth with Inception's weights",
        ),
        (("--json", "figures.txt"), "--json must name a file that ends in .json, got figures.txt"),
        (("--json", "absent/x.json"), "there is no folder absent for --json absent/x.json"),
        (("--features", "vgg"), "argument --features: invalid choice: 'vgg'"),
    ],
)
def test_a_senseless_option_is_refused_in_one_line(
    evaluate: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    message: str,
) -> None:
    tiny_pipeline().save_pretrained(tmp_path / "run")
    noise_folder(tmp_path / "data", count=67)
    monkeypatch.chdir(tmp_path)

    try:
        code = evaluate("run", "--data.path", "data", *options)
    except SystemExit as stopped:  # argparse's own refusals
        code = stopped.code

    said = capsys.readouterr().err
    assert code == 2 and said.startswith(f"error: {message}") and said.count("\n") == 1
    assert sorted(path.name for path in (tmp_path / "run").glob("evaluation*")) == []


def test_the_choice_of_features_is_the_table_of_extractors(evaluate: Callable[..., int], capsys) -> None:
    with pytest.raises(SystemExit):
        evaluate("--help")

    assert f"--features {{{','.join(EXTRACTORS)}}}" in capsys.readouterr().out

"""evaluate.py with a judge and with the run's training pictures, and what it refuses of them."""

import json
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
from unet_attn.measures import nearest_pictures
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
    assert report["extractor"] == "a judge's image transformer at 12 px" and len(report["extractor_weights"]) == 32
    # all noise is different, and the run was trained on it
    assert report["copies"]["rate_among_training"]["value"] == 0 and report["copies"]["training_pictures"] == 107
    assert report["loss"]["on_training_data"] is True
    out = capsys.readouterr().out
    assert "loss on training data" in out and "(held-out real pairs 0.625, chance 0.010)" in out
    ElementTree.parse(run / "evaluation.svg")  # raises where it is no XML


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

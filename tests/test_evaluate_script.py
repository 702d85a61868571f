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

from unet_attn.judge import Judge, JudgeSize
from unet_attn.tokenizer import train_tokenizer

ROOT = Path(__file__).resolve().parent.parent
SIZE = JudgeSize(image_size=12, patch_size=4, dim=8, depth=1, heads=2, text_dim=8, text_depth=1, embedding_dim=8)


@pytest.fixture
def evaluate(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The script in this process, where its imports are already paid for."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    script = import_module("evaluate")

    def run(*arguments: str | Path) -> int:
        monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, arguments), "--num_pictures", "67", "--steps", "1"])
        return script.main()

    return run


def noise_folder(folder: Path, *, count: int = 107) -> Path:
    """Pictures of coloured noise, each with a caption of its own."""
    folder.mkdir()
    pixels = torch.randint(0, 256, (count, 12, 12, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for number, picture in enumerate(pixels):
        Image.fromarray(picture.numpy()).save(folder / f"{number}.png")
    rows = [{"file_name": f"{number}.png", "text": f"noise {number}"} for number in range(count)]
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
    assert report["extractor"].startswith("the image transformer of the judge")
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


def test_a_chart_draws_each_line_through_its_values_and_escapes_names(evaluate: Callable[..., int]) -> None:
    chart = import_module("_chart")

    svg = chart.line_chart({"a<b": [0.0, 2.0], "c": [1.0, 1.0]}, [0.1, 0.9], title="t", across="x", up="y")

    root = ElementTree.fromstring(svg)
    lines = root.findall("{http://www.w3.org/2000/svg}polyline")
    ends = [[tuple(map(float, point.split(","))) for point in line.get("points").split()] for line in lines]
    assert ends[0] == [(chart.LEFT, chart.HEIGHT - chart.BOTTOM), (chart.WIDTH - chart.RIGHT, chart.TOP)]
    assert ends[1][0][1] == ends[1][1][1] == (chart.HEIGHT - chart.BOTTOM + chart.TOP) / 2
    assert "a<b" in [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    with pytest.raises(ValueError, match="line 'c' has 1 values for 2 places"):
        chart.line_chart({"c": [1.0]}, [0.1, 0.9], title="t", across="x", up="y")

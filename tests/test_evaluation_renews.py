"""evaluate.py and what tells of a run."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from pipeline_parts import tiny_pipeline
from test_evaluate_script import evaluate, noise_folder, saved_judge  # noqa: F401  the first is a fixture


def test_an_evaluation_renews_the_report_and_the_card_of_its_run(
    evaluate: Callable[..., int],  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, data = tmp_path / "run", noise_folder(tmp_path / "data")
    tiny_pipeline().save_pretrained(run)
    (run / "config.yaml").write_text(f"data: {{path: {data}}}\ntrain: {{output_dir: {run}}}\n", encoding="utf-8")
    judge = saved_judge(tmp_path / "judge")

    assert evaluate(run, "--data.path", data, "--judge", judge, "--features", "judge") == 0

    kid = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))["kid"]
    assert str(run / "report.html") in capsys.readouterr().out
    for name in ("report.html", "README.md"):
        assert f"{1000 * kid:.2f}" in (run / name).read_text(encoding="utf-8").replace("−", "-")

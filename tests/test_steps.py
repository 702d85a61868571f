"""The table of schedulers, steps and guidance."""

import sys
from importlib import import_module
from pathlib import Path

import pytest
from pipeline_parts import tiny_pipeline
from test_evaluate_script import noise_folder, saved_judge

ROOT = Path(__file__).resolve().parent.parent


def table(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.setattr(sys, "argv", ["steps.py", *map(str, arguments)])
    return import_module("steps").main()


def test_each_combination_has_a_row_of_the_same_pictures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, judge = noise_folder(tmp_path / "data"), saved_judge(tmp_path / "judge")
    tiny_pipeline().save_pretrained(tmp_path / "run")
    schedulers = ["FlowMatchEulerDiscreteScheduler", "UniPCMultistepScheduler"]

    done = table(
        monkeypatch, tmp_path / "run", "--data.path", data, "--judge", judge, "--features", "judge",
        "--num_pictures", 67, "--scheduler", *schedulers, "--steps", 1, 3, "--guidance_scale", 1, 4,
    )  # fmt: skip

    assert done == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert [row[:3] for row in rows] == [
        [scheduler, steps, scale] for scheduler in schedulers for scale in ("1", "4") for steps in ("1", "3")
    ]
    assert all(" ± " in cell for row in rows for cell in row[3:6])
    # one step of either scheduler goes straight to the predicted picture
    assert rows[0][3:6] == rows[4][3:6]
    assert rows[0][3:6] != rows[2][3:6]


def test_a_scheduler_that_would_sample_wrongly_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_pipeline().save_pretrained(tmp_path / "run")
    assert table(monkeypatch, tmp_path / "run", "--data.path", tmp_path, "--scheduler", "DDIMScheduler") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --scheduler DDIMScheduler cannot sample a flow model") and error.count("\n") == 1

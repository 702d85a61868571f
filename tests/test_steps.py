"""The table of schedulers, steps and guidance, and whose numbers are measured where none are given."""

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest
from pipeline_parts import tiny_pipeline
from test_evaluate_script import noise_folder, saved_judge

from unet_attn.pipelines.text_to_image import TextToImagePipeline

ROOT = Path(__file__).resolve().parent.parent


def table(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    return script("steps", monkeypatch, *arguments)


def script(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
    return import_module(name).main()


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


def test_steps_and_guidance_are_by_default_the_pipelines_own_and_what_was_taken_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, data, judge = tmp_path / "run", noise_folder(tmp_path / "data"), saved_judge(tmp_path / "judge")
    parts = tiny_pipeline().components
    TextToImagePipeline(**parts, default_steps=2, default_guidance_scale=1.5).save_pretrained(run)
    options = (run, "--data.path", data, "--judge", judge, "--features", "judge", "--num_pictures", "67")

    reports = []
    for numbers in ((), ("--steps", "2", "--guidance_scale", "1.5"), ("--guidance_scale", "4")):
        assert script("evaluate", monkeypatch, *options, *numbers) == 0
        reports.append(json.loads((run / "evaluation.json").read_text(encoding="utf-8")))
    assert [(report["steps"], report["guidance_scale"]) for report in reports] == [(2, 1.5), (2, 1.5), (2, 4.0)]
    assert reports[0]["kid"] == reports[1]["kid"] != reports[2]["kid"]

    capsys.readouterr()
    assert table(monkeypatch, *options, "--steps", "2") == 0
    row = capsys.readouterr().out.splitlines()[-1]
    kid = f"{1000 * reports[0]['kid']:.1f} ± {1000 * reports[0]['kid_error']:.1f}"
    assert row.startswith(f"| FlowMatchEulerDiscreteScheduler | 2 | 1.5 | {kid} |")


def test_a_scheduler_that_would_sample_wrongly_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_pipeline().save_pretrained(tmp_path / "run")
    assert table(monkeypatch, tmp_path / "run", "--data.path", tmp_path, "--scheduler", "DDIMScheduler") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --scheduler DDIMScheduler cannot sample a flow model") and error.count("\n") == 1


def test_another_run_guides(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = noise_folder(tmp_path / "data")
    for seed in (0, 1):
        tiny_pipeline(seed=seed).save_pretrained(tmp_path / f"run{seed}")
    options = (tmp_path / "run0", "--data.path", data, "--num_pictures", "67", "--steps", "2")

    rows = []
    for guide in ((), ("--guide", tmp_path / "run1"), ("--guide", tmp_path / "run0")):
        assert table(monkeypatch, *options, "--guidance_scale", "3", *guide) == 0
        rows.append(capsys.readouterr().out.splitlines()[-1].split("|")[4:6])
    assert table(monkeypatch, *options, "--guidance_scale", "1") == 0
    unguided = capsys.readouterr().out.splitlines()[-1].split("|")[4:6]
    assert len({tuple(row) for row in rows}) == 3
    assert rows[2] == unguided  # a network that leads away from itself leads nowhere
    assert rows[0] != unguided

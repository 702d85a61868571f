"""A short torture (see tests/torture.py), and that it would tell of what it is there to find."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torture import Torture, differences, torture

STEPS = 8


@pytest.fixture(scope="module")
def tortured(tmp_path_factory: pytest.TempPathFactory) -> Torture:
    return torture(tmp_path_factory.mktemp("torture"), kills=5, minutes=3, seed=1, steps=STEPS)


def test_a_run_killed_again_and_again_is_the_straight_run(tortured: Torture) -> None:
    assert tortured.faults == []
    assert tortured.kills >= 5


def test_every_kind_of_damage_is_told(tortured: Torture, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(tortured.straight, run)
    assert differences(run, tortured.straight) == []

    weights = run / "checkpoints" / f"step-{STEPS:06d}" / "model.safetensors"
    tensors = load_file(weights)
    name = min(tensors)
    tensors[name].view(-1)[0] = torch.nextafter(tensors[name].view(-1)[0], torch.tensor(torch.inf))
    save_file(tensors, weights)
    metrics = run / "logs" / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    lines[2] = json.dumps(json.loads(lines[2]) | {"lr": 0.0})
    metrics.write_text("\n".join(lines) + "\n")
    (run / "samples" / "step-000004.png").unlink()
    (run / ".partial").mkdir()
    (run / ".partial" / "config.json").touch()
    (run / "model_index.json").write_text("{")

    assert [difference.split(":")[0] for difference in differences(run, tortured.straight)] == [
        ".partial/config.json is left over",
        "samples/step-000004.png is missing",
        f"checkpoints/step-{STEPS:06d}/model.safetensors differs in 1 tensors, {name} first",
        f"metrics.jsonl has {STEPS} lines of {STEPS} and differs from step 3",
        "the run folder does not load",
    ]

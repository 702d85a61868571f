"""FSDP2 as Accelerate sets it up, over two real processes: the run of one process, its files, and resuming across."""

import json
import shutil
from pathlib import Path

import numpy as np
import processes
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from sharded_run import train, train_tuned

from unet_attn.pipelines.text_to_image import TextToImagePipeline

OPTIONS = {
    "batch_size": 4,
    "max_steps": 4,
    "warmup_steps": 1,
    "learning_rate": 0.001,
    "ema_decay": 0.5,
    "checkpoint_every": 2,
    "keep_checkpoints": None,
    "sample_every": 4,
    "sample_prompts": ("thing 1",),
    "validate_every": 4,
    "ema_snapshot_every": 4,
    "gradient_checkpointing": True,
    "trackers": (),
}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    random = np.random.default_rng(0)
    for number in range(7):
        Image.fromarray(random.integers(0, 256, (8, 8), dtype=np.uint8)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"thing {number}")
    return folder


@pytest.fixture(scope="module", params=[pytest.param("adamw", marks=pytest.mark.slow), "muon"])
def runs(request: pytest.FixtureRequest, pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in one piece and the same one sharded, each taken over by the other from its middle."""
    folder = tmp_path_factory.mktemp(request.param)
    options = OPTIONS | {"optimizer": request.param, "gradient_accumulation_steps": 2}
    for name, sharded in (("one", False), ("two", True)):
        processes.run_group(train, pictures, folder / name, sharded, options, size=2 if sharded else 1)
    for name, sharded in (("one", True), ("two", False)):
        half = folder / f"{name} goes on"
        shutil.copytree(folder / name, half)
        shutil.rmtree(half / "checkpoints" / "step-000004")
        processes.run_group(train, pictures, half, sharded, options | {"resume": "latest"}, size=2 if sharded else 1)
    return folder


def saved(run: Path) -> dict[str, torch.Tensor]:
    files = (run / "checkpoints" / "step-000004").glob("*.safetensors")
    return {f"{file.stem}/{name}": value for file in files for name, value in load_file(file).items()}


@pytest.mark.parametrize("name", ["two", "one goes on", "two goes on"])
def test_a_sharded_run_is_the_run_of_one_process(runs: Path, name: str) -> None:
    one, other = saved(runs / "one"), saved(runs / name)

    assert other.keys() == one.keys()
    for key, value in one.items():  # where a gradient is rounding alone, AdamW makes steps of it
        torch.testing.assert_close(other[key], value, rtol=1e-3, atol=1e-4, msg=lambda text, key=key: f"{key}: {text}")
    lines = [(runs / run / "logs" / "metrics.jsonl").read_text().splitlines() for run in ("one", name)]
    for expected, got in zip(*[[json.loads(line) for line in run] for run in lines], strict=True):
        assert got["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)


def test_a_sharded_run_leaves_the_files_of_any_run(runs: Path) -> None:
    names = [
        {path.relative_to(runs / run).as_posix() for path in (runs / run).rglob("*") if path.is_file()}
        for run in ("one", "two")
    ]
    assert names[0] == names[1]
    assert "samples/step-000004.png" in names[1]

    pipeline = TextToImagePipeline.from_pretrained(runs / "two")
    averages = load_file(runs / "two" / "checkpoints" / "step-000004" / "ema.safetensors")
    for name, value in pipeline.unet.state_dict().items():
        assert torch.equal(value, averages[f"unet.{name}"])


@pytest.mark.slow
def test_a_sharded_tuning_to_few_steps_is_that_of_one_process(pictures: Path, tmp_path: Path) -> None:
    # averages that lag far behind show whether the pass that learns sees their weights
    options = OPTIONS | {"optimizer": "muon", "ema_decay": 0.9, "validate_every": None}
    for name, sharded in (("one", False), ("two", True)):
        processes.run_group(train_tuned, pictures, tmp_path / name, sharded, options, size=2 if sharded else 1)
    one, two = saved(tmp_path / "one"), saved(tmp_path / "two")
    assert two.keys() == one.keys()
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, rtol=1e-3, atol=1e-4, msg=lambda text, key=key: f"{key}: {text}")

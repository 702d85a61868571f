"""The README's commands and snippets run as they stand there, on a tiny data set and a tiny network."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
# makes the README's training a matter of seconds; its own options stay
TINY = (
    "--train.max_steps 2 --train.batch_size 4 --train.sample_every null --data.resolution 16 "
    "--unet.block_channels [8,16] --unet.attention_levels [1] --unet.dim_head 8 --text_encoder.init_args.dim 16"
)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.S)


def command(script: str, number: int = 0) -> list[str]:
    """The README's command that runs scripts/<script>, the first of them or a later one."""
    lines = [line for block in blocks("sh") for line in block.splitlines() if f"scripts/{script}" in line]
    assert lines, f"the README has no command with {script}"
    return shlex.split(lines[number])


def run(arguments: list[str], folder: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{shlex.join(arguments)}\n{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the README's reader has it, after its training command ran."""
    folder = tmp_path_factory.mktemp("readme")
    for name in ("scripts", "configs"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "my_pictures").mkdir()
    generator = np.random.default_rng(0)
    for i in range(6):
        pixels = generator.integers(0, 256, (20, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "my_pictures" / f"{i}.png")
        (folder / "my_pictures" / f"{i}.txt").write_text(f"a red cat number {i}", encoding="utf-8")
    run([*command("train.py"), *TINY.split()], folder)
    (folder / "runs" / "quickstart").symlink_to("mine")
    return folder


def test_the_training_command_leaves_a_pipeline(folder: Path) -> None:
    assert (folder / "runs/mine/model_index.json").is_file()
    assert len((folder / "runs/mine/logs/metrics.jsonl").read_text(encoding="utf-8").splitlines()) == 2
    # none were given: they are of the pictures' own captions
    prompts = yaml.safe_load((folder / "runs/mine/config.yaml").read_text(encoding="utf-8"))["train"]["sample_prompts"]
    assert prompts == [f"a red cat number {number}" for number in range(4)]


def test_the_tuning_command_leaves_a_pipeline_of_few_steps(folder: Path) -> None:
    run([*command("train.py", 1), "--train.max_steps", "2"], folder)
    index = json.loads((folder / "runs/mine-few-steps/model_index.json").read_text(encoding="utf-8"))
    assert index["scheduler"] == ["diffusers", "FlowMatchLCMScheduler"]
    assert (index["default_steps"], index["default_guidance_scale"]) == (4, 1.0)


def test_the_sampling_command_writes_pictures(folder: Path) -> None:
    run([*command("sample.py"), "--steps", "2"], folder)
    assert len(list((folder / "pictures").glob("*.png"))) == 2 * 4 + 1  # the pictures and their grid


def test_every_python_snippet_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_MODULES_CACHE", str(folder / "cache"))
    snippets = blocks("python")
    assert len(snippets) >= 3
    for snippet in snippets:
        exec(compile(snippet, "README.md", "exec"), {})


def test_the_files_that_the_readme_names_exist() -> None:
    tree = next(block for block in re.findall(r"```\n(.*?)```", README, flags=re.S) if "attention.py" in block)
    for name in re.findall(r"\b[a-z_]+\.py\b", tree):
        assert any((ROOT / place / name).is_file() for place in ("unet_attn", "pipelines", "scripts", "tests")), name
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target

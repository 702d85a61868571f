"""What `pip install unet-attn` gives: the attention, with torch and einops alone."""

import shutil
import subprocess
import sys
import venv
from importlib.metadata import distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

CODE = """
import importlib.util, sys
import torch
from unet_attn.attention import CrossAttention2d, MultiHeadAttention, SelfAttention2d
from unet_attn import EncoderLayer, multi_head_attention
from unet_attn.attention_extras import ExtendedMultiHeadAttention, OverPixels
from unet_attn.convert import from_torch

x = torch.randn(2, 12, 5, 7)
assert SelfAttention2d(12, heads=3, dim_head=4)(x).shape == x.shape
assert OverPixels(ExtendedMultiHeadAttention(12, 3, qk_norm=True))(x).shape == x.shape
tokens = torch.randn(2, 11, 12)
assert from_torch(torch.nn.MultiheadAttention(12, 3))(tokens, tokens, tokens).shape == tokens.shape
assert EncoderLayer(12, 3, 24)(tokens).shape == tokens.shape
for absent in ("diffusers", "transformers", "torchvision", "accelerate", "PIL"):
    assert importlib.util.find_spec(absent) is None, absent
try:
    import unet_attn.unet
except ModuleNotFoundError as error:
    print(error.name)
"""


def needed_by(names: set[str]) -> set[str]:
    """The distributions with all that they require in this environment."""
    from packaging.requirements import Requirement

    found, waiting = set(), set(names)
    while waiting:
        name = waiting.pop().lower()
        found.add(name)
        required = [Requirement(line) for line in distribution(name).requires or ()]
        wanted = {each.name.lower() for each in required if not each.marker or each.marker.evaluate({"extra": ""})}
        waiting |= wanted - found
    return found


@pytest.mark.slow
def test_the_wheel_gives_the_attention_with_torch_and_einops_alone(tmp_path: Path) -> None:
    for name in ("unet_attn", "pipelines"):
        shutil.copytree(ROOT / name, tmp_path / "source" / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / "source")
    # with the setuptools that torch has brought, so that nothing is fetched
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run([*build, "--wheel-dir", tmp_path, tmp_path / "source"], check=True)
    (wheel,) = tmp_path.glob("unet_attn-*.whl")

    venv.create(tmp_path / "clean", with_pip=True)
    python = tmp_path / "clean" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", wheel], check=True)
    required = [line for line in distribution("unet-attn").requires if "extra ==" not in line]
    assert sorted(line.split(">")[0] for line in required) == ["einops", "torch"]

    # the packages of this environment linked one by one: the same as installed, without fetching torch again
    (site,) = (tmp_path / "clean").glob("lib/python*/site-packages")
    for name in needed_by({"torch", "einops"}):
        for file in distribution(name).files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (site / top).exists():
                (site / top).symlink_to(distribution(name).locate_file(top))

    done = subprocess.run([python, "-I", "-c", CODE], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "diffusers"

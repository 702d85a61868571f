"""docs/attention.md: its code runs, and its figures are made by the script that it names."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from torch import nn
from torch.testing import assert_close

from unet_attn.attention_extras import OverPixels

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "attention.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_code_runs_and_the_shapes_are_as_it_says() -> None:
    names: dict[str, object] = {"network": SimpleNamespace(lowest=nn.Identity())}
    for block in BLOCKS:
        if "(unet" in block or "unet." in block.replace("unet_attn.", ""):
            continue  # a network of a peer, see test_diffusers_processor.py and test_other_networks.py
        exec(block, names)
        for statement, said in re.findall(r"^(\w+\.shape, \w+\.shape)\s+# (.*)$", block, re.MULTILINE):
            assert str(tuple(tuple(shape) for shape in eval(statement, names)))[1:-1] == said
    assert names["weights"].shape == (2, 4, 64, 64)
    assert len(names["network"].lowest) == 2


@pytest.mark.parametrize("flash", [False, True])
def test_the_code_for_the_lucidrains_unet_replaces_every_attention_and_changes_no_prediction(flash: bool) -> None:
    lucidrains = pytest.importorskip("denoising_diffusion_pytorch.denoising_diffusion_pytorch")
    torch.manual_seed(0)
    unet = lucidrains.Unet(16, dim_mults=(1, 2), attn_dim_head=5, attn_heads=3, flash_attn=flash)
    inputs = (torch.randn(2, 3, 8, 8), torch.tensor([3, 700]))
    expected = unet(*inputs)
    (block,) = (each for each in BLOCKS if "from_lucidrains" in each)
    exec(block, {"unet": unet})

    left = [name for name, each in unet.named_modules() if type(each) is lucidrains.Attention]
    assert not left
    names = ("downs.1.2", "mid_attn", "ups.0.2")
    assert all(isinstance(unet.get_submodule(name).attention, OverPixels) for name in names)
    assert_close(unet(*inputs), expected, atol=1e-5, rtol=1e-5)


def test_every_figure_of_the_page_is_there_and_small() -> None:
    figures = re.findall(r"!\[.*?\]\((figures/.*?)\)", PAGE)
    assert len(figures) == 3
    assert all((ROOT / "docs" / figure).stat().st_size < 300_000 for figure in figures)


def test_the_figures_are_made_by_the_script(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    for shade in range(0, 250, 50):
        Image.new("RGB", (40, 30), (shade, 90, 250 - shade)).save(tmp_path / "pictures" / f"{shade}.png")
    command = [sys.executable, ROOT / "scripts" / "figures.py", tmp_path / "pictures", "--steps", "3"]
    done = subprocess.run([*command, "--out", tmp_path / "figures"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made = {path.name: Image.open(path).size for path in (tmp_path / "figures").iterdir()}
    assert made.keys() == {path.name for path in (ROOT / "docs" / "figures").iterdir()} >= {"patches.png"}
    assert made["masks.png"] == Image.open(ROOT / "docs" / "figures" / "masks.png").size


@pytest.mark.parametrize("script", ["figures.py", "denoise_with_attention.py"])
def test_a_folder_without_pictures_is_refused_in_one_line(script: str, tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "scripts" / script, tmp_path / "absent", "--steps", "1"]
    out = ["--out", tmp_path / "figures"] if script == "figures.py" else []
    done = subprocess.run([*command, *out], capture_output=True, text=True)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and "absent holds" in done.stderr

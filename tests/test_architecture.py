"""What may import what, and other rules of the layout that a reader cannot see in one file."""

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest

import unet_attn

ROOT = Path(__file__).resolve().parent.parent

# "a <- b": b may import a, and through it what a may import. Nothing else of ours is imported by anything.
DIRECTION = """
attention <- transformer, blocks, convert, diffusers_processor
attention <- attention_extras <- convert
transformer, blocks, strict_loading <- unet, text_encoder
transformer <- image_transformer <- picture_model <- judge, captioner
measures <- evaluation, judge, conditioning
checkpoint, sampler <- picture_model
text_encoder, measures <- judge
transformer, measures <- captioner
objective, sampler, pipelines <- conditioning
faults <- metadata <- sources <- tables <- stream <- data <- inspection
faults <- images <- data_options <- items, tables
sampler <- items <- stream
cache, images <- checking <- data
cache <- tables
buckets <- data
ema, encodings, pipelines <- model <- watching
model, objective, pipelines <- consistency <- watching, training
conditioning, options, tracking, checkpoint, data <- watching <- training
clock <- training
sharding <- ema, optim, posthoc, divergence <- training
judge <- extractors <- feature_cache
cache <- feature_cache
ema, checkpoint <- posthoc <- training
faults <- scores, report_page
config_files <- run_record, options, scripts
checkpoint <- run_record <- tracking, watching, training
data <- tracking
charts, run_record, scores, report_page <- report
run_record, scores <- model_card
flow <- unet
flow, schedulers, loss_weights <- objective
blocks <- loss_weights <- model
attention, transformer, unet, text_encoder, flow, schedulers, data, tokenizer, sampler <- pipelines
pipelines <- training, evaluation <- scripts
processes <- scripts
ema, checkpoint, optim, tracking <- training
checkpoint, objective, optim, sampler <- options <- training
transformer, data <- evaluation
"""
PACKAGE_FILES = sorted([*ROOT.glob("unet_attn/*.py"), *ROOT.glob("pipelines/*.py")])
TORCH_ONLY = {"attention", "attention_extras", "transformer", "blocks", "image_transformer", "flow", "loss_weights"}
ALL_FILES = sorted([*PACKAGE_FILES, *ROOT.glob("scripts/*.py"), *ROOT.glob("tests/*.py")])


def allowed_imports(direction: str) -> dict[str, set[str]]:
    """Read the arrows into {importer: everything it may import}, the transitive closure."""
    allowed: dict[str, set[str]] = {}
    for line in direction.strip().splitlines():
        groups = [[name.strip() for name in group.split(",")] for group in line.split("<-")]
        for imported, importers in pairwise(groups):
            for importer in importers:
                allowed.setdefault(importer, set()).update(imported)
    for _ in range(len(allowed)):  # a chain is at most this long
        for names in allowed.values():
            names |= set().union(*(allowed.get(name, set()) for name in names))
    return allowed


def imported_modules(path: Path) -> Iterator[tuple[str, int]]:
    """Dotted names and lines of every import in a file, those inside functions too; `from a import b` gives a.b."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)


def our_name(dotted: str) -> str | None:
    """unet_attn.data.load_image -> data; unet_attn.pipelines.x -> pipelines; a lazy name -> its home; else None."""
    parts = dotted.split(".")
    if parts[0] != "unet_attn":
        return None
    if len(parts) > 1 and parts[1] in unet_attn.__all__:
        return our_name(unet_attn._MODULE_OF[parts[1]])
    return parts[1] if len(parts) > 1 else ""


def own_place(path: Path) -> str:
    """The name under which the direction knows a file."""
    return path.stem if path.parent.name == "unet_attn" else path.parent.name


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_arrows_are_read_transitively() -> None:
    allowed = allowed_imports("a, b <- c <- d\ne <- a")

    assert allowed == {"c": {"a", "b", "e"}, "d": {"a", "b", "c", "e"}, "a": {"e"}}


@pytest.mark.parametrize("path", PACKAGE_FILES, ids=relative)
def test_a_module_imports_only_what_stands_left_of_it(path: Path) -> None:
    place = own_place(path)
    allowed = allowed_imports(DIRECTION).get(place, set()) | ({place} if place == "pipelines" else set())

    wrong = [f"line {line}: {name}" for name, line in imported_modules(path) if our_name(name) not in {None, *allowed}]

    assert wrong == [], f"{relative(path)} may import of ours only {sorted(allowed)}"


def test_no_relative_imports() -> None:
    found = [(relative(path), line) for path in ALL_FILES for name, line in imported_modules(path) if name[0] == "."]

    assert found == []


@pytest.mark.parametrize("path", [path for path in PACKAGE_FILES if path.stem in TORCH_ONLY], ids=relative)
def test_the_networks_parts_need_only_torch_and_einops(path: Path) -> None:
    roots = {module.split(".")[0] for module, _ in imported_modules(path)}

    assert roots - set(sys.stdlib_module_names) <= {"torch", "einops", "unet_attn"}


def test_scaled_dot_product_attention_is_called_in_one_place() -> None:
    mentions = []
    for path in [*PACKAGE_FILES, *ROOT.glob("scripts/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None
            if name == "scaled_dot_product_attention":
                mentions.append(relative(path))

    assert mentions == ["unet_attn/attention.py"]


@pytest.mark.parametrize("path", ALL_FILES, ids=relative)
def test_a_file_is_short_enough_to_read(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())

    assert lines <= 400


def test_importing_the_attention_imports_no_diffusers() -> None:
    heavy = ("diffusers", "transformers", "accelerate", "torchvision", "jsonargparse", "PIL")
    code = f"import sys, unet_attn, unet_attn.attention; print([m for m in {heavy} if m in sys.modules])"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent)

    assert done.stdout.strip() == "[]"


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, unet_attn; print(sorted(unet_attn.__all__) == unet_attn.__all__, 'torch' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent)

    assert done.stdout.strip() == "True False"


def test_attention_copied_alone_into_another_project_works(tmp_path: Path) -> None:
    shutil.copy(ROOT / "unet_attn" / "attention.py", tmp_path / "borrowed.py")
    code = (
        "import sys; sys.modules['unet_attn'] = None\n"  # importing ours would raise
        "import torch, borrowed\n"
        "x = torch.randn(2, 12, 5, 7, generator=torch.Generator().manual_seed(0))\n"
        "print(tuple(borrowed.SelfAttention2d(12, heads=3, dim_head=4)(x).shape))"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)

    assert done.stderr == ""
    assert done.stdout.strip() == "(2, 12, 5, 7)"


@pytest.mark.parametrize("name", unet_attn.__all__)
def test_each_lazy_name_is_its_modules_own(name: str) -> None:
    assert getattr(unet_attn, name) is getattr(import_module(unet_attn._MODULE_OF[name]), name)
    assert name in dir(unet_attn)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    expected = re.escape("no attribute 'UNet'; it offers AttentionChoice, AttentionHead, AttnUNet2D")
    with pytest.raises(AttributeError, match=expected):
        _ = unet_attn.UNet  # type: ignore[attr-defined]

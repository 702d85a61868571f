"""Saved pipelines in stock diffusers, in processes of their own: with our package hidden, offline, and with it."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import FlowMatchLCMScheduler
from diffusers.utils.dynamic_modules_utils import get_relative_imports
from pipeline_parts import StubUNet, quiet, scheduler_for, seeds, tiny_pipeline, tiny_unconditional, tiny_unet

from unet_attn.pipelines.image_to_image import ImageToImagePipeline
from unet_attn.pipelines.inpaint import InpaintPipeline
from unet_attn.pipelines.interpolate import InterpolationPipeline
from unet_attn.pipelines.portable import _with_names_of_its_own, bundle_source, code_files
from unet_attn.pipelines.text_to_image import TextToImagePipeline
from unet_attn.text_encoder import PretrainedText, TextEncoder
from unet_attn.unet import AttnUNet2D

BUNDLED = {
    AttnUNet2D: "unet_attn.unet",
    TextEncoder: "unet_attn.text_encoder",
    PretrainedText: "unet_attn.text_encoder",
    TextToImagePipeline: "unet_attn.pipelines.text_to_image",
    ImageToImagePipeline: "unet_attn.pipelines.image_to_image",
    InpaintPipeline: "unet_attn.pipelines.inpaint",
    InterpolationPipeline: "unet_attn.pipelines.interpolate",
}

HIDE = """
import socket, sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "unet_attn":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def refuse(*arguments):
    raise OSError("no network in this test")

sys.meta_path.insert(0, Hidden())
socket.socket.connect = refuse
"""

COMMON = """
import json, pickle
import numpy as np
import torch
from diffusers import DDIMScheduler, DiffusionPipeline

def load(folder, **options):
    pipe = DiffusionPipeline.from_pretrained(folder, trust_remote_code=True, **options)
    pipe.set_progress_bar_config(disable=True)
    return pipe

def picture(pipe):
    generator = [torch.Generator().manual_seed(seed) for seed in (3, 4)]
    return pipe(["a red heart", "cloud upload"], num_inference_steps=3, generator=generator, output_type="np").images
"""


def run(code: str, cache: Path, *arguments: Path, hide: bool = True) -> subprocess.CompletedProcess:
    """Run the code in a fresh process, away from the checkout, with an empty cache for code files."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    cache.mkdir()
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", (HIDE if hide else "") + COMMON + code]
        + [str(argument) for argument in arguments],
        cwd=cache,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def picture(pipe):
    prompts = ["a red heart", "cloud upload"]
    return pipe(prompts, num_inference_steps=3, generator=seeds(3, 4), output_type="np").images


def few_steps():
    """A pipeline of two steps, each from new noise, which says so itself."""
    pipe = tiny_pipeline()
    scheduler = FlowMatchLCMScheduler.from_config(pipe.scheduler.config)
    parts = pipe.components | {"scheduler": scheduler}
    return quiet(TextToImagePipeline(**parts, default_steps=2, default_guidance_scale=1.0))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A saved pipeline, and its pictures."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("saved") / "pipe"
    pipe = tiny_pipeline()
    pipe.save_pretrained(folder)
    pipe.save_pretrained(folder, variant="copy")
    few_steps().save_pretrained(folder.with_name("few"))
    return folder, picture(pipe), picture(pipe.to(torch.bfloat16))


@pytest.fixture(scope="module")
def hidden_run(saved, tmp_path_factory):
    """One process without our package that loads the folder in several ways, and saves it again."""
    folder, _, _ = saved
    out = tmp_path_factory.mktemp("hidden")
    code = """
folder, out = sys.argv[1:]
pipe = load(folder)
assert "unet_attn" not in sys.modules and pipe.unet.__class__.__module__.startswith("diffusers_modules")
np.save(f"{out}/plain.npy", picture(pipe))
np.save(f"{out}/bfloat16.npy", picture(load(folder, dtype=torch.bfloat16)))
np.save(f"{out}/variant.npy", picture(load(folder, variant="copy")))
stem = json.load(open(f"{folder}/model_index.json"))["_class_name"][0]
np.save(f"{out}/custom.npy", picture(load(folder, custom_pipeline=stem)))
pickle.loads(pickle.dumps(pipe.unet))
pipe.save_pretrained(f"{out}/again")
np.save(f"{out}/again.npy", picture(load(f"{out}/again")))
shown = pipe("a red heart", num_inference_steps=2, return_attention=True).attention[0]
print("words:", *shown.words, float((shown.maps.sum(dim=0) - 1).abs().max()) < 1e-5)
few = load(f"{folder}/../few")
generator = [torch.Generator().manual_seed(seed) for seed in (3, 4)]
np.save(f"{out}/few.npy", few(["a red heart", "cloud upload"], generator=generator, output_type="np").images)
print("own numbers:", few.config.default_steps, few.config.default_guidance_scale, few.scheduler.__class__.__name__)
try:
    pipe.scheduler = DDIMScheduler()
    pipe("a")
except ValueError as error:
    print("refused:", error)
try:
    type(pipe).from_pretrained(folder)
except ValueError as error:
    print("own loader:", error)
"""
    return out, run(code, out / "cache", folder, out)


@pytest.mark.parametrize("name", ["plain", "variant", "custom", "again"])
def test_without_our_package_stock_diffusers_gives_bit_identical_pictures(saved, hidden_run, name):
    np.testing.assert_array_equal(np.load(hidden_run[0] / f"{name}.npy"), saved[1])


def test_stock_diffusers_samples_with_the_pipelines_own_numbers_and_levels(hidden_run):
    assert "own numbers: 2 1.0 FlowMatchLCMScheduler\n" in hidden_run[1].stdout
    options = {"num_inference_steps": 2, "guidance_scale": 1.0, "generator": seeds(3, 4), "output_type": "np"}
    expected = few_steps()(["a red heart", "cloud upload"], **options).images
    np.testing.assert_array_equal(np.load(hidden_run[0] / "few.npy"), expected)


def test_bfloat16_loads_to_the_pictures_of_bfloat16(saved, hidden_run):
    np.testing.assert_array_equal(np.load(hidden_run[0] / "bfloat16.npy"), saved[2])


def test_stock_loading_says_nothing_alarming(hidden_run):
    for sign in ("Expected types", "require the following packages", "not initialized", "Traceback"):
        assert sign not in hidden_run[1].stderr


def test_a_bundle_refuses_what_the_package_refuses(hidden_run):
    assert "refused: DDIMScheduler cannot sample a flow model" in hidden_run[1].stdout
    assert "own loader: AttnUNet2D needs unet-attn installed" in hidden_run[1].stdout


def test_a_bundle_shows_its_attention(hidden_run):
    assert "words: a red heart True" in hidden_run[1].stdout


def test_a_folder_saved_again_without_our_package_has_the_same_code(saved, hidden_run):
    def code(folder):
        return {path.relative_to(folder): path.read_text() for path in folder.rglob("*.py")}

    again = hidden_run[0] / "again"
    assert code(again) == code(saved[0])
    assert json.loads((again / "model_index.json").read_text()) == json.loads(
        (saved[0] / "model_index.json").read_text()
    )
    np.testing.assert_array_equal(picture(quietly_loaded(again)), saved[1])


def quietly_loaded(folder):
    pipe = TextToImagePipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def other_version(folder: Path, target: Path) -> None:
    """A copy of the pipeline as of another release, whose U-Net answers with the opposite sign."""
    shutil.copytree(folder, target)
    index = json.loads((target / "model_index.json").read_text())
    old = index["unet"][0]
    new = old[:-12] + "0" * 12
    for path in sorted((target / "unet").glob("*.py")):
        text = path.read_text().replace(old, new).replace("UNet2DOutput(sample=x)", "UNet2DOutput(sample=-x)")
        path.with_name(path.name.replace(old, new)).write_text(text)
        path.unlink()
    index["unet"][0] = new
    (target / "model_index.json").write_text(json.dumps(index))


def test_a_folder_saved_again_loads_in_a_fresh_process_and_two_versions_do_not_mix(saved, hidden_run, tmp_path):
    again = hidden_run[0] / "again"
    other_version(again, tmp_path / "other")
    code = """
again, other, out = sys.argv[1:]
first, second = load(again), load(other)
np.save(f"{out}/second.npy", picture(second))
np.save(f"{out}/first.npy", picture(first))
np.save(f"{out}/reloaded.npy", picture(load(again)))
pickle.loads(pickle.dumps(first.unet))
"""
    run(code, tmp_path / "cache", again, tmp_path / "other", tmp_path)
    for name in ("first", "reloaded"):
        np.testing.assert_array_equal(np.load(tmp_path / f"{name}.npy"), saved[1])
    assert np.abs(np.load(tmp_path / "second.npy") - saved[1]).max() > 0.01


def test_with_our_package_stock_diffusers_and_our_class_give_the_installed_classes(saved, hidden_run, tmp_path):
    code = """
import sys
for number, folder in enumerate(sys.argv[1:3]):
    pipe = load(folder)
    assert type(pipe).__module__ == "unet_attn.pipelines.text_to_image", type(pipe)
    assert type(pipe.unet).__module__ == "unet_attn.unet"
    np.save(f"{sys.argv[3]}/{number}.npy", picture(pipe))
import unet_attn
own = unet_attn.TextToImagePipeline.from_pretrained(folder)
np.save(f"{sys.argv[3]}/2.npy", picture(own))
"""
    run(code, tmp_path / "cache", saved[0], hidden_run[0] / "again", tmp_path, hide=False)
    for number in range(3):
        np.testing.assert_array_equal(np.load(tmp_path / f"{number}.npy"), saved[1])


def test_another_kind_of_pipeline_with_a_guide_loads_without_our_package(tmp_path):
    pipe = InpaintPipeline.from_pipe(tiny_pipeline(), guide_unet=tiny_unet(seed=3))
    pipe.save_pretrained(tmp_path / "pipe")
    # loaded weights lie elsewhere in memory than those just made, which alone changes the last bit of a product
    pipe = InpaintPipeline.from_pretrained(tmp_path / "pipe")
    image, mask = np.full((12, 12, 3), 0.25), np.zeros((12, 12, 1))
    mask[:6] = 1.0
    options = {"num_inference_steps": 3, "output_type": "np"}
    expected = pipe("a red heart", image, mask, generator=seeds(3), **options).images
    code = """
pipe = load(sys.argv[1])
assert "unet_attn" not in sys.modules and type(pipe).__name__ == "InpaintPipeline"
image, mask = np.full((12, 12, 3), 0.25), np.zeros((12, 12, 1))
mask[:6] = 1.0
generator = [torch.Generator().manual_seed(3)]
options = {"num_inference_steps": 3, "output_type": "np"}
np.save(sys.argv[2] + "/found.npy", pipe("a red heart", image, mask, generator=generator, **options).images)
"""
    run(code, tmp_path / "cache", tmp_path / "pipe", tmp_path)
    np.testing.assert_array_equal(np.load(tmp_path / "found.npy"), expected)


# --- the files themselves


def test_the_index_names_code_files_and_no_module_script_or_path(saved):
    folder = saved[0]
    index = json.loads((folder / "model_index.json").read_text())
    assert index["format_version"] == 1 and index["prediction_type"] == "flow"
    for name, (module, class_name) in {
        "": index["_class_name"],
        **{k: index[k] for k in ("unet", "text_encoder")},
    }.items():
        assert re.fullmatch(r"unet_attn_[a-z_]+_[0-9a-f]{12}", module) and class_name
        assert (folder / name / f"{module}.py").is_file() and (folder / name / f"{module}_code.py").is_file()
    assert index["tokenizer"] == ["transformers", "PreTrainedTokenizerFast"]
    assert index["scheduler"] == ["diffusers", "FlowMatchEulerDiscreteScheduler"]
    text = "".join(path.read_text() for path in folder.rglob("*.json"))
    assert str(Path(__file__).parent.parent) not in text and str(folder) not in text
    for name in ("unet", "text_encoder"):
        assert json.loads((folder / name / "config.json").read_text())["format_version"] == 1


@pytest.mark.parametrize("module", sorted(set(BUNDLED.values())))
def test_a_bundle_stands_alone_and_defines_no_name_twice(module):
    source = bundle_source(module)
    tree = ast.parse(source)
    sources: dict[str, set[str]] = {}
    for node in tree.body:
        for name, origin in defined_names(node):
            sources.setdefault(name, set()).add(origin)
    assert {name: found for name, found in sources.items() if len(found) > 1} == {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module.split(".")[0] != "unet_attn", ast.unparse(node)
        if isinstance(node, ast.Import):
            assert all(name.name.split(".")[0] != "unet_attn" for name in node.names), ast.unparse(node)


def test_two_modules_with_a_private_helper_of_one_name_do_not_take_each_others():
    first = "def _reason():\n    return 1\n\n\ndef f():\n    return _reason()"
    second = "def _reason():\n    return 2\n\n\ndef g(x):\n    return _reason() + x._reason"
    renamed = _with_names_of_its_own(second, "unet_attn.images", {"unet_attn.sources": first})
    names = {}
    exec(first + "\n" + renamed, names)
    assert names["f"]() == 1
    assert names["g"](SimpleNamespace(_reason=5)) == 7


def test_a_bundle_that_reads_pictures_names_the_broken_one(tmp_path):
    (tmp_path / "broken.png").write_bytes(b"")
    (tmp_path / "bundle.py").write_text(bundle_source("unet_attn.pipelines.image_to_image"))
    code = "import sys; sys.path.insert(0, sys.argv[1]); import bundle; bundle.load_image(sys.argv[1] + '/broken.png')"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.stderr.strip().splitlines()[-1].endswith("broken.png: the file is empty")


def defined_names(node):
    """The names that a top-level statement binds, each with what it binds it to."""
    if isinstance(node, ast.Import):
        yield from ((alias.asname or alias.name.split(".")[0], f"module {alias.name}") for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)
    elif isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name, f"line {node.lineno}"
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (
            (name.id, f"line {node.lineno}") for t in targets for name in ast.walk(t) if isinstance(name, ast.Name)
        )


@pytest.mark.parametrize("cls", list(BUNDLED))
def test_diffusers_sees_the_bundle_from_the_shim_and_nothing_else(cls, tmp_path):
    files = code_files(cls)
    for name, text in ((files.shim_name, files.shim), (files.bundle_name, files.bundle)):
        (tmp_path / f"{name}.py").write_text(text)
    assert get_relative_imports(tmp_path / f"{files.shim_name}.py") == [files.bundle_name]
    assert get_relative_imports(tmp_path / f"{files.bundle_name}.py") == []


def test_other_code_has_another_name(monkeypatch):
    before = code_files(AttnUNet2D)
    assert code_files(AttnUNet2D) == before
    monkeypatch.setattr("unet_attn.pipelines.portable.bundle_source", lambda module: before.bundle + "\n# changed\n")
    after = code_files(AttnUNet2D)
    assert after.shim_name != before.shim_name and after.bundle_name != before.bundle_name


def test_saving_again_leaves_no_code_file_of_an_earlier_release(tmp_path):
    pipe = tiny_unconditional()
    (tmp_path / "unet").mkdir()
    for stale in (tmp_path / "unet" / "unet_attn_unet_0123456789ab_code.py", tmp_path / "notes.py"):
        stale.write_text("")
    pipe.save_pretrained(tmp_path)
    assert len(list((tmp_path / "unet").glob("*.py"))) == 2
    assert (tmp_path / "notes.py").exists()


def test_a_part_of_a_class_that_cannot_go_along_is_refused_before_anything_is_written(tmp_path):
    pipe = TextToImagePipeline(StubUNet(), scheduler_for("flow"))
    with pytest.raises(ValueError, match="unet is a StubUNet of the module pipeline_parts"):
        pipe.save_pretrained(tmp_path / "pipe")
    assert not (tmp_path / "pipe").exists()


def test_pushing_to_the_hub_uploads_a_folder_that_loads(tmp_path, monkeypatch):
    """Only the hub is played, by a local folder; what would be uploaded is what diffusers hands over."""
    from diffusers.utils import hub_utils

    def create_repo(repo_id, **options):
        return types.SimpleNamespace(repo_id=repo_id)

    def upload_folder(*, repo_id, folder_path, **options):
        shutil.copytree(folder_path, tmp_path / repo_id)
        return repo_id

    monkeypatch.setattr(hub_utils, "create_repo", create_repo)
    monkeypatch.setattr(hub_utils, "upload_folder", upload_folder)
    pipe = tiny_pipeline()
    assert pipe.push_to_hub("someone/hearts") == "someone/hearts"
    np.testing.assert_array_equal(picture(quietly_loaded(tmp_path / "someone" / "hearts")), picture(pipe))
    index = json.loads((tmp_path / "someone" / "hearts" / "model_index.json").read_text())
    assert (tmp_path / "someone" / "hearts" / f"{index['_class_name'][0]}.py").is_file()

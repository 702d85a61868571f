"""Compile and export: no graph breaks, and networks that compute the same outside torch."""

import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
from pipeline_parts import text_parts, tiny_pipeline, tiny_unet
from torch import Tensor, nn
from torch.export import Dim
from torch.testing import assert_close

from unet_attn.attention import CrossAttention2d, MultiHeadAttention, SelfAttention2d
from unet_attn.attention_extras import (
    ExtendedMultiHeadAttention,
    LinearAttention2d,
    RelativeOverPixels,
    RotaryOverPixels,
)
from unet_attn.pipelines.captions import tokenize
from unet_attn.pipelines.text_to_image import TextToImagePipeline
from unet_attn.text_encoder import TextEncoder

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = ["a red heart", "cloud upload over the sea"]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def extended() -> ExtendedMultiHeadAttention:
    return ExtendedMultiHeadAttention(12, 3, kv_heads=1, qk_norm=True, memory_tokens=2)


MODULES = {
    "self": (SelfAttention2d(12, 3, 4), lambda b: (randn(b, 12, 3, 5),)),
    "cross": (CrossAttention2d(12, 7, 3, 4), lambda b: (randn(b, 12, 3, 5), randn(b, 5, 7), torch.ones(b, 5))),
    "tokens": (MultiHeadAttention(12, 3), lambda b: (*[randn(b, 5, 12)] * 3, torch.ones(b, 5, 5))),
    "extended": (extended(), lambda b: (*[randn(b, 5, 12)] * 3, torch.ones(b, 5))),
    "rotary": (RotaryOverPixels(extended()), lambda b: (randn(b, 12, 3, 5),)),
    "relative": (RelativeOverPixels(extended(), reach=2), lambda b: (randn(b, 12, 3, 5),)),
    "linear": (LinearAttention2d(12, 3), lambda b: (randn(b, 12, 3, 5),)),
}


class PlainUNet(nn.Module):
    """The tiny U-Net as tensors in, a tensor out."""

    def __init__(self) -> None:
        super().__init__()
        self.unet = tiny_unet()

    def forward(self, sample: Tensor, timestep: Tensor, text: Tensor, mask: Tensor) -> Tensor:
        return self.unet(sample, timestep, text, mask, return_dict=False)[0]


def unet_inputs(batch: int, height: int, width: int, tokens: int) -> tuple[Tensor, ...]:
    mask = (torch.arange(tokens) < 2).long().expand(batch, -1).contiguous()
    return randn(batch, 3, height, width), torch.linspace(5, 900, batch), randn(batch, tokens, 12, seed=1), mask


class PlainTextEncoder(nn.Module):
    """The tiny text encoder as tensors in, a tensor out."""

    def __init__(self) -> None:
        super().__init__()
        self.text_encoder, _ = text_parts()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.text_encoder(input_ids, attention_mask).last_hidden_state


def text_inputs(batch: int, tokens: int) -> tuple[Tensor, ...]:
    mask = (torch.arange(tokens) < tokens - 1).long().expand(batch, -1).contiguous()
    return torch.arange(batch * tokens).reshape(batch, tokens) % 97, mask


def gradients_of(network: nn.Module, output: Tensor) -> list[Tensor]:
    """Of a loss that weighs every number of the output differently."""
    return torch.autograd.grad((output * randn(*output.shape, seed=2)).sum(), list(network.parameters()))


@pytest.mark.parametrize("name", MODULES)
def test_each_module_compiles_without_a_graph_break(name: str) -> None:
    # aot_eager traces and differentiates the whole graph and leaves out the minutes of code generation
    module, inputs = MODULES[name]
    torch.compiler.reset()
    compiled = torch.compile(module.eval(), fullgraph=True, backend="aot_eager")
    for batch in (2, 3):
        assert_close(compiled(*inputs(batch)), module(*inputs(batch)), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_the_unet_compiles_without_a_graph_break() -> None:
    unet = PlainUNet()
    torch.compiler.reset()
    compiled = torch.compile(unet, fullgraph=True, backend="aot_eager")
    for sizes in ((2, 12, 16, 5), (3, 12, 16, 5)):
        assert_close(compiled(*unet_inputs(*sizes)), unet(*unet_inputs(*sizes)), atol=1e-5, rtol=1e-4)


# batch, height and width of the pictures, tokens
UNET_SIZES = ((2, 12, 16, 5), (3, 8, 20, 7), (5, 20, 8, 3), (4, 8, 20, 9))
TEXT_SIZES = ((2, 5), (3, 7), (5, 4), (4, 9))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's own compiler needs a C++ compiler")
@pytest.mark.parametrize("name", ["U-Net", "text encoder"])
def test_torchs_own_compiler_gives_the_same_as_sizes_change_and_is_done_after_a_few(name: str) -> None:
    network, inputs, sizes = {
        "U-Net": (PlainUNet(), unet_inputs, UNET_SIZES),
        "text encoder": (PlainTextEncoder(), text_inputs, TEXT_SIZES),
    }[name]
    torch.compiler.reset()
    # with it, torch 2.14 takes the first caption's length for every one's, and fails at a second size of pictures
    compiled = torch.compile(network, fullgraph=True, options={"layout_optimization": False})
    for number, size in enumerate(sizes):
        with torch.compiler.set_stance("fail_on_recompile" if number == 3 else "default"):
            output = compiled(*inputs(*size))
        expected = network(*inputs(*size))
        assert_close(output, expected, atol=1e-5, rtol=1e-5)
        assert_close(gradients_of(network, output), gradients_of(network, expected), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["cross", "tokens"])
def test_a_module_that_gives_its_weights_compiles_and_is_exported_under_autocast_too(name: str) -> None:
    module, inputs = MODULES[name]
    torch.compiler.reset()
    compiled = torch.compile(module.eval(), fullgraph=True, backend="aot_eager")
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled), torch.no_grad():
            expected = module(*inputs(2), return_weights=True)
            assert_close(compiled(*inputs(2), return_weights=True), expected, atol=1e-2, rtol=1e-2)
            exported = torch.export.export(module, inputs(2), {"return_weights": True}).module()
            assert_close(exported(*inputs(2), return_weights=True), expected, atol=1e-2, rtol=1e-2)


def test_the_unet_is_exported_by_torch_for_any_batch_size_and_caption_length() -> None:
    unet, batch, tokens = PlainUNet(), Dim("batch"), Dim("tokens")
    axes = (
        {0: batch, 2: 4 * Dim("rows", min=2), 3: 4 * Dim("columns", min=2)},
        {0: batch},
        *[{0: batch, 1: tokens}] * 2,
    )
    exported = torch.export.export(unet, unet_inputs(2, 12, 16, 5), dynamic_shapes=axes).module()
    for sizes in ((5, 8, 20, 3), (3, 28, 12, 7)):
        assert_close(exported(*unet_inputs(*sizes)), unet(*unet_inputs(*sizes)), atol=1e-5, rtol=1e-4)


# ----------------------------------------------------------------------------------------------------------------- ONNX


def export(run: Path, *options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "scripts" / "export.py", run, "--onnx", *options]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    run = tmp_path_factory.mktemp("export") / "run"
    tiny_pipeline().save_pretrained(run)
    done = export(run)
    assert done.returncode == 0, done.stderr
    assert "agree with torch" in done.stdout
    return run / "onnx"


@pytest.mark.slow
@pytest.mark.parametrize("prediction_type", ["flow", "epsilon", "v_prediction", "sample"])
def test_the_folder_samples_the_same_pictures_where_torch_is_not_installed(
    exported: Path, prediction_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = tiny_pipeline(prediction_type)
    latents = randn(2, 3, 16, 12)
    options = {"num_inference_steps": 4, "guidance_scale": 3.0, "negative_prompt": "blue"}
    expected = pipeline(PROMPTS, latents=latents, output_type="np", **options).images

    # the networks are those of every type; what differs lies in the settings
    folder = shutil.copytree(exported, tmp_path / "onnx")
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from export import settings_of

    (folder / "settings.json").write_text(json.dumps(settings_of(pipeline)))
    np.save(tmp_path / "latents.npy", latents.numpy())
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import numpy as np; from pathlib import Path; from sample import NumpySampler\n"
        "latents, sampler = np.load('../latents.npy'), NumpySampler(Path('.'))\n"
        f"pictures = sampler.sample({PROMPTS}, latents, steps=4, negative_prompt='blue')\n"
        "np.save('../pictures.npy', pictures)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert np.abs(np.load(tmp_path / "pictures.npy") - expected).max() < 1e-4


@pytest.mark.slow
def test_the_folders_sampler_writes_pictures_and_refuses_what_does_not_fit(exported: Path, tmp_path: Path) -> None:
    from PIL import Image

    def sample(*options: str) -> subprocess.CompletedProcess:
        command = [sys.executable, exported / "sample.py", *options, "--out", tmp_path]
        return subprocess.run(command, capture_output=True, text=True)

    done = sample("--prompt", *PROMPTS, "--steps", "2", "--seed", "7", "--height", "16")
    assert done.returncode == 0 and done.stdout.startswith("wrote 2 pictures"), done.stderr
    assert Image.open(tmp_path / "00008-cloud-upload-over-the-sea.png").size == (12, 16)
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    done = sample("--prompt", *PROMPTS, "--steps", "2", "--seed", "7", "--height", "16")
    assert (done.returncode, done.stderr) == (0, "")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == written
    done = sample("--prompt", *PROMPTS, "--steps", "3", "--seed", "7", "--height", "16")
    assert "note: 00007-a-red-heart.png is another picture, so this one is 00007-a-red-heart-2.png" in done.stderr
    assert len(list(tmp_path.iterdir())) == 4
    assert all((tmp_path / name).read_bytes() == content for name, content in written.items())

    done = sample("--width", "15")
    assert done.returncode == 2 and done.stderr.strip() == "error: width must be a multiple of 4, got 15"
    done = sample("--steps", "1001")
    assert done.returncode == 2 and "steps must be from 1 to 1000" in done.stderr
    for scale, said in {
        "nan": "must be a finite number, got nan",
        "-inf": "got -inf",
        "1e39": "numbers overflow",
    }.items():
        done = sample("--prompt", PROMPTS[0], "--steps", "3", f"--guidance_scale={scale}")
        assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert len(list(tmp_path.iterdir())) == 4


def test_the_folders_sampler_names_a_picture_by_its_prompt_and_overwrites_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    pytest.importorskip("onnxruntime")
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from _numpy_sampler import name_of, write_picture

    assert name_of(3, "") == "00003.png" and name_of(3, " A red/Heart: ") == "00003-a-red-heart.png"
    assert name_of(7, "b" * 300) == f"00007-{'b' * 40}.png"
    path, grey, black = tmp_path / "00003.png", Image.new("L", (5, 3), 90), Image.new("L", (5, 3))
    assert write_picture(grey, path) == write_picture(grey, path) == path
    assert write_picture(black, path) == write_picture(black, path) == tmp_path / "00003-2.png"
    (tmp_path / "00003-3.png").write_text("notes")
    assert write_picture(Image.new("RGB", (5, 3)), path).name == "00003-4.png"
    assert Image.open(path).getpixel((0, 0)) == 90 and (tmp_path / "00003-3.png").read_text() == "notes"


def small_sampler(monkeypatch: pytest.MonkeyPatch, *, has_text: bool, **schedule: object) -> "NumpySampler":  # noqa: F821
    """The folder's sampler with networks that answer 0."""
    pytest.importorskip("onnxruntime")
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from _numpy_sampler import NumpySampler
    from export import schedule_of

    scheduler = diffusers.DDIMScheduler(**schedule)
    sampler = NumpySampler.__new__(NumpySampler)
    sampler.settings = {
        "default_steps": 2,
        "default_guidance_scale": 3.0,
        "prediction_type": "epsilon",
        "schedule": schedule_of(scheduler, "epsilon"),
    }
    sampler.text_encoder = object() if has_text else None
    sampler.encode = lambda captions: {"encoder_hidden_states": np.zeros((len(captions), 1, 1))}
    sampler.unet = type("Zeros", (), {"run": lambda self, names, inputs: (np.zeros_like(inputs["sample"]),)})()
    return sampler


def test_the_folders_sampler_tells_of_guidance_that_there_is_not_and_refuses_text_for_a_model_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    latents = np.zeros((1, 3, 4, 4), np.float32)
    plain, told = (small_sampler(monkeypatch, has_text=has_text) for has_text in (False, True))
    for options, name in (
        ({"prompts": ["a"]}, "prompt"),
        ({"prompts": [""], "negative_prompt": "a"}, "negative_prompt"),
    ):
        with pytest.raises(ValueError, match=f"trained without text: it takes no {name}$"):
            plain.sample(latents=latents, **options)
    with pytest.warns(UserWarning, match="guidance_scale has no effect on a model without text"):
        plain.sample([""], latents, guidance_scale=7.0)
    with pytest.warns(UserWarning, match="negative_prompt has no effect at guidance_scale 1"):
        told.sample(["a"], latents, guidance_scale=1.0, negative_prompt="b")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for scale in (None, 1.0, 3.0):
            plain.sample([""], latents, guidance_scale=scale)
            told.sample(["a"], latents, guidance_scale=scale)
        told.sample(["a"], latents, negative_prompt="b")


def test_the_folders_sampler_refuses_an_offset_past_the_last_trained_step(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = small_sampler(monkeypatch, has_text=False, num_train_timesteps=20, steps_offset=1)
    with pytest.raises(ValueError, match=r"steps_offset=1 comes to timestep 20 in 20 steps, and 19 is .* trained"):
        sampler.noise_levels(20)
    assert [time for time, _, _ in sampler.noise_levels(10)] == [*range(19, 0, -2), 0]


def test_the_settings_have_the_pipelines_own_numbers_and_a_scheduler_that_the_sampler_lacks_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from export import settings_of

    pipe = TextToImagePipeline(**tiny_pipeline().components, default_steps=2, default_guidance_scale=1.5)
    settings = settings_of(pipe)
    assert (settings["default_steps"], settings["default_guidance_scale"]) == (2, 1.5)
    with pytest.raises(
        ValueError, match="the exported sampler knows no guide_unet: save the pipeline with guide_unet="
    ):
        settings_of(TextToImagePipeline.from_pipe(pipe, guide_unet=tiny_unet(seed=3)))
    for name in ("FlowMatchLCMScheduler", "UniPCMultistepScheduler"):
        pipe.scheduler = getattr(diffusers, name).from_config(pipe.scheduler.config)
        with pytest.raises(ValueError, match=f"the exported sampler knows FlowMatchEuler.*, not {name}: save the"):
            settings_of(pipe)


@pytest.mark.parametrize("limit", [3, 6])
def test_a_text_encoder_is_tried_with_no_more_tokens_than_it_takes(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import export

    lengths = []

    def run(network: nn.Module, *cases: dict[str, Tensor]) -> None:
        lengths.extend(network(**case).shape[1] for case in cases)

    monkeypatch.setattr(export, "write_onnx", lambda network, inputs, *rest: run(network, inputs))
    monkeypatch.setattr(export, "check_onnx", lambda network, cases, path: run(network, *cases))
    export.export_text_encoder(TextEncoder(97, dim=12, depth=1, heads=3, max_length=limit), limit, tmp_path / "x.onnx")
    assert lengths == [min(5, limit), limit, 3]


def test_the_folders_sampler_reads_control_tokens_in_a_caption_as_the_text_that_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import _numpy_sampler
    from export import settings_of

    pipe, captions = tiny_pipeline(), ["<pad> heart <eos> x", "cloud"]
    monkeypatch.setattr(_numpy_sampler.onnxruntime, "InferenceSession", lambda path: None)
    (tmp_path / "settings.json").write_text(json.dumps(settings_of(pipe)))
    pipe.tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = _numpy_sampler.NumpySampler(tmp_path).tokenizer.encode_batch(captions)
    assert [each.ids for each in found] == tokenize(captions, pipe.tokenizer, pipe.text_encoder).input_ids.tolist()


@pytest.mark.slow
def test_an_export_overwrites_nothing(exported: Path) -> None:
    done = export(exported.parent)
    assert done.returncode == 2 and "already exists" in done.stderr and "Traceback" not in done.stderr


def test_a_folder_that_is_no_run_is_refused_in_one_line(tmp_path: Path) -> None:
    done = export(tmp_path, "--out", str(tmp_path / "out"))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: ") and str(tmp_path) in done.stderr
    assert not (tmp_path / "out").exists()

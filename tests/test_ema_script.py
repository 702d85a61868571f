"""scripts/ema.py: complete pipelines with the averages that were asked for, and what it refuses."""

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from diffusers import DiffusionPipeline
from pipeline_parts import quiet, seeds, tiny_pipeline, tiny_unconditional
from tiny_config import write_config
from torch import Tensor, nn
from torch.testing import assert_close

from unet_attn.model import TextConditionalUNet
from unet_attn.pipelines.text_to_image import TextToImagePipeline
from unet_attn.posthoc import PowerFunctionEMA, write_snapshot

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
STEPS, EVERY = 65, 5
WIDE = 0.13  # a length between which and the tracked ones lies something


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script as a module, so that no test needs a process of its own."""
    sys.path.insert(0, str(SCRIPTS))
    spec = importlib.util.spec_from_file_location("ema_script", SCRIPTS / "ema.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.remove(str(SCRIPTS))
    return module


def trained(pipeline: TextToImagePipeline, run: Path) -> PowerFunctionEMA:
    """Stir the weights of `pipeline` for some steps and leave a run with snapshots. Returns the directly tracked."""
    model = TextConditionalUNet(pipeline.unet, pipeline.text_encoder, pipeline.tokenizer)
    generator = torch.Generator().manual_seed(5)
    ema, direct = PowerFunctionEMA(model), PowerFunctionEMA(model, (WIDE,))
    for step in range(1, STEPS + 1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.01 * torch.randn(parameter.shape, generator=generator)
        ema.update(model)
        direct.update(model)
        if step % EVERY == 0:
            write_snapshot(run, step, ema)
    pipeline.save_pretrained(run)
    (run / "config.yaml").write_text("data: {}\n")
    return direct


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PowerFunctionEMA]:
    run = tmp_path_factory.mktemp("runs") / "run"
    return run, trained(tiny_pipeline(), run)


@pytest.fixture
def run(finished: tuple[Path, PowerFunctionEMA], tmp_path: Path) -> Path:
    """A copy of the run that a test may spoil."""
    return Path(shutil.copytree(finished[0], tmp_path / "run"))


def weights(pipeline: DiffusionPipeline) -> dict[str, Tensor]:
    parts = {"unet": pipeline.unet, "text_encoder": pipeline.text_encoder}
    return dict(nn.ModuleDict({name: part for name, part in parts.items() if part is not None}).named_parameters())


def assert_close_to(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Within the accuracy of a fit, on weights that moved by far more."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert_close(found[name].detach(), value, atol=2e-3, rtol=0, msg=name)


def test_each_length_becomes_a_pipeline_for_us_and_for_diffusers(
    script: ModuleType, finished: tuple[Path, PowerFunctionEMA], tmp_path: Path, capsys
) -> None:
    run, direct = finished
    out = tmp_path / "averages"

    assert script.main([str(run), "--length", "0.1", str(WIDE), "--out", str(out)]) == 0

    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.splitlines()[0] == "13 snapshots up to step 65"
    assert f"length 0.1: error of the fit 0.0 %, written to {out / 'length-0.1'}" in printed.out
    assert sorted(path.name for path in out.iterdir()) == ["length-0.1", "length-0.13"]
    wide = out / "length-0.13"
    ours = quiet(TextToImagePipeline.from_pretrained(wide))
    assert_close_to(weights(ours), direct.averages[WIDE])
    moved = (direct.averages[WIDE]["unet.conv_in.weight"] - weights(tiny_pipeline())["unet.conv_in.weight"]).abs().max()
    assert moved > 0.05
    assert not torch.equal(
        TextToImagePipeline.from_pretrained(out / "length-0.1").unet.conv_in.weight, ours.unet.conv_in.weight
    )

    stock = quiet(DiffusionPipeline.from_pretrained(wide, trust_remote_code=True))
    call = {"num_inference_steps": 3, "output_type": "pt"}
    assert torch.equal(
        stock("a red heart", generator=seeds(7), **call).images, ours("a red heart", generator=seeds(7), **call).images
    )
    about = json.loads((wide / "ema.json").read_text())
    assert (about["length"], about["step"]) == (WIDE, STEPS)
    assert 0 < about["fit_error"] < 0.05
    assert (wide / "config.yaml").read_text() == "data: {}\n"
    assert str(run) not in (wide / "model_index.json").read_text()


def test_an_earlier_step_of_a_model_without_text(script: ModuleType, tmp_path: Path, capsys) -> None:
    from unet_attn.checkpoint import load_checkpoint

    run = tmp_path / "run"
    trained(tiny_unconditional(), run)

    assert script.main([str(run), "--length", "0.05", "--step", "40"]) == 0

    made = TextToImagePipeline.from_pretrained(run / "ema" / "length-0.05")
    wanted = load_checkpoint(run / "ema_snapshots" / "step-000040").tensors["ema_length_0.05"]
    assert weights(made).keys() == wanted.keys()
    for name, value in wanted.items():
        assert_close(weights(made)[name].detach(), value)
    assert "8 snapshots up to step 40" in capsys.readouterr().out


def test_a_run_that_learned_its_uncertainty_is_averaged_without_it(
    script: ModuleType, scripts: Callable[[str], ModuleType], tmp_path: Path, capsys
) -> None:
    train = {"max_steps": 4, "warmup_steps": 0, "sample_every": None, "validate_every": None}
    config = write_config(tmp_path, **train, ema_snapshot_every=1)
    assert scripts("train").main(["--config", str(config), "--objective.loss_weighting", "uncertainty"]) == 0

    assert script.main([str(tmp_path / "run"), "--length", "0.1"]) == 0, capsys.readouterr().err

    averaged, published = (
        weights(TextToImagePipeline.from_pretrained(tmp_path / "run" / folder)) for folder in ("ema/length-0.1", "")
    )
    assert averaged.keys() == published.keys()
    assert not torch.equal(averaged["unet.conv_in.weight"], published["unet.conv_in.weight"])


def test_a_length_that_the_snapshots_cannot_express_is_made_with_a_warning(
    script: ModuleType, run: Path, capsys
) -> None:
    assert script.main([str(run), "--length", "0.005"]) == 0

    warning = capsys.readouterr().err
    assert "warning: these snapshots cannot express length 0.005: the error of the fit is " in warning
    assert "they can from about 0.025 to 0.245, and more of them" in warning
    assert (run / "ema" / "length-0.005" / "model_index.json").is_file()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--length", "0.3"], "above 0 and at most 0.28, got 0.3"),
        (["--length", "-0.1"], "above 0 and at most 0.28, got -0.1"),
        (["--length", "0.05", "0.05000001"], "two of the lengths would be written to"),
        (["--length", "0.1", "--step", "7"], "no snapshot of step 7: there are 5, 10, 15"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    script: ModuleType, run: Path, capsys, options: list[str], message: str
) -> None:
    assert script.main([str(run), *options]) == 2

    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error
    assert not (run / "ema").exists()


def test_a_run_that_kept_no_snapshots_is_told_how_to(script: ModuleType, run: Path, capsys) -> None:
    shutil.rmtree(run / "ema_snapshots")

    assert script.main([str(run), "--length", "0.1"]) == 2

    assert "has no snapshots of averaged weights: they are kept with --train.ema_snapshot_every" in (
        capsys.readouterr().err
    )


def test_a_folder_that_is_no_run_is_refused(script: ModuleType, run: Path, tmp_path: Path, capsys) -> None:
    (run / "model_index.json").unlink()

    assert script.main([str(tmp_path / "nothing"), "--length", "0.1"]) == 2
    assert script.main([str(run), "--length", "0.1"]) == 2

    errors = capsys.readouterr().err
    assert "nothing is no folder" in errors
    assert "is no saved pipeline: it has no model_index.json" in errors


def test_snapshots_of_another_model_are_refused(script: ModuleType, run: Path, capsys) -> None:
    tiny_unconditional().save_pretrained(run)

    assert script.main([str(run), "--length", "0.1"]) == 2

    error = capsys.readouterr().err
    assert "are of another model than its pipeline: there is no 'text_encoder." in error
    assert list((run / "ema").glob("*")) == []


def test_what_is_in_the_way_is_left_alone(script: ModuleType, run: Path, capsys) -> None:
    taken = run / "ema" / "length-0.1"
    taken.mkdir(parents=True)
    (taken / "mine.txt").write_text("mine")

    assert script.main([str(run), "--length", "0.07", "0.1"]) == 2

    assert "length-0.1 already exists" in capsys.readouterr().err
    assert [path.name for path in (run / "ema").rglob("*")] == ["length-0.1", "mine.txt"]

"""The training loop: independent of its layout, exact when resumed, undisturbed by watching, safe against NaN."""

import json
import os
import shutil
import signal
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, ProjectConfiguration
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler
from PIL import Image
from safetensors.torch import load_file
from torch import nn

from unet_attn import clock
from unet_attn.data import CaptionedImages, DataOptions
from unet_attn.model import TextConditionalUNet
from unet_attn.objective import Objective
from unet_attn.options import TrainOptions, check_start
from unet_attn.pipelines.text_to_image import TextToImagePipeline
from unet_attn.sampler import SampleKey
from unet_attn.text_encoder import TextEncoder
from unet_attn.tokenizer import train_tokenizer
from unet_attn.training import Trainer
from unet_attn.unet import AttnUNet2D

PICTURES = 11


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    random = np.random.default_rng(0)
    for number in range(PICTURES):
        Image.fromarray(random.integers(0, 256, (8, 8), dtype=np.uint8)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"thing {number}")
    return folder


class TroubledImages(CaptionedImages):
    """Real pictures that turn into infinity, or send a signal, in certain steps."""

    infinite_in: frozenset[int] = frozenset()
    signal_in: int | None = None

    def __getitem__(self, key: int | SampleKey) -> dict[str, object]:
        item = super().__getitem__(key)
        if key.step in self.infinite_in and key.position == 1:
            item["image"] = torch.full_like(item["image"], torch.inf)
        if key.step == self.signal_in and key.position == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return item


def small_model(data: CaptionedImages, *, has_text: bool = True) -> TextConditionalUNet:
    torch.manual_seed(0)
    tokenizer = train_tokenizer([caption for variants in data.captions for caption in variants], 300, 16)
    unet = AttnUNet2D(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        block_channels=(8, 16),
        attention_levels=(1,),
        dim_head=8,
        context_dim=12 if has_text else None,
    )
    # the output starts at zero: without this the loss of a few steps would hardly depend on the weights
    nn.init.normal_(unet.conv_out.weight, std=0.1)
    unet.conv_in = nn.Sequential(unet.conv_in, nn.Dropout(0.2))
    if not has_text:
        return TextConditionalUNet(unet)
    return TextConditionalUNet(unet, TextEncoder(len(tokenizer), dim=12, depth=1, heads=2, max_length=16), tokenizer)


def trainer_for(
    pictures: Path,
    output_dir: Path,
    *,
    data: CaptionedImages | None = None,
    has_text: bool = True,
    objective: Objective | None = None,
    **options: object,
) -> Trainer:
    defaults = {
        "batch_size": 4,
        "max_steps": 6,
        "warmup_steps": 1,
        "learning_rate": 0.02,
        "ema_decay": 0.5,
        "checkpoint_every": 3,
        "sample_every": None,
        "validate_every": None,
    }
    options = TrainOptions(output_dir=str(output_dir), **{**defaults, **options})
    data = data or CaptionedImages(DataOptions(path=str(pictures), resolution=8), channels=1)
    model = small_model(data, has_text=has_text)
    if options.gradient_accumulation_steps > 1:
        model.unet.conv_in[1].p = 0.0  # its draws belong to the micro-batch
    accelerator = Accelerator(
        cpu=True, log_with="tensorboard", project_config=ProjectConfiguration(logging_dir=str(output_dir / "logs"))
    )
    return Trainer(
        model,
        objective or Objective(FlowMatchEulerDiscreteScheduler()),
        data,
        options,
        accelerator,
        config="a: 1\n",
        resume_from=check_start(options, num_processes=1),
    )


def metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "logs" / "metrics.jsonl").read_text().splitlines()]


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    folder = run / "checkpoints" / f"step-{step:06d}"
    files = ("model", "ema", "optimizer")
    return {
        f"{file}/{name}": value for file in files for name, value in load_file(folder / f"{file}.safetensors").items()
    }


def assert_same_run(got: Path, expected: Path, step: int) -> None:
    """Bitwise: weights, averages, optimizer and the recorded losses, rates and norms."""
    ours, theirs = weights(got, step), weights(expected, step)
    assert sorted(ours) == sorted(theirs)
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    recorded = ("step", "loss", "lr", "grad_norm", "pictures_seen")
    assert [[line[key] for key in recorded] for line in metrics(got)] == [
        [line[key] for key in recorded] for line in metrics(expected)
    ]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_killed_after_a_checkpoint_and_resumed_equals_the_straight_run(
    pictures: Path, tmp_path: Path, optimizer: str
) -> None:
    assert trainer_for(pictures, tmp_path / "straight", optimizer=optimizer).run()

    # killed after step 5: a checkpoint at 3, metrics beyond it, the last line torn
    killed = tmp_path / "killed"
    shutil.copytree(tmp_path / "straight", killed)
    shutil.rmtree(killed / "checkpoints" / "step-000006")
    lines = (killed / "logs" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (killed / "logs" / "metrics.jsonl").write_text("".join(lines[:4]) + lines[4][:20])

    resumed = trainer_for(pictures, killed, optimizer=optimizer, resume="latest")
    assert resumed.step == 3
    assert resumed.run()

    assert_same_run(killed, tmp_path / "straight", 6)
    assert resumed.ema.updates == 6


def test_a_run_stopped_by_a_signal_saves_and_goes_on_as_if_never_stopped(pictures: Path, tmp_path: Path) -> None:
    assert trainer_for(pictures, tmp_path / "straight").run()
    handler = signal.getsignal(signal.SIGTERM)
    data = TroubledImages(DataOptions(path=str(pictures), resolution=8), channels=1)
    data.signal_in = 4

    stopped = trainer_for(pictures, tmp_path / "stopped", data=data)
    assert stopped.run() is False
    assert stopped.step == 4
    assert signal.getsignal(signal.SIGTERM) is handler
    assert trainer_for(pictures, tmp_path / "stopped", resume="latest").run()

    assert_same_run(tmp_path / "stopped", tmp_path / "straight", 6)


def test_a_run_stopped_in_a_step_that_is_skipped_saves_the_weights_from_before_it(
    pictures: Path, tmp_path: Path
) -> None:
    def troubled(signal_in: int | None) -> TroubledImages:
        data = TroubledImages(DataOptions(path=str(pictures), resolution=8), channels=1)
        data.infinite_in, data.signal_in = frozenset({4}), signal_in
        return data

    assert trainer_for(pictures, tmp_path / "straight", data=troubled(None), ema_snapshot_every=2).run()
    stopped = tmp_path / "stopped"
    assert trainer_for(pictures, stopped, data=troubled(4), ema_snapshot_every=2).run() is False
    assert (stopped / "checkpoints" / "step-000004" / "manifest.json").exists()
    assert trainer_for(pictures, stopped, data=troubled(None), ema_snapshot_every=2, resume="latest").run()

    assert_same_run(stopped, tmp_path / "straight", 6)
    for run in (stopped, tmp_path / "straight"):
        assert sorted(path.name for path in (run / "ema_snapshots").iterdir()) == ["step-000002", "step-000006"]


def test_gradients_of_half_precision_are_unscaled_once_where_a_sharded_model_has_frozen_parameters(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert trainer_for(pictures, tmp_path / "plain").run()
    scaled = trainer_for(pictures, tmp_path / "scaled")
    scaled.model.register_parameter("frozen", nn.Parameter(torch.zeros(3), requires_grad=False))
    # what Accelerate sets up for FSDP2 in fp16, but for the slices and the half precision
    accelerator, scaler = scaled.accelerator, torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaled.optimizer = AcceleratedOptimizer(scaled.optimizer.optimizer, scaler=scaler)
    accelerator.scaler, accelerator.native_amp = scaler, True
    monkeypatch.setattr(accelerator.state, "_mixed_precision", "fp16")
    monkeypatch.setattr(accelerator.state, "distributed_type", DistributedType.FSDP)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    monkeypatch.setattr(accelerator.state, "fsdp_plugin", plugin, raising=False)
    assert scaled.run()

    # a power of 2 is divided away to the bit
    assert_same_run(tmp_path / "scaled", tmp_path / "plain", 6)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_micro_batches_give_the_run_of_the_whole_batch(pictures: Path, tmp_path: Path, optimizer: str) -> None:
    # AdamW multiplies rounding about tenfold a step at 0.02 (in float64 the two runs agree to 1e-14): hence the rate
    options = {"optimizer": optimizer, "learning_rate": 0.005}
    whole = trainer_for(pictures, tmp_path / "whole", **options)
    whole.model.unet.conv_in[1].p = 0.0
    whole.run()
    trainer_for(pictures, tmp_path / "parts", gradient_accumulation_steps=4, **options).run()

    for got, expected in zip(metrics(tmp_path / "parts"), metrics(tmp_path / "whole"), strict=True):
        assert got["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        # both optimizers ignore the gradient's scale: a window divided wrongly shows in the norm alone, fourfold
        assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
        assert got["lr"] == expected["lr"]


def test_the_loss_of_this_model_depends_on_its_weights(pictures: Path, tmp_path: Path) -> None:
    # guards the tests above: with weights that hardly matter they would hold for any arithmetic
    trainer_for(pictures, tmp_path / "fast").run()
    trainer_for(pictures, tmp_path / "slow", learning_rate=0.01, muon_learning_rate=0.01).run()
    last = [metrics(tmp_path / name)[-1]["loss"] for name in ("fast", "slow")]

    assert abs(last[0] / last[1] - 1) > 1e-3


def test_sampling_saving_and_logging_change_nothing_in_training(pictures: Path, tmp_path: Path) -> None:
    trainer_for(pictures, tmp_path / "unwatched", checkpoint_every=100).run()
    watched = trainer_for(
        pictures, tmp_path / "watched", checkpoint_every=1, sample_every=1, sample_prompts=("thing 1", "thing 2")
    )
    watched.run()

    assert_same_run(tmp_path / "watched", tmp_path / "unwatched", 6)
    assert all(module.training for module in watched.model.modules())
    assert sorted(path.name for path in (tmp_path / "watched" / "samples").iterdir()) == [
        f"step-{step:06d}.png" for step in range(1, 7)
    ]


def test_the_run_folder_is_a_pipeline_with_the_averaged_weights(pictures: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainer = trainer_for(pictures, run)
    trainer.model.unet.conv_in = trainer.model.unet.conv_in[0]  # the saved class has no dropout
    trainer = Trainer(
        trainer.model, trainer.objective, trainer.data, trainer.options, trainer.accelerator, config="a: 1\n"
    )
    trainer.run()
    pipeline = TextToImagePipeline.from_pretrained(run)

    for name, value in pipeline.unet.state_dict().items():
        torch.testing.assert_close(value, trainer.ema.averages[f"unet.{name}"], rtol=0, atol=0)
        assert not torch.equal(value, trainer.parameters[f"unet.{name}"])
    assert (run / "config.yaml").read_text() == "a: 1\n"
    assert [path.name for path in run.iterdir() if path.name.startswith(".")] == []


def test_a_finished_run_is_not_changed_by_resuming_it(pictures: Path, tmp_path: Path, capsys) -> None:
    trainer_for(pictures, tmp_path).run()
    before, recorded = weights(tmp_path, 6), metrics(tmp_path)
    shutil.rmtree(tmp_path / "unet")

    assert trainer_for(pictures, tmp_path, resume="latest").run()

    assert "already at 6 steps" in capsys.readouterr().out
    assert metrics(tmp_path) == recorded
    assert all(torch.equal(value, before[name]) for name, value in weights(tmp_path, 6).items())
    assert (tmp_path / "unet" / "config.json").exists()


def test_what_is_published_or_known_of_the_data_is_not_made_twice(pictures: Path, tmp_path: Path) -> None:
    made = []

    class Known(CaptionedImages):
        def fingerprint(self) -> str:
            made.append("fingerprint")
            return super().fingerprint()

    trainer = trainer_for(pictures, tmp_path, data=Known(DataOptions(path=str(pictures), resolution=8), channels=1))
    publish = trainer.watcher.publish
    trainer.watcher.publish = lambda: (made.append(f"pipeline of {trainer.step}"), publish())
    trainer.run()

    assert made == ["fingerprint", "pipeline of 3", "pipeline of 6"]


def test_a_longer_limit_at_resume_adds_exactly_the_difference(pictures: Path, tmp_path: Path) -> None:
    trainer_for(pictures, tmp_path).run()
    trainer_for(pictures, tmp_path, resume="latest", max_steps=8).run()

    assert [line["step"] for line in metrics(tmp_path)] == list(range(1, 9))


def test_a_run_by_the_clock_ends_on_time_with_a_cool_down_and_a_pipeline(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = count()
    monkeypatch.setattr(clock, "monotonic", lambda: 0.05 * next(ticks))  # a look at the clock takes 0.05 s
    trainer = trainer_for(pictures, tmp_path, max_steps=None, max_minutes=0.2, checkpoint_every=10**6)
    trainer.run()

    rates = [line["lr"] for line in metrics(tmp_path)]
    assert trainer.progress == 1
    assert 11.0 < 0.05 * next(ticks) <= 12.0 * 1.03
    assert max(rates) == 0.02
    assert rates[-1] < 0.1 * max(rates)
    assert (tmp_path / "model_index.json").exists()
    assert (tmp_path / "checkpoints" / f"step-{trainer.step:06d}").exists()


def test_the_clock_of_a_resumed_run_goes_on_where_it_stopped(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = count()
    monkeypatch.setattr(clock, "monotonic", lambda: 0.05 * next(ticks))
    data = TroubledImages(DataOptions(path=str(pictures), resolution=8), channels=1)
    data.signal_in = 12
    options = {"max_steps": None, "max_minutes": 0.2, "checkpoint_every": 10**6}
    stopped = trainer_for(pictures, tmp_path, data=data, **options)
    assert stopped.run() is False

    resumed = trainer_for(pictures, tmp_path, resume="latest", **options)

    assert stopped.step == 12
    assert resumed.clock.seconds_before == pytest.approx(3.1)  # five looks at the clock a step, and two to save
    assert resumed.progress == pytest.approx(stopped.progress, rel=0.1)


def test_with_both_limits_the_first_one_counts(pictures: Path, tmp_path: Path) -> None:
    trainer = trainer_for(pictures, tmp_path, max_steps=2, max_minutes=60)
    trainer.run()

    assert trainer.step == 2


def test_a_model_without_text_trains_and_shows_pictures(pictures: Path, tmp_path: Path) -> None:
    trainer_for(pictures, tmp_path, has_text=False, max_steps=1, sample_every=1).run()

    assert (tmp_path / "samples" / "step-000001.png").exists()
    assert not (tmp_path / "text_encoder").exists()


def test_resuming_with_another_setting_names_it(pictures: Path, tmp_path: Path) -> None:
    trainer_for(pictures, tmp_path, max_steps=3).run()

    with pytest.raises(ValueError, match=r"was trained with train.batch_size 4, but it is 2 now"):
        trainer_for(pictures, tmp_path, max_steps=6, batch_size=2, resume="latest")


def test_fewer_pictures_than_a_batch_are_refused_with_both_numbers(pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has 11 pictures, fewer than train.batch_size 12"):
        trainer_for(pictures, tmp_path / "run", batch_size=12)
    assert not (tmp_path / "run").exists()


def test_prompts_for_a_model_without_text_are_refused(pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sample_prompts need a text_encoder"):
        trainer_for(pictures, tmp_path / "run", has_text=False, sample_prompts=("a",))


def test_a_discrete_objective_samples_with_no_more_steps_than_it_was_trained_for(
    pictures: Path, tmp_path: Path
) -> None:
    objective = Objective(DDIMScheduler(num_train_timesteps=5), prediction_type="v_prediction")
    looks = {"max_steps": 1, "sample_every": 1, "sample_prompts": ("thing 1",)}
    trainer = trainer_for(pictures, tmp_path, objective=objective, **looks)
    trainer.run()

    assert trainer.watcher.steps == 5
    assert (tmp_path / "samples" / "step-000001.png").exists()

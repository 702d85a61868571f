"""Consistency tuning: what is asked of the network, and a whole tuned run by scripts/train.py."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler, FlowMatchLCMScheduler
from pipeline_parts import CAPTIONS, stub_pipeline, tiny_pipeline, tiny_unconditional, tiny_unet
from safetensors.torch import load_file, save_file
from tiny_config import write_config
from torch import Tensor

from unet_attn.consistency import ConsistencyOptions, ConsistencyTuning
from unet_attn.ema import ExponentialMovingAverage
from unet_attn.model import TextConditionalUNet
from unet_attn.objective import Objective
from unet_attn.pipelines.text_to_image import TextToImagePipeline

ROOT = Path(__file__).resolve().parent.parent


def flow() -> Objective:
    return Objective(FlowMatchLCMScheduler())


def tuning_of(start: TextToImagePipeline, **options: object) -> ConsistencyTuning:
    return ConsistencyTuning(ConsistencyOptions(start="runs/start", **options), start, flow())


def model_of(pipeline: TextToImagePipeline) -> TextConditionalUNet:
    return TextConditionalUNet(pipeline.unet, pipeline.text_encoder, pipeline.tokenizer)


def asked_of(
    tuning: ConsistencyTuning, live: TextToImagePipeline, noisy: Tensor, t: Tensor, captions: list[str], progress: float
) -> Tensor:
    model = model_of(live)
    return tuning.target(model, ExponentialMovingAverage(model, 0.0), noisy, t, captions, progress)


def towards(picture: Tensor):
    """The answer of a network that knows a picture: the velocity from it to x_t."""
    return lambda sample, timestep, context: (sample - picture) * 1000 / timestep.reshape(-1, 1, 1, 1)


# ------------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"halvings": 0}, r"consistency.halvings must lie in 1..16, got 0"),
        ({"steps": 17}, r"consistency.steps must lie in 1..16, got 17"),
        ({"guidance_scale": float("nan")}, r"consistency.guidance_scale must be a finite number, got nan"),
    ],
)
def test_wrong_options_are_named(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ConsistencyOptions(start="runs/start", **wrong)


def test_only_a_flow_is_tuned() -> None:
    options = ConsistencyOptions(start="runs/start")
    with pytest.raises(ValueError, match="prediction_type flow"):
        ConsistencyTuning(options, stub_pipeline(), Objective(DDIMScheduler(), prediction_type="epsilon"))
    with pytest.raises(ValueError, match="runs/start is no flow but a v_prediction model"):
        ConsistencyTuning(options, stub_pipeline("v_prediction"), flow())
    for weighting in ("uncertainty", "min_snr"):
        with pytest.raises(ValueError, match=f"loss_weighting none, got {weighting}"):
            ConsistencyTuning(options, stub_pipeline(), Objective(FlowMatchLCMScheduler(), loss_weighting=weighting))
    with pytest.raises(ValueError, match=r"diffusers.FlowMatchLCMScheduler, .*got FlowMatchEulerDiscreteScheduler"):
        ConsistencyTuning(options, stub_pipeline(), Objective(FlowMatchEulerDiscreteScheduler()))
    tuned = TextToImagePipeline(**{**tiny_pipeline().components, "scheduler": FlowMatchLCMScheduler()})
    with pytest.raises(ValueError, match="runs/start was tuned to few steps already"):
        ConsistencyTuning(options, tuned, flow())
    ConsistencyTuning(ConsistencyOptions(start="runs/start", guidance_scale=1.0), tuned, flow())
    guided = TextToImagePipeline(**{**tiny_pipeline().components, "guide_unet": tiny_unet(seed=1)})
    with pytest.raises(ValueError, match="runs/start has a guide_unet"):
        ConsistencyTuning(options, guided, flow())


# -------------------------------------------------------------------------------------------------- times and nearness


def test_a_tenth_of_the_times_is_pure_noise_and_the_rest_the_objectives() -> None:
    tuning = tuning_of(stub_pipeline())
    uniform = (torch.arange(100) + 0.5) / 100
    times = tuning.sample_times(uniform)
    assert (times == 1).sum() == 10
    assert times[:90].diff().min() > 0
    torch.testing.assert_close(times[:90], flow().sample_times(uniform[:90] / 0.9))


def test_the_two_points_come_nearer_by_halves_at_equal_parts_of_the_run() -> None:
    tuning = tuning_of(stub_pipeline(), halvings=3)
    parts = [tuning.nearness(progress) for progress in (0.0, 0.24, 0.25, 0.5, 0.75, 1.0)]
    assert parts == [1, 1, 1 / 2, 1 / 4, 1 / 8, 1 / 8]


# -------------------------------------------------------------------------------------------------------------- target


def test_networks_that_know_the_picture_are_asked_for_what_they_say() -> None:
    picture = torch.randn(1, 3, 12, 12, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)
    start, live = stub_pipeline(), stub_pipeline()
    start.unet.answer = live.unet.answer = towards(picture)
    noisy, t = torch.randn(3, 3, 12, 12), torch.tensor([0.2, 0.7, 1.0])
    for progress in (0.0, 0.9):
        target = asked_of(tuning_of(start), live, noisy, t, [""] * 3, progress)
        torch.testing.assert_close(target, (noisy - picture) / t.reshape(3, 1, 1, 1))
    # at first the way leads to the picture itself, and the live network has nothing to say
    assert len(live.unet.calls) == 1


def test_the_way_is_the_starts_with_guidance_and_its_end_the_live_networks() -> None:
    start, live = tiny_pipeline(seed=0), tiny_pipeline(seed=1)
    noisy, t, scale = torch.randn(3, 3, 12, 12), torch.tensor([0.3, 0.6, 1.0]), 2.5
    got = asked_of(tuning_of(start, guidance_scale=scale, halvings=2), live, noisy, t, CAPTIONS, progress=0.9)

    with torch.no_grad():
        frozen, network = model_of(start), model_of(live)
        time, per_picture = 1000 * t, t.reshape(3, 1, 1, 1)
        other = frozen(noisy, time, [""] * 3)[0]
        guided = other + scale * (frozen(noisy, time, CAPTIONS)[0] - other)
        nearer = noisy - per_picture / 4 * guided
        picture = nearer - 0.75 * per_picture * network(nearer, 0.75 * time, CAPTIONS)[0]
    torch.testing.assert_close(got, (noisy - picture.clamp(-1.2, 1.2)) / per_picture, rtol=1e-4, atol=1e-4)
    assert not got.requires_grad


def test_without_guidance_the_start_is_asked_once() -> None:
    start, live = stub_pipeline(), stub_pipeline()
    asked_of(
        tuning_of(start, guidance_scale=1.0), live, torch.randn(2, 3, 12, 12), torch.tensor([0.5, 1.0]), ["", ""], 0.0
    )
    assert [len(sample) for sample, _, _ in start.unet.calls] == [2]


# --------------------------------------------------------------------------------------------------------------- start


def test_the_model_begins_with_the_weights_of_the_start_which_is_frozen() -> None:
    start, other = tiny_pipeline(seed=0), tiny_pipeline(seed=1)
    tuning, model = tuning_of(start), model_of(other)
    tuning.begin_with(model)
    frozen = tuning.start.state_dict()
    assert all(torch.equal(value, frozen[name]) for name, value in model.state_dict().items())
    assert not any(parameter.requires_grad for parameter in tuning.start.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_start_of_another_shape_is_refused_with_the_setting() -> None:
    tuning = tuning_of(tiny_pipeline())
    with pytest.raises(ValueError, match=r"runs/start has text_encoder TextEncoder, not None: set it to that"):
        tuning.begin_with(TextConditionalUNet(tiny_unet()))
    with pytest.raises(ValueError, match=r"runs/start has unet.in_channels 3, not 1: set it to that"):
        tuning.begin_with(model_of(tiny_pipeline(channels=1)))
    with pytest.raises(ValueError, match="runs/start was trained without text: set text_encoder to null"):
        tuning_of(tiny_unconditional()).begin_with(model_of(tiny_pipeline()))
    larger = tiny_pipeline()
    larger.unet.register_to_config(sample_size=16)
    with pytest.raises(ValueError, match=r"runs/start has data.resolution 12, not 16: set it to that"):
        tuning.begin_with(model_of(larger))


def test_settings_tell_the_start_by_its_weights() -> None:
    one, again, other = (tuning_of(tiny_pipeline(seed=seed)).settings for seed in (0, 0, 1))
    assert one == again
    weights = "consistency.start with the weights"
    assert [key for key in one if one[key] != other[key]] == [weights]
    assert {key: one[key] for key in one if key != weights} == {
        "consistency.guidance_scale": 3.0,
        "consistency.halvings": 2,
        "consistency.steps": 4,
    }


# --------------------------------------------------------------------------------------------------------- whole runs


def train(arguments: list[str]) -> int:
    spec = importlib.util.spec_from_file_location("train_script", ROOT / "scripts" / "train.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script.main(arguments)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A configuration, and the run that it made in three steps."""
    folder = tmp_path_factory.mktemp("start")
    config = write_config(folder, max_steps=3, checkpoint_every=2, sample_every=None, validate_every=None, trackers=[])
    assert train(["--config", str(config)]) == 0
    return config, folder / "run"


def tuned(start: tuple[Path, Path], out: Path, *more: str, steps: int = 4) -> int:
    config, run = start
    lcm = '{"class_path": "diffusers.FlowMatchLCMScheduler", "init_args": {}}'
    return train([
        "--config", str(config), "--scheduler", lcm, "--consistency.start", str(run), "--consistency.steps", "2",
        "--train.output_dir", str(out), "--train.max_steps", str(steps), *more,
    ])  # fmt: skip


def test_a_tuned_run_publishes_a_pipeline_of_few_steps(start: tuple[Path, Path], tmp_path: Path) -> None:
    assert tuned(start, tmp_path / "few") == 0
    pipeline = TextToImagePipeline.from_pretrained(tmp_path / "few")
    assert type(pipeline.scheduler).__name__ == "FlowMatchLCMScheduler"
    assert (pipeline.config.default_steps, pipeline.config.default_guidance_scale) == (2, 1.0)
    pipeline.set_progress_bar_config(disable=True)
    calls = []
    pipeline.unet.register_forward_hook(lambda module, given, answer: calls.append(len(given[0])))
    pipeline("red thing", generator=torch.Generator().manual_seed(0))
    assert calls == [1, 1]

    lines = [json.loads(line) for line in (tmp_path / "few" / "logs" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert yaml.safe_load((tmp_path / "few" / "config.yaml").read_text())["consistency"]["steps"] == 2


def test_the_first_step_sets_out_from_the_starts_averaged_weights(start: tuple[Path, Path], tmp_path: Path) -> None:
    assert tuned(start, tmp_path / "few", "--train.learning_rate", "1e-12", "--train.muon_learning_rate", "1e-12") == 0
    for part in ("unet", "text_encoder"):
        files = [next((run / part).glob("*.safetensors")) for run in (start[1], tmp_path / "few")]
        before, after = map(load_file, files)
        assert sorted(before) == sorted(after)
        for key in before:
            torch.testing.assert_close(after[key], before[key], rtol=0, atol=1e-9)


def test_a_resumed_tuning_is_the_straight_one_to_the_bit(start: tuple[Path, Path], tmp_path: Path) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    assert tuned(start, straight) == 0
    assert tuned(start, broken) == 0
    shutil.rmtree(broken / "checkpoints" / "step-000004")
    assert tuned(start, broken, "--train.resume", "latest") == 0
    for file in ("model", "ema", "optimizer"):
        ours, theirs = (
            load_file(run / "checkpoints" / "step-000004" / f"{file}.safetensors") for run in (broken, straight)
        )
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_another_start_is_refused_at_a_resume(
    start: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few, other = tmp_path / "few", shutil.copytree(start[1], tmp_path / "other")
    assert tuned(start, few, steps=2) == 0
    weights = next((other / "unet").glob("*.safetensors"))
    save_file({name: value + 0.001 for name, value in load_file(weights).items()}, weights, metadata={"format": "pt"})
    assert tuned((start[0], other), few, "--train.resume", "latest", steps=2) == 2
    assert "was trained with consistency.start with the weights" in capsys.readouterr().err


def test_a_later_end_which_would_undo_what_was_tuned_is_refused(
    start: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tuned(start, tmp_path / "few", steps=2) == 0
    assert tuned(start, tmp_path / "few", "--train.resume", "latest", steps=8) == 2
    assert "was trained with train.max_steps 2, but it is 8 now" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--tokenizer.vocab_size", "260", "tokens: tokenizer.vocab_size 260 is fewer"),
        ("--tokenizer.max_length", "5", "not 5: set it to that"),
        ("--consistency.halvings", "two", 'Parser key "consistency.halvings"'),
        ("--consistency.start", "null", "consistency.start must name what is tuned"),
    ],
)
def test_settings_that_do_not_go_with_the_start_are_one_line(
    start: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str, message: str
) -> None:
    assert tuned(start, tmp_path / "few", option, value) == 2
    errors = capsys.readouterr().err
    assert message in errors and errors.count("\n") == 1
    assert not (tmp_path / "few").exists()


def test_a_configuration_whose_section_is_null_trains_from_the_beginning(
    start: tuple[Path, Path], tmp_path: Path
) -> None:
    config = tmp_path / "earlier.yaml"
    settings = yaml.safe_load(start[0].read_text(encoding="utf-8")) | {"consistency": None}
    config.write_text(yaml.safe_dump(settings), encoding="utf-8")
    assert train(["--config", str(config), "--train.max_steps", "1", "--train.output_dir", str(tmp_path / "run")]) == 0


def test_an_ordinary_checkpoint_does_not_become_a_tuned_one(
    start: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert tuned(start, start[1], "--train.resume", "latest") == 2
    assert "was trained with consistency." in capsys.readouterr().err


def test_the_loss_is_against_what_the_averaged_weights_see(
    start: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Tensor, Tensor]] = []  # what was aimed at, and a weight of the network that said so
    aimed: list[Tensor] = []
    live: list[Tensor] = []
    target, loss = ConsistencyTuning.target, Objective.loss
    forward = TextConditionalUNet.forward

    def watched_forward(self, sample: Tensor, timestep: Tensor, captions: list[str]):
        (live if torch.is_grad_enabled() else looked).append(self.unet.conv_out.weight.detach().clone())
        return forward(self, sample, timestep, captions)

    looked: list[Tensor] = []

    def watched_target(self, model, averages, *others):
        looked.clear()
        answer = target(self, model, averages, *others)
        before = {name: value.clone() for name, value in averages.averages.items()}
        if len(looked) == 2:  # the start, and the network itself
            assert torch.equal(looked[1], before["unet.conv_out.weight"])
        seen.append((answer, before["unet.conv_out.weight"]))
        return answer

    def watched_loss(self, prediction, clean, noise, t, *, target=None):
        aimed.append(target)
        return loss(self, prediction, clean, noise, t, target=target)

    monkeypatch.setattr(ConsistencyTuning, "target", watched_target)
    monkeypatch.setattr(Objective, "loss", watched_loss)
    monkeypatch.setattr(TextConditionalUNet, "forward", watched_forward)
    more = ("--train.ema_decay", "0.9", "--train.cooldown_fraction", "0", "--consistency.halvings", "1")
    assert tuned(start, tmp_path / "few", *more) == 0
    assert [at is said for at, (said, _) in zip(aimed, seen, strict=True)] == [True] * 4
    # the averages lag behind what learns
    assert not torch.equal(live[-1], seen[-1][1])
    assert len(looked) == 2


def test_a_start_that_is_no_pipeline_is_one_line(
    start: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tuned((start[0], tmp_path), tmp_path / "few") == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: consistency.start {tmp_path} cannot be used: ")
    assert message.count("\n") == 1
    assert not (tmp_path / "few").exists()

"""Consistency tuning: a trained flow learns to reach the picture from any noise level in one step, or in a few.

A velocity v at x_t stands for the picture f(x_t, t) = x_t - t v. All points of one path of the flow end in the same
picture, so f shall be the same at x_t and at x_r, which is nearer to the picture (Song et al. 2023,
https://arxiv.org/abs/2303.01469, definition 1). After easy consistency tuning (Geng et al. 2024,
https://arxiv.org/abs/2406.14548) training starts from a trained network, and r, far from t at first, comes nearer as it
goes. The path from x_t to x_r is that of the network at the start, guidance included, as in latent consistency models
(Luo et al. 2023, https://arxiv.org/abs/2310.04378, section 4.2): what guidance does is learned, and costs nothing in
sampling.

The network at x_r has the averaged weights: with those of the last step the pictures were noisier (docs/sampling.md).
What is asked of it stays a velocity, (x_t - f(x_r, r)) / t, so that objective, network and pipeline are those
of any flow. Letters: B batch.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from unet_attn.ema import ExponentialMovingAverage
from unet_attn.model import TextConditionalUNet
from unet_attn.objective import Objective
from unet_attn.pipelines.inputs import check_guidance_scale, evaluation_mode
from unet_attn.pipelines.text_to_image import TextToImagePipeline
from unet_attn.sharding import reshard

PURE_NOISE = 0.1  # the share of the samples at t = 1, where sampling begins and logit-normal times never come
BEYOND_WHITE = 1.2  # a picture's values lie within 1 of 0; further out is an error that would be learned on
SCHEDULER = "FlowMatchLCMScheduler"
# what follows from another setting, by the name that the user gave it under
GIVEN_AS = {
    "unet.sample_size": "data.resolution",
    "unet.context_dim": "text_encoder.dim",
    "unet.out_channels": "unet.in_channels",
    "unet.x_prediction": "objective.x_prediction",
    "text_encoder.max_length": "tokenizer.max_length",
}
FOREIGN = ("path", "model_config")  # of a pretrained text model: its place, and what each release of its library writes


@dataclass(frozen=True, kw_only=True)
class ConsistencyOptions:
    """How a trained flow is tuned to few steps. The networks' sections are those it was trained with.

    Args:
        start: the run, or the saved pipeline, that is tuned; null = a training from the beginning.
        guidance_scale: how much guidance is learned, so that sampling needs none; a model without text has none.
        halvings: t - r is all of t at first, where the guidance alone is learned, and t / 2^halvings at the end. Fewer
            are rougher, more want a longer run.
        steps: what the saved pipeline samples with unless it is told otherwise.
    """

    start: str | None = None
    guidance_scale: float = 3.0
    halvings: int = 2
    steps: int = 4

    def __post_init__(self) -> None:
        try:
            check_guidance_scale(self.guidance_scale)
        except ValueError as error:
            raise ValueError(f"consistency.{error}") from None
        for name in ("halvings", "steps"):
            if not 1 <= getattr(self, name) <= 16:
                raise ValueError(f"consistency.{name} must lie in 1..16, got {getattr(self, name)}")


class ConsistencyTuning:
    """Times and targets for a network that is tuned from `start`, a flow pipeline, which is frozen and kept.

    Raises ValueError for an objective that does not go with it, and for a start that is no flow or has a guide_unet.
    """

    def __init__(self, options: ConsistencyOptions, start: TextToImagePipeline, objective: Objective) -> None:
        if not objective.is_flow:
            raise ValueError(f"consistency needs objective.prediction_type flow, got {objective.prediction_type}")
        if objective.loss_weighting != "none":
            raise ValueError(
                f"consistency needs objective.loss_weighting none, got {objective.loss_weighting}: "
                "a weight by noise level leaves out pure noise, where sampling begins"
            )
        if type(objective.scheduler).__name__ != SCHEDULER:
            raise ValueError(
                f"consistency needs scheduler.class_path diffusers.{SCHEDULER}, which samples in few steps, got "
                f"{type(objective.scheduler).__name__}"
            )
        if start.config.prediction_type != "flow":
            raise ValueError(f"consistency.start {options.start} is no flow but a {start.config.prediction_type} model")
        if start.guide_unet is not None:
            raise ValueError(f"consistency.start {options.start} has a guide_unet: save it with guide_unet=None")
        if type(start.scheduler).__name__ == SCHEDULER and options.guidance_scale != 1:
            raise ValueError(
                f"consistency.start {options.start} was tuned to few steps already: start from what it was tuned from, "
                "or set consistency.guidance_scale to 1"
            )
        self.options, self.objective = options, objective
        for network in filter(None, (start.unet, start.text_encoder)):
            network.eval().requires_grad_(False)  # before they are put together: what is frozen encodes a caption once
        self.start = TextConditionalUNet(start.unet, start.text_encoder, start.tokenizer).eval()

    def begin_with(self, model: TextConditionalUNet) -> None:
        """Give `model` the weights of the start. Raises ValueError naming the first setting in which they differ."""
        name = f"consistency.start {self.options.start}"
        if self.start.text_encoder is None and model.unet.config.context_dim is not None:
            raise ValueError(f"{name} was trained without text: set text_encoder to null, train.sample_prompts to []")
        theirs, ours = _settings(self.start), _settings(model)
        for key in sorted({*theirs, *ours}):
            if theirs.get(key) != ours.get(key):
                given = GIVEN_AS.get(key, key)
                raise ValueError(f"{name} has {given} {theirs.get(key)}, not {ours.get(key)}: set it to that")
        try:
            model.load_state_dict(self.start.state_dict())
        except RuntimeError as error:
            raise ValueError(f"{name} has other weights than this text_encoder: {error}") from error

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What must not change when a run is resumed: the options, and the start by its weights, not by its place."""
        digest = sha256()
        for tensor in self.start.state_dict().values():
            digest.update(tensor.cpu().contiguous().numpy().tobytes())
        options = {f"consistency.{key}": value for key, value in asdict(self.options).items() if key != "start"}
        return options | {"consistency.start with the weights": digest.hexdigest()[:12]}

    def prepare(self, device: torch.device, memory_format: torch.memory_format, *, compile: bool) -> None:
        """Put the start where the training is."""
        self.start.to(device, memory_format=memory_format)
        self.start.speed_up(compile=compile, checkpointing=False)

    def sample_times(self, uniform: Tensor) -> Tensor:
        """The objective's times, (B,) in (0, 1], a share of PURE_NOISE of them at 1. uniform: (B,) in [0, 1)."""
        rest = 1.0 - PURE_NOISE
        times = self.objective.sample_times((uniform / rest).clamp(max=1.0))
        return torch.where(uniform < rest, times, torch.ones_like(times))

    @torch.no_grad()
    def target(
        self,
        model: TextConditionalUNet,
        averages: ExponentialMovingAverage,
        noisy: Tensor,
        t: Tensor,
        captions: list[str],
        progress: float,
    ) -> Tensor:
        """The velocity at x_t whose picture is what `model`, with its averages, sees at x_r, (B, C, H, W).

        noisy: x_t (B, C, H, W); t: (B,) in (0, 1]; progress: the part of the run that lies behind, in [0, 1].
        """
        nearness = self.nearness(progress)
        picture = noisy - nearness * _per_picture(t) * self._guided_velocity(noisy, t, captions)  # x_r, at first r = 0
        if nearness < 1:
            r = t * (1.0 - nearness)
            with averages.swapped(model), evaluation_mode(model):
                velocity, _ = model(picture, self.objective.model_timestep(r), captions)
                reshard(model)  # what was gathered for this pass would be kept for the next one
            picture = picture - _per_picture(r) * velocity.float()
        return (noisy - picture.clamp(-BEYOND_WHITE, BEYOND_WHITE)) / _per_picture(t)

    def nearness(self, progress: float) -> float:
        """(t - r) / t, which is halved at equal parts of the run."""
        halvings = self.options.halvings
        return 0.5 ** min(int(progress * (halvings + 1)), halvings)

    def _guided_velocity(self, noisy: Tensor, t: Tensor, captions: list[str]) -> Tensor:
        """The start's answer with guidance, as its pipeline would give it (Ho & Salimans 2022, eq. 6)."""
        time, scale = self.objective.model_timestep(t), self.options.guidance_scale
        if self.start.text_encoder is None or scale == 1:
            return self.start(noisy, time, captions)[0].float()
        doubled = torch.cat([noisy, noisy]), torch.cat([time, time])
        other, answer = self.start(*doubled, [""] * len(captions) + captions)[0].float().chunk(2)
        return other + scale * (answer - other)


def _per_picture(values: Tensor) -> Tensor:
    return values.reshape(-1, 1, 1, 1)


def _settings(model: TextConditionalUNet) -> Mapping[str, Any]:
    """What the networks were made with, by part and name; diffusers' own keys begin with an underscore."""
    settings: dict[str, Any] = {}
    for part in ("unet", "text_encoder"):
        network = getattr(model, part)
        settings[part] = None if network is None else type(network).__name__
        config = {} if network is None else network.config
        known = [key for key in config if not key.startswith("_") and key not in FOREIGN]
        settings |= {f"{part}.{key}": config[key] for key in known}
    # through JSON tuples become lists, as a saved one has them
    return json.loads(json.dumps(settings, default=str))

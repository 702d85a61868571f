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
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from unet_attn.model import TextConditionalUNet
from unet_attn.objective import Objective
from unet_attn.pipelines.inputs import check_guidance_scale
from unet_attn.pipelines.text_to_image import TextToImagePipeline

PURE_NOISE = 0.1  # the share of the samples at t = 1, where sampling begins and logit-normal times never come
BEYOND_WHITE = 1.2  # a picture's values lie within 1 of 0; further out is an error that would be learned on


@dataclass(frozen=True, kw_only=True)
class ConsistencyOptions:
    """How a trained flow is tuned to few steps. The networks' sections are those it was trained with.

    Args:
        start: the run, or the saved pipeline, that is tuned.
        guidance_scale: how much guidance is learned; sampling then needs none.
        halvings: t - r is all of t at first, where the guidance alone is learned, and t / 2^halvings at the end. Fewer
            are rougher, more want a longer run.
        steps: what the saved pipeline samples with unless it is told otherwise.
    """

    start: str
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

    Raises ValueError for another objective than a flow, and for a start that is none.
    """

    def __init__(self, options: ConsistencyOptions, start: TextToImagePipeline, objective: Objective) -> None:
        if not objective.is_flow or objective.loss_weighting == "uncertainty":
            raise ValueError("consistency needs objective.prediction_type flow, and no loss_weighting uncertainty")
        if start.config.prediction_type != "flow":
            raise ValueError(f"consistency.start {options.start} is no flow but a {start.config.prediction_type} model")
        self.options, self.objective = options, objective
        for network in filter(None, (start.unet, start.text_encoder)):
            network.eval().requires_grad_(False)  # before they are put together: what is frozen encodes a caption once
        self.start = TextConditionalUNet(start.unet, start.text_encoder, start.tokenizer).eval()

    def begin_with(self, model: TextConditionalUNet) -> None:
        """Give `model` the weights of the start. Raises ValueError naming the first setting in which they differ."""
        for part in ("unet", "text_encoder"):
            theirs, ours = (_settings(getattr(each, part)) for each in (self.start, model))
            for key in sorted({*theirs, *ours}):
                if theirs.get(key) != ours.get(key):
                    was, now = theirs.get(key), ours.get(key)
                    raise ValueError(f"consistency.start {self.options.start} has {part}.{key} {was}, not {now}")
        model.load_state_dict(self.start.state_dict())

    def settings(self) -> dict[str, Any]:
        """What must not change when a run is resumed: the options, and the start by its weights, not by its place."""
        digest = sha256()
        for tensor in self.start.state_dict().values():
            digest.update(tensor.cpu().contiguous().numpy().tobytes())
        return {
            f"consistency.{key}": value for key, value in (asdict(self.options) | {"start": digest.hexdigest()}).items()
        }

    def sample_times(self, uniform: Tensor) -> Tensor:
        """The objective's times, (B,) in (0, 1], a share of PURE_NOISE of them at 1. uniform: (B,) in [0, 1)."""
        rest = 1.0 - PURE_NOISE
        times = self.objective.sample_times((uniform / rest).clamp(max=1.0))
        return torch.where(uniform < rest, times, torch.ones_like(times))

    @torch.no_grad()
    def target(
        self, model: TextConditionalUNet, noisy: Tensor, t: Tensor, captions: list[str], progress: float
    ) -> Tensor:
        """The velocity at x_t whose picture is what `model`, with averaged weights, sees at x_r, (B, C, H, W).

        noisy: x_t (B, C, H, W); t: (B,) in (0, 1]; progress: the part of the run that lies behind, in [0, 1].
        """
        r = t * (1.0 - self.nearness(progress))
        nearer = noisy - _per_picture(t - r) * self._guided_velocity(noisy, t, captions)
        velocity, _ = model(nearer, self.objective.model_timestep(r), captions)
        picture = (nearer - _per_picture(r) * velocity.float()).clamp(-BEYOND_WHITE, BEYOND_WHITE)
        return (noisy - picture) / _per_picture(t)

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


def _settings(part: Any) -> Mapping[str, Any]:
    """The config of a network, None has none; diffusers' own keys begin with an underscore."""
    config = {} if part is None else part.config
    # through JSON tuples become lists, as a saved one has them
    return json.loads(json.dumps({key: value for key, value in config.items() if not key.startswith("_")}, default=str))

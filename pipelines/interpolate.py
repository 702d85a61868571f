"""InterpolationPipeline: the way from one picture to another, through prompts and noise.

The noise turns along the sphere on which it lies (Shoemake 1985, slerp), so that it stays normal noise. Of the prompts
the network's answers are mixed, so that each end is the picture of its prompt, and prompts may differ in length.
"""

import dataclasses
from typing import NamedTuple

import numpy as np
import torch
from diffusers.utils.torch_utils import randn_tensor
from PIL import Image
from torch import Tensor

from unet_attn.pipelines.base import Callback, SampledPictures, SamplingPipeline, Text
from unet_attn.pipelines.captions import Words
from unet_attn.pipelines.guidance import PLAIN_GUIDANCE, Guidance
from unet_attn.pipelines.inputs import check_count, check_generators, check_prompts, describe, evaluation_mode


class Way(NamedTuple):
    """From one text to another by weights (B, 1, 1, 1) in [0, 1]."""

    start: Text
    end: Text
    weights: Tensor

    @property
    def others(self) -> dict[str, Tensor]:
        return self.start.others

    @property
    def words(self) -> list[Words]:
        return []


class InterpolationPipeline(SamplingPipeline):
    """Samples the pictures between prompts. Made from another pipeline: `InterpolationPipeline.from_pipe(pipe)`."""

    @torch.no_grad()
    def __call__(
        self,
        prompt: list[str] | None = None,
        *,
        num_frames: int = 9,
        negative_prompt: str | None = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        guidance: Guidance = PLAIN_GUIDANCE,
        height: int | None = None,
        width: int | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callback | None = None,
        callback_on_step_end_tensor_inputs: list[str] | None = None,
    ) -> SampledPictures | tuple[list[Image.Image] | np.ndarray | Tensor, ...]:
        """Sample num_frames pictures on the way from the first prompt to the last, by the others.

        prompt: two or more, of which each has its own noise; the same one twice changes the noise alone.
        num_frames: at least one for each prompt, both ends included; they are spread evenly, so that every prompt has
        its own frame if num_frames - 1 is a multiple of the number of prompts - 1.
        generator: one for all the noise, or one for each prompt, or None; [g, g.clone_state()] keeps the noise and
        changes the prompt alone.
        The other arguments are those of TextToImagePipeline; without text give prompt=None and two generators.
        Raises ValueError for an argument that does not fit, before any compute, and for pictures that are not finite.
        """
        self.check_parts()
        prompts = self._stations(prompt)
        if negative_prompt is not None and not isinstance(negative_prompt, str):
            raise ValueError(f"negative_prompt must be one string, for all frames, got {describe(negative_prompt)}")
        if check_count("num_frames", num_frames) < len(prompts):
            raise ValueError(f"num_frames must be at least {len(prompts)}, one for each prompt, got {num_frames}")
        generator = check_generators(generator, pictures=len(prompts), device=self._execution_device)
        places = torch.linspace(0, len(prompts) - 1, num_frames, dtype=torch.float64)
        before = places.long().clamp(max=len(prompts) - 2)
        has_text = self.text_encoder is not None
        job = self._prepare(
            [prompts[place] for place in before.tolist()] if has_text else None,
            negative_prompt=negative_prompt,
            num_images_per_prompt=1 if has_text else num_frames,
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            guidance=guidance,
            size=(height, width),
            generator=None,
            eta=0.0,
            output_type=output_type,
            return_attention=False,
            callback=callback_on_step_end,
            tensor_inputs=callback_on_step_end_tensor_inputs,
            more_prompts=prompts[-1:],  # the last one only ends a way, so that it is none of those above
        )
        weights = (places - before).float().reshape(-1, 1, 1, 1).to(job.device)

        with evaluation_mode(self.unet, self.guide_unet, self.text_encoder):
            noise = randn_tensor((len(prompts), *job.shape[1:]), generator, job.device, torch.float32)
            noise = job.start(slerp(noise[before], noise[before + 1], weights))
            # schedulers that add noise at each step add the same to every frame, or nothing would be between
            job.step_options = self._step_options(0.0, _twins(generator, num_frames))
            end = dataclasses.replace(job, prompts=[prompts[place + 1] for place in before.tolist()])
            if job.others is job.prompts:  # a guide_unet's own
                end.others = end.prompts
            pictures = self._denoise(job, Way(self._encode(job), self._encode(end), weights), noise)

        return self._finish(job, Text({}, {}, []), pictures, return_dict=return_dict)

    def _stations(self, prompt: list[str] | None) -> list[str]:
        prompts = check_prompts(prompt, has_text=self.text_encoder is not None)
        if self.text_encoder is None:
            return prompts * 2
        if len(prompts) < 2:
            raise ValueError("prompt must be a list of two or more: give one twice to change its noise alone")
        return prompts

    def _answers(self, sample: Tensor, timestep: Tensor, text: Way, *, guided: bool) -> tuple[Tensor, Tensor | None]:
        start, start_other = super()._answers(sample, timestep, text.start, guided=guided)
        if self.text_encoder is None:
            return start, start_other
        end, end_other = super()._answers(sample, timestep, text.end, guided=guided)
        answer = torch.lerp(start, end, text.weights)
        return answer, None if start_other is None else torch.lerp(start_other, end_other, text.weights)


def _twins(generator: torch.Generator | list[torch.Generator] | None, count: int) -> list[torch.Generator]:
    """Generators that all draw the same; they follow on the first of those given, or on torch's global one."""
    first = generator[0] if isinstance(generator, list) else generator
    if first is None:
        first = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
    return [first.clone_state() for _ in range(count)]


def slerp(start: Tensor, end: Tensor, weight: Tensor) -> Tensor:
    """Rows turned from start to end by weight of the angle between them (Shoemake 1985).

    start, end: (B, ...), rows in no two opposite directions; weight: (B, 1, ...) in [0, 1]. Returns (B, ...).
    """
    axes = tuple(range(1, start.ndim))
    cosine = (start * end).sum(dim=axes, keepdim=True) / (
        start.square().sum(dim=axes, keepdim=True) * end.square().sum(dim=axes, keepdim=True)
    ).sqrt()
    angle = cosine.double().clamp(-1, 1).acos()
    # rows of one direction have no angle to turn by, and a straight line is the same
    straight = angle.sin() < 1e-6
    sine = torch.where(straight, 1.0, angle.sin())
    first = torch.where(straight, 1.0 - weight, ((1.0 - weight) * angle).sin() / sine)
    second = torch.where(straight, weight.double(), (weight * angle).sin() / sine)
    return (first * start + second * end).to(start.dtype)

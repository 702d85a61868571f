"""TextToImagePipeline: prompts to pictures, in diffusers' manner; and encode_captions, which the trainer shares."""

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from unet_attn.pipelines.attention_maps import AttentionChoice
from unet_attn.pipelines.base import Callback, SampledPictures, SamplingPipeline
from unet_attn.pipelines.captions import encode_captions
from unet_attn.pipelines.guidance import PLAIN_GUIDANCE, Guidance
from unet_attn.pipelines.inputs import check_latents, evaluation_mode

__all__ = ["TextToImagePipeline", "encode_captions"]


class TextToImagePipeline(SamplingPipeline):
    """Samples pictures from a U-Net, conditioned on prompts where it was trained with text.

    Its parts, and how it is loaded, saved and shared: PipelineOfParts.
    """

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        *,
        negative_prompt: str | list[str] | None = None,
        num_images_per_prompt: int = 1,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        guidance: Guidance = PLAIN_GUIDANCE,
        height: int | None = None,
        width: int | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        latents: Tensor | None = None,
        eta: float = 0.0,
        output_type: str = "pil",
        return_attention: bool | AttentionChoice = False,
        return_dict: bool = True,
        callback_on_step_end: Callback | None = None,
        callback_on_step_end_tensor_inputs: list[str] | None = None,
    ) -> SampledPictures | tuple[list[Image.Image] | np.ndarray | Tensor, ...]:
        """Sample pictures: num_images_per_prompt of each prompt, a prompt's pictures side by side.

        prompt: one or several captions; None only for a model without text. negative_prompt: what to lead away from,
        one for all prompts or one each; None = the empty caption.
        num_inference_steps, guidance_scale: None = the pipeline's own, config.default_steps and default_guidance_scale.
        guidance_scale: s in u + s (c - u), c the answer to the prompt and u that to the negative prompt: 0 gives u,
        1 gives c at half the cost, more leads further from u. With a guide_unet u is its answer to the same prompt.
        guidance: what is done beside that: rescaling, an interval of noise levels, projection.
        height, width: in pixels, multiples of the U-Net's downsample_factor; by default its sample_size.
        generator: one, or one per picture, which then is the same whatever is sampled beside it. A CPU generator gives
        the same noise on every device. latents: (B, C, H, W) noise to start from instead.
        eta: the noise of DDIM's steps, 0 = none (Song et al. 2021, eq. 16).
        output_type: `pil`, or `np` (B, H, W, C) or `pt` (B, C, H, W) in [0, 1], or `latent`, (B, C, H, W) unclamped in
        the network's own [-1, 1], which is what an inversion scheduler's noise needs.
        return_attention: True or an AttentionChoice gives `attention`, a heat map for each word of each picture.
        callback_on_step_end: called as f(pipeline, step, timestep, {"latents": ...}); may return changed latents.
        Raises ValueError for an argument that does not fit, before any compute, and for pictures that are not finite.
        """
        if latents is not None:
            height, width = check_latents(latents, height, width, self.unet.downsample_factor)
        job = self._prepare(
            prompt,
            negative_prompt=negative_prompt,
            num_images_per_prompt=num_images_per_prompt,
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            guidance=guidance,
            size=(height, width),
            generator=generator,
            eta=eta,
            output_type=output_type,
            return_attention=return_attention,
            callback=callback_on_step_end,
            tensor_inputs=callback_on_step_end_tensor_inputs,
        )
        if latents is not None and tuple(latents.shape) != job.shape:
            raise ValueError(f"latents must have shape {job.shape}, got {tuple(latents.shape)}")

        with evaluation_mode(self.unet, self.guide_unet, self.text_encoder), job.recording():
            text = self._encode(job)
            noise = job.noise() if latents is None else latents.to(job.device, torch.float32)
            pictures = self._denoise(job, text, job.start(noise))

        return self._finish(job, text, pictures, return_dict=return_dict)

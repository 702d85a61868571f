"""ImageToImagePipeline: pictures changed towards a prompt, by noising them part of the way and sampling from there.

After Meng et al. 2022 (SDEdit), https://arxiv.org/abs/2108.01073.
"""

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from unet_attn.pipelines.attention_maps import AttentionChoice
from unet_attn.pipelines.base import Callback, SampledPictures, SamplingPipeline
from unet_attn.pipelines.guidance import PLAIN_GUIDANCE, Guidance
from unet_attn.pipelines.inputs import evaluation_mode
from unet_attn.pipelines.pictures import Picture, first_step, noised, read_pictures, spread


class ImageToImagePipeline(SamplingPipeline):
    """Changes pictures towards prompts. Made from another pipeline: `ImageToImagePipeline.from_pipe(pipe)`."""

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        image: Picture | list[Picture] | None = None,
        *,
        strength: float = 0.7,
        negative_prompt: str | list[str] | None = None,
        num_images_per_prompt: int = 1,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        guidance: Guidance = PLAIN_GUIDANCE,
        height: int | None = None,
        width: int | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        eta: float = 0.0,
        output_type: str = "pil",
        return_attention: bool | AttentionChoice = False,
        return_dict: bool = True,
        callback_on_step_end: Callback | None = None,
        callback_on_step_end_tensor_inputs: list[str] | None = None,
    ) -> SampledPictures | tuple[list[Image.Image] | np.ndarray | Tensor, ...]:
        """Sample pictures that begin at `image`.

        image: one for all prompts or one each: files, PIL pictures, arrays or tensors, see `read_pictures`.
        strength: in (0, 1], the share of num_inference_steps that is done: little changes little, 1 forgets the image.
        height, width: files and PIL pictures are scaled to them; by default they keep their own size, which must be a
        multiple of the U-Net's downsample_factor.
        The other arguments are those of TextToImagePipeline.
        Raises ValueError for an argument that does not fit, before any compute, and for pictures that are not finite.
        """
        if image is None:
            raise ValueError("this pipeline needs an image")
        image = read_pictures(image, channels=self.unet.config.in_channels, size=(height, width))
        job = self._prepare(
            prompt,
            negative_prompt=negative_prompt,
            num_images_per_prompt=num_images_per_prompt,
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            guidance=guidance,
            size=(image.shape[2], image.shape[3]),
            generator=generator,
            eta=eta,
            output_type=output_type,
            return_attention=return_attention,
            callback=callback_on_step_end,
            tensor_inputs=callback_on_step_end_tensor_inputs,
        )
        image = spread(image, prompts=len(job.prompts), images=num_images_per_prompt).to(job.device)
        first = job.begun_at(first_step(job.scheduler, strength, job.steps))

        with evaluation_mode(self.unet, self.guide_unet, self.text_encoder), job.recording():
            text = self._encode(job)
            noise = job.noise()
            # the first level of many a scheduler leaves something of the image, which is to be forgotten
            start = noised(job.scheduler, image, noise, first) if first else job.start(noise)
            pictures = self._denoise(job, text, start, first=first)

        return self._finish(job, text, pictures, return_dict=return_dict)

"""InpaintPipeline: parts of pictures drawn anew, the rest kept.

The U-Net needs no training for it: after each step what is to stay is put back, noised to the level of the step
(Lugmayr et al. 2022, https://arxiv.org/abs/2201.09865, eq. 8, without its resampling).
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


class InpaintPipeline(SamplingPipeline):
    """Draws parts of pictures anew. Made from another pipeline: `InpaintPipeline.from_pipe(pipe)`."""

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        image: Picture | list[Picture] | None = None,
        mask_image: Picture | list[Picture] | None = None,
        *,
        strength: float = 1.0,
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
        """Sample pictures that equal `image` where `mask_image` is black.

        image, mask_image: one for all prompts or one each, of one size, see `read_pictures`; of the mask, which is read
        as grey, what is lighter than half is drawn anew.
        strength: in (0, 1], the share of num_inference_steps that is done; below 1 what is drawn anew begins at what
        the image holds there.
        height, width: files and PIL pictures are scaled to them; by default they keep their own size, which must be a
        multiple of the U-Net's downsample_factor.
        The other arguments are those of TextToImagePipeline.
        Raises ValueError for an argument that does not fit, before any compute, and for pictures that are not finite.
        """
        if image is None or mask_image is None:
            raise ValueError("this pipeline needs an image and a mask_image")
        image = read_pictures(image, channels=self.unet.config.in_channels, size=(height, width))
        mask = read_pictures(mask_image, channels=1, size=(height, width), name="mask_image")
        if mask.shape[2:] != image.shape[2:]:
            raise ValueError(f"mask_image has size {tuple(mask.shape[2:])}, the image {tuple(image.shape[2:])}")
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
        rows = {"prompts": len(job.prompts), "images": num_images_per_prompt}
        image = spread(image, **rows).to(job.device)
        drawn = spread(mask, name="mask_image", **rows).to(job.device) > 0
        first = job.begun_at(first_step(job.scheduler, strength, job.steps))

        with evaluation_mode(self.unet, self.guide_unet, self.text_encoder), job.recording():
            text = self._encode(job)
            noise = job.noise()

            def put_back(step: int, latents: Tensor) -> Tensor:
                is_last = step + 1 == len(job.scheduler.timesteps)
                kept = image if is_last else noised(job.scheduler, image, noise, step + 1)
                return torch.where(drawn, latents, kept)

            start = noised(job.scheduler, image, noise, first)
            if first == 0:
                # nothing of the image is to shine through where it is drawn anew
                start = torch.where(drawn, job.start(noise), start)
            pictures = self._denoise(job, text, start, first=first, after_step=put_back)
            # once more, for a callback that ended the sampling early, or changed what is kept
            pictures = torch.where(drawn, pictures, image)

        return self._finish(job, text, pictures, return_dict=return_dict)

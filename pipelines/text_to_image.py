"""TextToImagePipeline: prompts to pictures, in diffusers' manner; and encode_captions, which the trainer shares."""

import copy
import inspect
import warnings
from collections.abc import Callable
from os import PathLike

import numpy as np
import torch
from diffusers import DiffusionPipeline, ImagePipelineOutput, ModelMixin, SchedulerMixin
from diffusers.callbacks import MultiPipelineCallbacks, PipelineCallback
from diffusers.utils.torch_utils import randn_tensor
from PIL import Image
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from unet_attn.objective import (
    FLOW_TIME_SCALE,
    check_sampling_scheduler,
    declare_prediction_type,
    scheduler_prediction_type,
)
from unet_attn.pipelines.inputs import (
    check_count,
    check_finite,
    check_generators,
    check_negative_prompts,
    check_number,
    check_output_type,
    check_prompts,
    check_size,
    check_steps,
    evaluation_mode,
    to_output,
)
from unet_attn.pipelines.loading import check_format_version, load_components
from unet_attn.pipelines.portable import check_portable, write_code_files

FORMAT_VERSION = 1
UNBOUNDED = 10**6  # transformers writes 1e30 for a tokenizer whose limit is not known


def encode_captions(
    captions: list[str], tokenizer: PreTrainedTokenizerBase, text_encoder: ModelMixin
) -> tuple[Tensor, Tensor]:
    """Encode captions for the U-Net; the empty caption stands for no caption (guidance, caption dropout).

    captions: B strings, padded to the longest and cut to what tokenizer and encoder hold, keeping the end token.
    Returns (B, N, D) vectors, through which gradients flow, and their mask (B, N) bool, True = real token.
    """
    pretrained = text_encoder.config.get("model_config") or {}
    limits = (text_encoder.config.get("max_length"), pretrained.get("max_position_embeddings"))
    limit = min(tokenizer.model_max_length, *(each or UNBOUNDED for each in limits))
    bounds = {"truncation": True, "max_length": limit} if limit < UNBOUNDED else {}
    tokens = tokenizer(captions, padding=True, return_tensors="pt", **bounds).to(text_encoder.device)
    output = text_encoder(tokens.input_ids, tokens.attention_mask)
    return output.last_hidden_state, tokens.attention_mask.bool()


class TextToImagePipeline(DiffusionPipeline):
    """Samples pictures from a U-Net, conditioned on prompts where it was trained with text.

    unet: an AttnUNet2D; scheduler: a diffusers scheduler that fits the model's prediction type; text_encoder and
    tokenizer: both, or neither for an unconditional model; prediction_type: what the U-Net predicts, by default what
    the scheduler says. It is kept in model_index.json, and a scheduler of another type is refused from then on.
    Raises ValueError if the parts do not fit each other.
    """

    model_cpu_offload_seq = "text_encoder->unet"
    _optional_components = ["text_encoder", "tokenizer"]  # noqa: RUF012  diffusers reads it from the class
    _callback_tensor_inputs = ["latents"]  # noqa: RUF012

    def __init__(
        self,
        unet: ModelMixin,
        scheduler: SchedulerMixin,
        text_encoder: ModelMixin | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        prediction_type: str | None = None,
        format_version: int = FORMAT_VERSION,
    ) -> None:
        super().__init__()
        check_format_version(format_version, FORMAT_VERSION, "this pipeline")
        _check_parts(unet, text_encoder, tokenizer)
        prediction_type = prediction_type or scheduler_prediction_type(scheduler)
        check_sampling_scheduler(scheduler, prediction_type)
        # so that any class made from its config knows what the model predicts
        declare_prediction_type(scheduler, prediction_type)
        self.register_modules(unet=unet, scheduler=scheduler, text_encoder=text_encoder, tokenizer=tokenizer)
        self.register_to_config(prediction_type=prediction_type, format_version=format_version)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | PathLike,
        *,
        dtype: str | torch.dtype | None = None,
        torch_dtype: str | torch.dtype | None = None,
        variant: str | None = None,
        unet: ModelMixin | None = None,
        scheduler: SchedulerMixin | None = None,
        text_encoder: ModelMixin | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> "TextToImagePipeline":
        """Load a saved pipeline with the installed classes. Nothing in the folder is executed.

        pretrained_model_name_or_path: a folder, or the id of a repository on the hub; dtype (older name: torch_dtype):
        of all weights, by default float32; variant: of the weight files, as in `save_pretrained`; unet, scheduler,
        text_encoder, tokenizer: used in place of the saved ones.
        Raises FileNotFoundError if it is no pipeline, and ValueError if weights are missing, left over or of a wrong
        shape, naming them: never does a model come back with random weights.
        """
        given = {"unet": unet, "scheduler": scheduler, "text_encoder": text_encoder, "tokenizer": tokenizer}
        components, options = load_components(
            pretrained_model_name_or_path,
            given={name: value for name, value in given.items() if value is not None},
            names=tuple(given),
            dtype=dtype if dtype is not None else torch_dtype,
            variant=variant,
        )
        kept = {name: options[name] for name in ("prediction_type", "format_version") if name in options}
        pipeline = cls(**components, **kept)
        pipeline.register_to_config(_name_or_path=str(pretrained_model_name_or_path))
        return pipeline

    def save_pretrained(
        self,
        save_directory: str | PathLike,
        *,
        safe_serialization: bool = True,
        variant: str | None = None,
        max_shard_size: int | str | None = None,
    ) -> None:
        """Save everything, with the code that loads it where unet-attn is not installed.

        `TextToImagePipeline.from_pretrained(dir)` reads the folder, and so does
        `DiffusionPipeline.from_pretrained(dir, trust_remote_code=True)`. To publish it use `push_to_hub(repo_id)`.
        Raises ValueError before anything is written if a part cannot be loaded elsewhere.
        """
        check_portable(self)
        check_sampling_scheduler(self.scheduler, self.config.prediction_type)
        super().save_pretrained(
            save_directory, safe_serialization=safe_serialization, variant=variant, max_shard_size=max_shard_size
        )
        write_code_files(self, save_directory)

    @property
    def guidance_scale(self) -> float:
        return self._guidance_scale

    @property
    def num_timesteps(self) -> int:
        return self._num_timesteps

    @property
    def interrupt(self) -> bool:
        """Set `_interrupt` in a callback to end the sampling early."""
        return self._interrupt

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        *,
        negative_prompt: str | list[str] | None = None,
        num_images_per_prompt: int = 1,
        num_inference_steps: int = 25,
        guidance_scale: float = 3.0,
        height: int | None = None,
        width: int | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        latents: Tensor | None = None,
        eta: float = 0.0,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callable[["TextToImagePipeline", int, Tensor, dict], dict] | None = None,
        callback_on_step_end_tensor_inputs: list[str] | None = None,
    ) -> ImagePipelineOutput | tuple[list[Image.Image] | np.ndarray | Tensor]:
        """Sample pictures: num_images_per_prompt of each prompt, a prompt's pictures side by side.

        prompt: one or several captions; None only for a model without text. negative_prompt: what to lead away from,
        one for all prompts or one each; None = the empty caption.
        guidance_scale: s in u + s (c - u), c the answer to the prompt and u that to the negative prompt: 0 gives u,
        1 gives c at half the cost, more leads further from u.
        height, width: in pixels, multiples of the U-Net's downsample_factor; by default its sample_size.
        generator: one, or one per picture, which then is the same whatever is sampled beside it. A CPU generator gives
        the same noise on every device. latents: (B, C, H, W) noise to start from instead.
        eta: the noise of DDIM's steps, 0 = none (Song et al. 2021, eq. 16).
        output_type: `pil`, or `np` (B, H, W, C) or `pt` (B, C, H, W) in [0, 1].
        callback_on_step_end: called as f(pipeline, step, timestep, {"latents": ...}); may return changed latents.
        Raises ValueError for an argument that does not fit, before any compute, and for pictures that are not finite.
        """
        check_sampling_scheduler(self.scheduler, self.config.prediction_type)
        prompts = check_prompts(prompt, has_text=self.text_encoder is not None)
        negatives = check_negative_prompts(
            negative_prompt, prompts=len(prompts), has_text=self.text_encoder is not None
        )
        check_steps(num_inference_steps, self.scheduler.config.num_train_timesteps)
        check_output_type(output_type, self.unet.config.out_channels)
        pictures = len(prompts) * check_count("num_images_per_prompt", num_images_per_prompt)
        shape = self._latents_shape(pictures, height, width, latents)
        device = self._execution_device
        generator = check_generators(generator, pictures=pictures, device=device)
        self._guidance_scale = check_number("guidance_scale", guidance_scale)
        step_options = self._step_options(check_number("eta", eta), generator)
        tensor_inputs = _callback_inputs(callback_on_step_end, callback_on_step_end_tensor_inputs)
        if negative_prompt is not None and self.guidance_scale == 1:
            warnings.warn("negative_prompt has no effect at guidance_scale 1", stacklevel=2)

        # a copy, so that nothing a scheduler remembers passes from one call to the next
        scheduler = copy.deepcopy(self.scheduler)
        scheduler.set_timesteps(num_inference_steps, device=device)
        self._num_timesteps = len(scheduler.timesteps)
        self._interrupt = False

        with evaluation_mode(self.unet, self.text_encoder):
            text = self._encode(prompts, negatives, num_images_per_prompt)
            if latents is None:
                latents = randn_tensor(shape, generator=generator, device=device, dtype=torch.float32)
            latents = latents.to(device, torch.float32) * getattr(scheduler, "init_noise_sigma", 1.0)
            finite = torch.ones(pictures, dtype=torch.bool, device=device)

            with self.progress_bar(total=num_inference_steps) as progress:
                for step, timestep in enumerate(scheduler.timesteps):
                    if self.interrupt:
                        continue

                    prediction = self._predict(scheduler, step, timestep, latents, text)
                    # noted here, as a scheduler that clips turns infinity into an ordinary white
                    finite &= prediction.isfinite().flatten(1).all(dim=1)
                    latents = scheduler.step(prediction, timestep, latents, **step_options).prev_sample

                    if callback_on_step_end is not None:
                        values = dict.fromkeys(tensor_inputs, latents)
                        changed = callback_on_step_end(self, step, timestep, values) or {}
                        latents = changed.get("latents", latents)
                    if (step + 1) % scheduler.order == 0 or step + 1 == self.num_timesteps:
                        progress.update()

        check_finite(finite & latents.isfinite().flatten(1).all(dim=1))
        images = to_output(latents, output_type)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    def _encode(self, prompts: list[str], negatives: list[str], images: int) -> dict[str, Tensor]:
        """The U-Net's text arguments for one forward pass: the negative prompts' rows first, then the prompts'.

        Rows that the guidance scale gives no weight to are left out. Each prompt's rows stand side by side.
        """
        if self.text_encoder is None:
            return {}
        if self.guidance_scale == 0:
            captions = negatives
        else:
            captions = prompts if self.guidance_scale == 1 else negatives + prompts
        states, mask = encode_captions(captions, self.tokenizer, self.text_encoder)
        return {
            "encoder_hidden_states": states.to(self.unet.dtype).repeat_interleave(images, dim=0),
            "encoder_attention_mask": mask.repeat_interleave(images, dim=0),
        }

    def _predict(
        self, scheduler: SchedulerMixin, step: int, timestep: Tensor, latents: Tensor, text: dict[str, Tensor]
    ) -> Tensor:
        """The guided prediction for latents (B, C, H, W), float32, from one forward pass of the U-Net."""
        sample = scheduler.scale_model_input(latents, timestep) if hasattr(scheduler, "scale_model_input") else latents
        if self.config.prediction_type == "flow":
            # the multistep schedulers round their timesteps down to whole numbers; sigma is the flow's time itself
            timestep = FLOW_TIME_SCALE * scheduler.sigmas[step].to(sample.device)
        guided = bool(text) and self.guidance_scale not in (0, 1)
        sample = torch.cat([sample, sample]) if guided else sample
        prediction = self.unet(sample.to(self.unet.dtype), timestep, **text).sample.float()
        if not guided:
            return prediction
        # Ho & Salimans 2022, eq. 6, with s = 1 + w: u + s (c - u)
        unconditional, conditional = prediction.chunk(2)
        return unconditional + self.guidance_scale * (conditional - unconditional)

    def _latents_shape(
        self, pictures: int, height: int | None, width: int | None, latents: Tensor | None
    ) -> tuple[int, int, int, int]:
        if latents is not None:
            if not isinstance(latents, Tensor) or latents.ndim != 4:
                raise ValueError("latents must be a tensor (pictures, channels, height, width)")
            height = latents.shape[2] if height is None else height
            width = latents.shape[3] if width is None else width
        size = self.unet.config.sample_size
        height, width = check_size(
            size if height is None else height, size if width is None else width, self.unet.downsample_factor
        )
        shape = (pictures, self.unet.config.in_channels, height, width)
        if latents is not None and tuple(latents.shape) != shape:
            raise ValueError(f"latents must have shape {shape}, got {tuple(latents.shape)}")
        return shape

    def _step_options(
        self, eta: float, generator: torch.Generator | list[torch.Generator] | None
    ) -> dict[str, float | torch.Generator | list[torch.Generator] | None]:
        """What the scheduler's step() takes of eta and generator."""
        accepted = inspect.signature(self.scheduler.step).parameters
        if eta and "eta" not in accepted:
            warnings.warn(f"eta has no effect: {type(self.scheduler).__name__} has no such setting", stacklevel=3)
        if isinstance(generator, list) and len(generator) == 1:
            generator = generator[0]
        return {name: value for name, value in (("eta", eta), ("generator", generator)) if name in accepted}


def _check_parts(unet: ModelMixin, text_encoder: ModelMixin | None, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Refuse parts that do not fit each other: their first call would fail deep inside."""
    if (text_encoder is None) != (tokenizer is None):
        raise ValueError("text_encoder and tokenizer go together: give both, or neither for a model without text")
    wanted = unet.config.get("context_dim")
    found = None if text_encoder is None else text_encoder.output_dim
    if wanted != found:
        raise ValueError(f"the U-Net has context_dim {wanted}, but the text encoder's output_dim is {found}")


def _callback_inputs(callback: Callable | None, names: list[str] | None) -> list[str]:
    if isinstance(callback, PipelineCallback | MultiPipelineCallbacks):
        names = callback.tensor_inputs
    names = ["latents"] if names is None else names
    unknown = [name for name in names if name not in TextToImagePipeline._callback_tensor_inputs]
    if unknown:
        raise ValueError(f"callback_on_step_end_tensor_inputs may name latents, got {', '.join(map(str, unknown))}")
    return names

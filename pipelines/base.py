"""What every pipeline of this package does between its arguments and its pictures.

A pipeline's `__call__` checks its arguments into a `Job`, encodes the captions, makes the start, and runs `_denoise`.
"""

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from diffusers import ImagePipelineOutput, ModelMixin, SchedulerMixin
from diffusers.callbacks import MultiPipelineCallbacks, PipelineCallback
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from unet_attn.flow import FLOW_TIME_SCALE
from unet_attn.pipelines.attention_maps import AttentionChoice, AttentionRecorder, WordMaps
from unet_attn.pipelines.captions import Words, caption_words, encode_captions, warn_of_cuts
from unet_attn.pipelines.guidance import Guidance, Guide
from unet_attn.pipelines.inputs import (
    check_callback_answer,
    check_callback_names,
    check_count,
    check_eta,
    check_finite,
    check_generators,
    check_guidance_scale,
    check_kind,
    check_negative_prompts,
    check_output_type,
    check_prompts,
    check_size,
    check_steps,
    describe,
    is_kind,
    to_output,
)
from unet_attn.pipelines.parts import PipelineOfParts
from unet_attn.schedulers import clean_coefficients, set_timesteps

CALLBACK_TENSORS = ("latents",)

Callback = Callable[["SamplingPipeline", int, Tensor, dict[str, Tensor]], dict[str, Tensor] | None]


@dataclass
class SampledPictures(ImagePipelineOutput):
    """images: as output_type says; attention: where it was asked for, the WordMaps of each picture."""

    attention: list[WordMaps] | None = None


class Text(NamedTuple):
    """The U-Net's text arguments, a row for each picture: for the prompts, and for what they are led away from."""

    prompts: dict[str, Tensor]
    others: dict[str, Tensor]
    words: list[Words]


@dataclass
class Job:
    """One call, checked, with all that is settled before its first step.

    prompts: `images` pictures of each; others: for each prompt the caption of the answer that guidance leads away from.
    """

    prompts: list[str]
    others: list[str]
    images: int
    shape: tuple[int, int, int, int]
    steps: int
    generator: torch.Generator | list[torch.Generator] | None
    scheduler: SchedulerMixin
    step_options: dict[str, object]
    guide: Guide
    output_type: str
    callback: Callback | None
    tensor_inputs: list[str]
    recorder: AttentionRecorder | None
    device: torch.device

    @property
    def pictures(self) -> int:
        return self.shape[0]

    def recording(self) -> AbstractContextManager[None]:
        return nullcontext() if self.recorder is None else self.recorder.recording()

    def noise(self) -> Tensor:
        """Standard normal noise, (B, C, H, W) float32, from the call's generators."""
        return randn_tensor(self.shape, generator=self.generator, device=self.device, dtype=torch.float32)

    def start(self, noise: Tensor) -> Tensor:
        """Standard normal noise as it stands at the scheduler's first step."""
        return noise * getattr(self.scheduler, "init_noise_sigma", 1.0)

    def begun_at(self, first: int) -> int:
        """The place of the first step. Raises ValueError where attention is asked for of calls that it leaves out."""
        if self.recorder is not None:
            self.recorder.check_steps(len(self.scheduler.timesteps) - first)
        return first


class SamplingPipeline(PipelineOfParts):
    """The loop that samples, and what stands before and behind it."""

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

    def _prepare(
        self,
        prompt: str | Sequence[str] | None,
        *,
        negative_prompt: str | Sequence[str] | None,
        num_images_per_prompt: int,
        num_inference_steps: int | None,
        guidance_scale: float | None,
        guidance: Guidance,
        size: tuple[int | None, int | None],
        generator: torch.Generator | list[torch.Generator] | None,
        eta: float,
        output_type: str,
        return_attention: bool | AttentionChoice,
        callback: Callback | None,
        tensor_inputs: list[str] | None,
        more_prompts: Sequence[str] = (),
    ) -> Job:
        """Check what the caller gave, before any compute. The arguments are those of the pipelines' `__call__`.

        more_prompts: what the call will encode beside its prompts.
        """
        self.check_parts()
        check_kind("guidance", guidance, Guidance)
        tensor_inputs = _callback_inputs(callback, tensor_inputs)
        has_text = self.text_encoder is not None
        prompts = check_prompts(prompt, has_text=has_text)
        negatives = check_negative_prompts(negative_prompt, prompts=len(prompts), has_text=has_text)
        steps = self.config.default_steps if num_inference_steps is None else num_inference_steps
        with _telling_of_default(steps, is_default=num_inference_steps is None):
            steps = check_steps(steps, self.scheduler.config.num_train_timesteps)
        channels = self.unet.config.out_channels
        check_output_type(output_type, channels)
        images = check_count("num_images_per_prompt", num_images_per_prompt)
        pictures = len(prompts) * images
        shape = (pictures, channels, *self._checked_size(*size))
        device = self._execution_device
        generator = check_generators(generator, pictures=pictures, device=device)
        scale = self.config.default_guidance_scale if guidance_scale is None else guidance_scale
        self._guidance_scale = check_guidance_scale(scale)
        step_options = self._step_options(check_eta(eta), generator)
        self._warn_of_no_guidance(guidance_scale, guidance, negative_prompt)

        # a copy, so that nothing a scheduler remembers passes from one call to the next
        scheduler = copy.deepcopy(self.scheduler)
        with _telling_of_default(steps, is_default=num_inference_steps is None):
            set_timesteps(scheduler, steps, device)
        if hasattr(scheduler, "set_begin_index"):
            # else it looks its place up by the timestep, and where two are the same it takes the later one
            scheduler.set_begin_index(0)
        self._num_timesteps = len(scheduler.timesteps)
        self._interrupt = False
        recorder = self._recorder(return_attention, shape, guidance)
        if has_text:
            warn_of_cuts([*prompts, *more_prompts, *negatives], self.tokenizer, self.text_encoder)

        return Job(
            prompts=prompts,
            # a weaker network answers to the same prompt, unless it was told otherwise
            others=prompts if self.guide_unet is not None and negative_prompt is None else negatives,
            images=images,
            shape=shape,
            steps=steps,
            generator=generator,
            scheduler=scheduler,
            step_options=step_options,
            guide=Guide(self.guidance_scale, guidance),
            output_type=output_type,
            callback=callback,
            tensor_inputs=tensor_inputs,
            recorder=recorder,
            device=device,
        )

    def _encode(self, job: Job) -> Text:
        """Encode the captions that the guidance needs, in one go. Each prompt's rows stand side by side."""
        if self.text_encoder is None:
            return Text({}, {}, [])
        if self._answers_others_only(job.guide.rules):
            captions = job.others
        else:
            captions = job.prompts if job.guide.scale == 1 else job.others + job.prompts
        states, mask = encode_captions(captions, self.tokenizer, self.text_encoder)
        rows = {
            "encoder_hidden_states": states.to(self.unet.dtype).repeat_interleave(job.images, dim=0),
            "encoder_attention_mask": mask.repeat_interleave(job.images, dim=0),
        }
        words = []
        if job.recorder is not None:
            found = caption_words(captions, self.tokenizer, self.text_encoder)[-len(job.prompts) :]
            words = [each for each in found for _ in range(job.images)]
        return Text(
            {name: value[-job.pictures :] for name, value in rows.items()},
            {name: value[: job.pictures] for name, value in rows.items()},
            words,
        )

    def _denoise(
        self,
        job: Job,
        text: Text,
        latents: Tensor,
        *,
        first: int = 0,
        after_step: Callable[[int, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Take latents (B, C, H, W) float32 from the noise of scheduler.timesteps[first] to clean pictures.

        after_step: called as f(step, latents) after each step of the scheduler, gives the latents to go on with.
        Raises ValueError naming the pictures that came out as NaN or infinity.
        """
        scheduler, timesteps = job.scheduler, job.scheduler.timesteps
        finite = torch.ones(job.pictures, dtype=torch.bool, device=job.device)
        if first == 0 and self.config.prediction_type != "flow":
            _warn_of_clean_start(scheduler)

        with self.progress_bar(total=job.steps - first // scheduler.order) as progress:
            for step in range(first, len(timesteps)):
                if self.interrupt:
                    continue

                if job.recorder is not None:
                    job.recorder.step = step - first
                prediction = self._predict(job, step, latents, text)
                # noted here, as a scheduler that clips turns infinity into an ordinary white
                finite &= prediction.isfinite().flatten(1).all(dim=1)
                latents = scheduler.step(prediction, timesteps[step], latents, **job.step_options).prev_sample
                if after_step is not None:
                    latents = after_step(step, latents)

                if job.callback is not None:
                    values = dict.fromkeys(job.tensor_inputs, latents)
                    latents = check_callback_answer(job.callback(self, step, timesteps[step], values), latents)
                if (step + 1) % scheduler.order == 0 or step + 1 == len(timesteps):
                    progress.update()

        check_finite(finite & latents.isfinite().flatten(1).all(dim=1))
        return latents

    def _finish(
        self, job: Job, text: Text, latents: Tensor, *, return_dict: bool
    ) -> SampledPictures | tuple[object, ...]:
        images = to_output(latents, job.output_type)
        attention = None if job.recorder is None else job.recorder.word_maps(text.words)
        self.maybe_free_model_hooks()
        if return_dict:
            return SampledPictures(images=images, attention=attention)
        return (images,) if attention is None else (images, attention)

    def _predict(self, job: Job, step: int, latents: Tensor, text: Text) -> Tensor:
        """The guided prediction for latents (B, C, H, W), float32."""
        scheduler, timestep = job.scheduler, job.scheduler.timesteps[step]
        sample = scheduler.scale_model_input(latents, timestep) if hasattr(scheduler, "scale_model_input") else latents
        if self.config.prediction_type == "flow":
            # the multistep schedulers round their timesteps down to whole numbers; sigma is the flow's time itself
            sigma = float(scheduler.sigmas[step])
            alpha, timestep = 1.0 - sigma, FLOW_TIME_SCALE * scheduler.sigmas[step].to(sample.device)
        else:
            # of the nearest trained step, where a scheduler stands between two
            alpha = float(scheduler.alphas_cumprod[round(float(timestep))]) ** 0.5
            sigma = (1.0 - alpha**2) ** 0.5

        has_other = bool(text.others) or self.guide_unet is not None
        only_other = self._answers_others_only(job.guide.rules)
        guided = has_other and not only_other and job.guide.acts_at(sigma / alpha if alpha else float("inf"))
        answer, other = self._answers(sample, timestep, text, guided=guided)
        if other is None:
            return answer
        return job.guide(answer, other, sample, clean_coefficients(self.config.prediction_type, alpha, sigma))

    def _answers(self, sample: Tensor, timestep: Tensor, text: Text, *, guided: bool) -> tuple[Tensor, Tensor | None]:
        """The answer to the prompts and, where it is guided, the other one; of one U-Net in one forward pass."""
        if not guided:
            return _forward(self.unet, sample, timestep, text.prompts), None
        if self.guide_unet is not None:
            answer = _forward(self.unet, sample, timestep, text.prompts)
            return answer, _forward(self.guide_unet, sample, timestep, text.others)
        rows = {name: torch.cat([text.others[name], text.prompts[name]]) for name in text.prompts}
        other, answer = _forward(self.unet, torch.cat([sample, sample]), timestep, rows).chunk(2)
        return answer, other

    def _answers_others_only(self, rules: Guidance) -> bool:
        """Scale 0 gives the prompts no weight, so that their rows can be left out."""
        return self.guidance_scale == 0 and self.guide_unet is None and not rules.is_projected and rules.is_everywhere

    def _recorder(
        self, asked: bool | AttentionChoice, shape: tuple[int, int, int, int], rules: Guidance
    ) -> AttentionRecorder | None:
        if asked is False:
            return None
        if asked is not True and not is_kind(asked, AttentionChoice):
            raise ValueError(f"return_attention must be True, False or an AttentionChoice, got {describe(asked)}")
        if self.text_encoder is None:
            raise ValueError("this model was trained without text: it has no attention to return")
        if self._answers_others_only(rules):
            raise ValueError("at guidance_scale 0 the prompts are not looked at: there is no attention to return")
        choice = AttentionChoice() if asked is True else asked
        return AttentionRecorder(self.unet, choice, pictures=shape[0], size=shape[2:], steps=self.num_timesteps)

    def _warn_of_no_guidance(
        self, scale: float | None, rules: Guidance, negative_prompt: str | Sequence[str] | None
    ) -> None:
        """Tell what the caller gave for a guidance that there is not. scale: as given, None for the pipeline's own."""
        acts = bool(rules.rescale) or rules.is_projected or not rules.is_everywhere
        given = {"guidance": acts}
        if self.text_encoder is None and self.guide_unet is None:
            # scripts give the pipeline's own where their user gave none
            given["guidance_scale"] = scale not in (None, 1, self.config.default_guidance_scale)
            reason = "on a model without text, unless it has a guide_unet"
        elif self.guidance_scale == 1:
            given |= {"negative_prompt": negative_prompt is not None, "guide_unet": self.guide_unet is not None}
            reason = "at guidance_scale 1"
        else:
            return
        for name in (name for name, is_given in given.items() if is_given):
            warnings.warn(f"{name} has no effect {reason}", stacklevel=4)

    def _checked_size(self, height: int | None, width: int | None) -> tuple[int, int]:
        size = self.unet.config.sample_size
        return check_size(
            size if height is None else height, size if width is None else width, self.unet.downsample_factor
        )

    def _step_options(
        self, eta: float, generator: torch.Generator | list[torch.Generator] | None
    ) -> dict[str, float | torch.Generator | list[torch.Generator] | None]:
        """What the scheduler's step() takes of eta and generator."""
        accepted = inspect.signature(self.scheduler.step).parameters
        if eta and "eta" not in accepted:
            warnings.warn(f"eta has no effect: {type(self.scheduler).__name__} has no such setting", stacklevel=4)
        if isinstance(generator, list) and len(generator) == 1:
            generator = generator[0]
        return {name: value for name, value in (("eta", eta), ("generator", generator)) if name in accepted}


@contextmanager
def _telling_of_default(steps: int, *, is_default: bool) -> Iterator[None]:
    """Add to an error about a number of steps that the caller gave none, and how to change it."""
    try:
        yield
    except ValueError as error:
        if not is_default:
            raise
        remedy = "give num_inference_steps, or pipe.register_to_config(default_steps=...)"
        raise ValueError(f"{error}; {steps} is this pipeline's own default: {remedy}") from None


def _forward(unet: ModelMixin, sample: Tensor, timestep: Tensor, text: dict[str, Tensor]) -> Tensor:
    # a guide's dtype may be another than the U-Net's, for which the text was encoded
    rows = {name: value.to(unet.dtype) if value.is_floating_point() else value for name, value in text.items()}
    return unet(sample.to(unet.dtype), timestep, **rows).sample.float()


def _warn_of_clean_start(scheduler: SchedulerMixin) -> None:
    """Tell of a first step at which half of a picture should be there already, while sampling has noise alone."""
    if not hasattr(scheduler, "add_noise"):
        return  # an inversion begins at a picture
    timestep = float(scheduler.timesteps[0])
    alpha = float(scheduler.alphas_cumprod[round(timestep)]) ** 0.5
    if alpha > 0.5:
        warnings.warn(
            f"{type(scheduler).__name__} begins at timestep {timestep:g} of {scheduler.config.num_train_timesteps}, "
            f"where {alpha:.0%} of a picture is there and not noise alone: "
            "set timestep_spacing to trailing, or take betas that end in more noise",
            stacklevel=4,
        )


def _callback_inputs(callback: Callback | None, names: list[str] | None) -> list[str]:
    if isinstance(callback, PipelineCallback | MultiPipelineCallbacks):
        names = callback.tensor_inputs
    elif callback is not None and not callable(callback):
        raise ValueError(f"callback_on_step_end must be a function, got {describe(callback)}")
    return check_callback_names(names, CALLBACK_TENSORS)

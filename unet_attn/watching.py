"""Looking at a run as it goes: grids of fixed prompts, validation, and the pipeline that the run publishes.

All of it sees the averaged weights and changes nothing in the training: what is random comes from generators of its
own, and live weights and modes return, even after an error. It is the main process' work; the others meet it in the
next step.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from accelerate import Accelerator
from torch import nn

from unet_attn.checkpoint import replace_files
from unet_attn.conditioning import TIMES, conditioning_gap
from unet_attn.consistency import ConsistencyTuning
from unet_attn.data import CaptionedImages, DataError, ImageError, StreamedImages
from unet_attn.faults import one_line
from unet_attn.model import TextConditionalUNet
from unet_attn.objective import Objective
from unet_attn.options import TrainOptions
from unet_attn.pipelines.grid import picture_grid
from unet_attn.pipelines.parts import DEFAULT_GUIDANCE_SCALE, DEFAULT_STEPS
from unet_attn.pipelines.text_to_image import TextToImagePipeline
from unet_attn.run_record import LOGS, VALIDATION
from unet_attn.schedulers import most_steps, set_timesteps
from unet_attn.tracking import drop_later_lines, warn

GRID_COLUMNS = 4
MOST_VALIDATED = 128  # pictures: each takes fifteen passes through the network

Look = Literal["sample", "validate"]
LOOKS: dict[Look, str] = {"sample": "samples", "validate": "validation"}  # and what each gives


class Averages(Protocol):
    """Averaged weights, which a model holds within a context: ExponentialMovingAverage, or OnePiece of sharded ones."""

    def swapped(self, model: nn.Module) -> AbstractContextManager[None]: ...


class Watcher:
    """Draws, validates and publishes what the averaged weights of `model` can do.

    Raises ValueError if prompts are to be drawn by a model without text.
    """

    def __init__(
        self,
        model: TextConditionalUNet,
        ema: Averages,
        objective: Objective,
        data: CaptionedImages | StreamedImages,
        options: TrainOptions,
        accelerator: Accelerator,
        *,
        tuning: ConsistencyTuning | None = None,
    ) -> None:
        has_text = model.text_encoder is not None
        options.check_prompts(has_text=has_text)
        self.model, self.ema, self.objective = model, ema, objective
        self.data, self.options, self.accelerator = data, options, accelerator
        self.folder = Path(options.output_dir)
        # of the grids, and of the published pipeline by default; what is tuned has learned its guidance
        steps, self.guidance = DEFAULT_STEPS, DEFAULT_GUIDANCE_SCALE
        if tuning is not None:
            steps, self.guidance = tuning.options.steps, 1.0
        # of fewer noise steps than that, or of a spacing that has no such schedule, as many as there are
        scheduler, at_most = objective.sampling_scheduler(), min(steps, objective.num_train_timesteps)
        self.steps = most_steps(scheduler, at_most) or at_most
        set_timesteps(scheduler, self.steps)  # one that has none at all is told of now
        # a model without text shows what it has to show
        self.pictures_in_grid = len(options.sample_prompts or ()) if has_text else 2 * GRID_COLUMNS
        self.validated = data.validation_indices(MOST_VALIDATED) if options.validate_every else []

    def looks(self) -> dict[Look, int]:
        """The kinds of look that this run takes, and every how many steps; at its end it takes all of them."""
        every = {"sample": self.options.sample_every, "validate": self.options.validate_every}
        return {look: steps for look, steps in every.items() if steps and self.passes(look)}

    def seconds(self, durations: Mapping[str, float]) -> float:
        """How long the looks at the end take: as the last ones did, or by the cost of a training step before."""
        # a training step costs three passes per picture; looks are the main process' alone
        per_pass = durations.get("step", 0.0) * self.accelerator.num_processes / (3 * self.options.batch_size)
        return sum(durations.get(look, self.passes(look) * per_pass) for look in self.looks())

    def passes(self, look: Look) -> int:
        """How many pictures go forward through the network in a look."""
        if look == "sample":
            return (1 if self.guidance == 1 else 2) * self.steps * self.pictures_in_grid
        kinds = 1 if self.model.text_encoder is None else 3
        return kinds * len(TIMES) * len(self.validated)

    def look(self, look: Look, step: int) -> dict[str, float]:
        """Take one. Returns the figures for the trackers, by name, of which a grid has none."""
        if look == "validate":
            return self.validate(step)
        self.sample(step)
        return {}

    def publish(self) -> None:
        """Write the pipeline: the run folder is what `from_pretrained` takes."""
        with self._pipeline() as pipeline:
            replace_files(self.folder, pipeline.save_pretrained)

    def sample(self, step: int) -> None:
        """Draw a grid; picture n has seed `seed` + n, as in scripts/sample.py."""
        seeds = [self.options.seed + n for n in range(self.pictures_in_grid)]
        prompts = list(self.options.sample_prompts)
        with self._pipeline() as pipeline, self.accelerator.autocast():
            pipeline.set_progress_bar_config(disable=True)
            images = pipeline(
                prompts or None,
                num_images_per_prompt=len(seeds) // max(1, len(prompts)),
                generator=[torch.Generator().manual_seed(seed) for seed in seeds],
            ).images
        folder = self.folder / "samples"
        folder.mkdir(exist_ok=True)
        captions = prompts or [f"seed {seed}" for seed in seeds]
        picture_grid(images, captions, columns=GRID_COLUMNS).save(folder / f"step-{step:06d}.png")

    def validate(self, step: int) -> dict[str, float]:
        """Losses at fixed noise and times with true, exchanged and empty captions: a line of validation.jsonl.

        Returns the figures for the trackers, by name.
        """
        items = self._validated_items(step)
        pictures, captions = [item["image"] for item in items], [item["caption"] for item in items]
        with self._pipeline() as pipeline, self.accelerator.autocast():
            gap = conditioning_gap(pipeline, torch.stack(pictures), captions, seed=self.options.seed)
        path = self.folder / LOGS / VALIDATION
        drop_later_lines(path, last_step=step - 1)
        found = {name: _plain(value) for name, value in vars(gap).items()}
        line = {"step": step, "held_out": self.data.has_held_out, **found}
        with path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
        return {
            f"validation/{name}": value["value"]
            for name, value in line.items()
            if isinstance(value, dict) and "value" in value
        }

    def _validated_items(self, step: int) -> list[dict[str, Any]]:
        """The pictures to validate on, less those that have broken since they were checked."""
        items = []
        for index in self.validated:
            try:
                items.append(self.data[index])
            except ImageError as error:
                reason = one_line(str(error))
                warn(f"step {step}: a picture that cannot be read any more is left out of the validation: {reason}")
        if not items:
            raise DataError("none of its pictures can be read any more")
        return items

    @contextmanager
    def _pipeline(self) -> Iterator[TextToImagePipeline]:
        """The pipeline of the averaged weights."""
        with self.ema.swapped(self.model):
            yield TextToImagePipeline(
                self.model.unet,
                self.objective.sampling_scheduler(),
                text_encoder=self.model.text_encoder,
                tokenizer=self.model.tokenizer,
                default_steps=self.steps,
                default_guidance_scale=self.guidance,
            )


def _plain(value: Any) -> Any:
    """An estimate as JSON has it."""
    return value._asdict() if hasattr(value, "_asdict") else value

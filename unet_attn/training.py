"""Training: the loop, and what a run leaves behind.

One optimizer step draws a global batch, whatever the number of processes and micro-batches that share it; everything
random follows from (seed, step, position in the batch), see `unet_attn.sampler`. Each step the processes add up one
small vector: the loss, the main process' progress, whether a signal asked to stop. So all agree with no other message.
"""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from unet_attn.checkpoint import load_checkpoint, replace_files, save_checkpoint
from unet_attn.data import CaptionedImages, ReplacedPictures, StreamedImages
from unet_attn.ema import ExponentialMovingAverage, trainable
from unet_attn.encodings import RememberedEncodings
from unet_attn.objective import Objective
from unet_attn.optim import (
    build_optimizer,
    hidden_matrices,
    learning_rate_factor,
    load_optimizer_tensors,
    optimizer_tensors,
    set_learning_rate,
)
from unet_attn.options import TrainOptions, fixed_settings
from unet_attn.pipelines.grid import picture_grid
from unet_attn.pipelines.text_to_image import TextToImagePipeline, encode_captions
from unet_attn.sampler import (
    MODULE_DROPOUT,
    batch_noise,
    derived_seed,
    stratified_uniform,
)
from unet_attn.tracking import RunLog, StopRequest
from unet_attn.unet import AttnUNet2D

# Convolutions are faster so on CPUs and GPUs alike; one place, for measuring the other.
MEMORY_FORMAT = torch.channels_last
SAMPLE_STEPS = 25
SAMPLE_GUIDANCE = 3.0
SAMPLE_COLUMNS = 4
MOST_SKIPS = 10
MOST_NAMES = 8


class TrainingDiverged(ValueError):
    """Too many steps in a row had a loss or gradient that was not finite."""


class TextConditionalUNet(nn.Module):
    """What is trained, as one module: the U-Net and, if there is text, the encoder that conditions it."""

    def __init__(
        self,
        unet: AttnUNet2D,
        text_encoder: nn.Module | None = None,
        tokenizer: PreTrainedTokenizerFast | None = None,
    ) -> None:
        super().__init__()
        self.unet = unet
        self.text_encoder = text_encoder
        self.tokenizer = tokenizer
        self.encode = partial(encode_captions, tokenizer=tokenizer, text_encoder=text_encoder)
        if text_encoder is not None and not trainable(text_encoder):
            self.encode = RememberedEncodings(self.encode)

    def forward(self, sample: Tensor, timestep: Tensor, captions: list[str]) -> Tensor:
        """sample: (B, C, H, W); timestep: (B,); captions: B strings, unused without text. Returns the prediction."""
        if self.text_encoder is None:
            return self.unet(sample, timestep).sample
        states, mask = self.encode(captions)
        return self.unet(sample, timestep, states, mask).sample


class Trainer:
    """Trains `model` on `data` and leaves a run folder behind.

    config: the resolved configuration, kept as config.yaml; resume_from: a checkpoint, as `check_start` gives it.
    Raises ValueError if the data set is smaller than a batch or the checkpoint is of another model.
    """

    def __init__(
        self,
        model: TextConditionalUNet,
        objective: Objective,
        data: CaptionedImages | StreamedImages,
        options: TrainOptions,
        accelerator: Accelerator,
        *,
        config: str,
        resume_from: Path | None = None,
    ) -> None:
        data.check_batch_size(options.batch_size)
        if options.sample_prompts and model.text_encoder is None:
            raise ValueError("train.sample_prompts need a text_encoder, and this model has none")
        self.model = model.to(memory_format=MEMORY_FORMAT).train()
        self.objective, self.data, self.options, self.accelerator = objective, data, options, accelerator
        self.folder, self.config = Path(options.output_dir), config

        self.parameters = trainable(model)
        optimizer = build_optimizer(
            self.parameters,
            options.optimizer,
            learning_rate=options.learning_rate,
            muon_learning_rate=options.muon_learning_rate,
            matrices=hidden_matrices(model, ends=(model.unet.conv_in, model.unet.conv_out)),
        )
        self.wrapped, self.optimizer = accelerator.prepare(model, optimizer)
        self.ema = ExponentialMovingAverage(model, options.ema_decay)

        # a model without text shows what it has to show
        self.pictures_in_grid = len(options.sample_prompts) if model.text_encoder is not None else 2 * SAMPLE_COLUMNS

        self.step = 0
        self.seconds_before = 0.0  # what earlier sessions of this run took
        self.started: float | None = None
        self.skipped_in_row = 0
        self.stop_request = StopRequest()
        self.agreed_to_stop = False
        self.replaced_pictures, self.replaced_in_step = ReplacedPictures(), 0
        # how long a step, a save and a sample grid took, so that a run by the clock can end on time
        self.step_seconds, self.save_seconds = 0.0, 1.0
        self.sample_seconds: float | None = None
        self.saved_step: int | None = None
        self.fixed = fixed_settings(options, model.unet, model.text_encoder, objective)
        if resume_from is not None:
            self._load(resume_from)
        self.progress = self._progress()

    def run(self) -> bool:
        """Train to the end. Returns False if a signal ended the run early; its checkpoint is then saved."""
        self.started = monotonic()
        self._open_folder()
        self.batches = self._batches()
        with self.stop_request:
            try:
                if self.progress >= 1:
                    self.log.say(f"already at {self.step} steps: nothing is left to train")
                while self.progress < 1 and not self.agreed_to_stop:
                    self._train_step()
                    self._save_and_sample()
                if not self.agreed_to_stop:
                    self._finish()
            finally:
                self.log.close()
        self.accelerator.wait_for_everyone()
        return not self.agreed_to_stop

    # one optimizer step

    def _train_step(self) -> None:
        began = monotonic()
        self.step += 1
        options = self.options
        shape = {"warmup_steps": options.warmup_steps, "cooldown_fraction": options.cooldown_fraction}
        factor = learning_rate_factor(self.step, self.progress, **shape)
        set_learning_rate(self.optimizer, factor)

        losses, indices = self._accumulate_gradients()
        norm = float(self.accelerator.clip_grad_norm_(self.parameters.values(), options.max_grad_norm))
        loss = self._agree(float(losses.double().mean()))

        finite = torch.isfinite(torch.tensor([loss, norm])).all().item()
        if finite or self.accelerator.scaler is not None:  # the scaler has to see an overflow to lower its scale
            self.optimizer.step()
        if finite:
            self.ema.update(self.model)
            self.skipped_in_row = 0
        else:
            self._report_skip(losses, indices)
        self.optimizer.zero_grad(set_to_none=True)

        self.step_seconds = monotonic() - began
        values = {
            "loss": loss,
            "lr": factor * options.learning_rate,
            "pictures_seen": self.step * options.batch_size,
            "grad_norm": norm,
            "pictures_per_second": options.batch_size / self.step_seconds,
        }
        self.log.step(values, step=self.step, progress=self.progress)
        if self.skipped_in_row >= MOST_SKIPS:
            raise TrainingDiverged(
                f"{MOST_SKIPS} steps in a row had a loss or gradient that is not finite, up to step {self.step}: "
                "lower train.learning_rate; the last good checkpoint is kept"
            )

    def _accumulate_gradients(self) -> tuple[Tensor, Tensor]:
        """Backward through this process' micro-batches. Returns its samples' losses (b,) and data indices (b,)."""
        uniform = stratified_uniform(self.options.seed, self.step, self.options.batch_size)
        losses, indices = [], []
        count = self.options.gradient_accumulation_steps
        for micro in range(count):
            batch = next(self.batches)
            # gradients are exchanged once, with the window's last micro-batch
            with nullcontext() if micro == count - 1 else self.accelerator.no_sync(self.wrapped):
                loss = self._losses(batch, micro, uniform)
                self.accelerator.backward(loss.mean() / count)
            for message in batch["replaced"]:
                self.log.warn(f"step {self.step}: a picture that cannot be read any more is replaced: {message}")
            self.replaced_in_step += len(batch["replaced"])
            losses.append(loss.detach())
            indices.append(batch["index"])
        return torch.cat(losses), torch.cat(indices)

    def _losses(self, batch: Mapping[str, Any], micro: int, uniform: Tensor) -> Tensor:
        """The loss of each sample of a micro-batch, (b,)."""
        seed, device, positions = self.options.seed, self.accelerator.device, [key.position for key in batch["key"]]
        clean = batch["image"].to(device)
        noise = batch_noise(seed, self.step, positions, clean.shape[1:]).to(device)
        t = self.objective.sample_times(uniform[positions]).to(device)
        noisy = self.objective.add_noise(clean, noise, t).to(memory_format=MEMORY_FORMAT)
        # dropout inside modules draws from the ambient generator: set it, so that a resumed run draws the same
        torch.manual_seed(derived_seed(seed, MODULE_DROPOUT, self.step, micro, self.accelerator.process_index))
        prediction = self.wrapped(noisy, self.objective.model_timestep(t), batch["caption"])
        return self.objective.loss(prediction, clean, noise, t)

    def _agree(self, loss: float) -> float:
        """Share the loss, the main process' progress and any signal between the processes. Returns the mean loss."""
        accelerator = self.accelerator
        progress = self._progress() if accelerator.is_main_process else 0.0
        dtype = torch.float32 if accelerator.device.type == "mps" else torch.float64
        parts = [loss / accelerator.num_processes, progress, float(self.stop_request.made), self.replaced_in_step]
        shared = accelerator.reduce(torch.tensor(parts, dtype=dtype, device=accelerator.device), reduction="sum")
        loss, self.progress, stop, replaced = shared.tolist()
        self.replaced_pictures.add(round(replaced), self.options.batch_size)  # all processes stop at the same step
        self.replaced_in_step = 0
        self.agreed_to_stop = stop > 0
        return loss

    def _progress(self) -> float:
        """The part of the run that is done, in [0, 1]: by steps or by the clock, whichever is further."""
        options, parts = self.options, []
        if options.max_steps is not None:
            parts.append(self.step / options.max_steps)
        if options.max_minutes is not None:
            limit = 60 * options.max_minutes
            budget = max(limit / 2, limit - self.save_seconds - self._sample_seconds())  # time to end in
            # a further step that would end later than it should begin is not begun
            parts.append((self._seconds() + self.step_seconds / 2) / budget)
        return min(1.0, max(parts))

    def _sample_seconds(self) -> float:
        """How long the grid at the end will take: as the last one did, or by the cost of a training step before."""
        if not self.options.sample_every:
            return 0.0
        if self.sample_seconds is not None:
            return self.sample_seconds
        forwards = 2 * SAMPLE_STEPS * self.pictures_in_grid  # two each for guidance; a training step costs three
        return forwards * self.step_seconds / (3 * self.options.batch_size) * self.accelerator.num_processes

    def _seconds(self) -> float:
        return self.seconds_before + (0.0 if self.started is None else monotonic() - self.started)

    def _report_skip(self, losses: Tensor, indices: Tensor) -> None:
        self.skipped_in_row += 1
        bad = indices[~torch.isfinite(losses).cpu()].tolist()
        if not bad and (self.accelerator.scaler is not None or not self.accelerator.is_main_process):
            return  # an overflow of half precision is the scaler's business, and one process is enough to tell
        found = bad or indices.tolist()
        names = ", ".join(self.data.name(index) for index in found[:MOST_NAMES])
        more = f" and {len(found) - MOST_NAMES} more" if len(found) > MOST_NAMES else ""
        what = "loss" if bad else "gradient"
        self.log.warn(f"step {self.step} is skipped: its {what} is not finite; pictures: {names}{more}")

    # what is kept

    def _save_and_sample(self) -> None:
        options = self.options
        if self.step % options.checkpoint_every == 0 or self.agreed_to_stop:
            self._save()
        if options.sample_every and self.step % options.sample_every == 0 and self.progress < 1:
            self._sample()

    def _finish(self) -> None:
        if self.saved_step == self.step:
            self._save_pipeline()
        else:
            self._save()
        if self.options.sample_every:
            self._sample()

    def _save(self) -> None:
        """Write a checkpoint and publish the pipeline, from the main process; the others meet it in the next step."""
        self.saved_step = self.step
        if not self.accelerator.is_main_process:
            return
        began = monotonic()
        scaler, tokenizer = self.accelerator.scaler, self.model.tokenizer
        save_checkpoint(
            self.folder / "checkpoints",
            self.step,
            tensors={
                "model": self.parameters,
                "ema": self.ema.averages,
                "optimizer": optimizer_tensors(self.optimizer, self.parameters),
            },
            state={
                "seconds": self._seconds(),
                "durations": [self.step_seconds, self.save_seconds, self.sample_seconds],
                "ema_updates": self.ema.updates,
                "skipped_in_row": self.skipped_in_row,
                "scaler": None if scaler is None else scaler.state_dict(),
                "fixed": self.fixed,
            },
            keep=self.options.keep_checkpoints,
            write_more=None if tokenizer is None else lambda folder: tokenizer.save_pretrained(folder / "tokenizer"),
        )
        self._save_pipeline()
        self.save_seconds = monotonic() - began

    def _load(self, path: Path) -> None:
        """Go on from a checkpoint. Raises ValueError naming the first setting that is not what it was saved with."""
        checkpoint = load_checkpoint(path)
        state, now = checkpoint.state, self.fixed
        for key in sorted({*now, *state["fixed"]}):
            was, is_now = state["fixed"].get(key), now.get(key)
            if was != is_now:
                raise ValueError(f"checkpoint {path} was trained with {key} {was}, but it is {is_now} now")
        for name, parameter in self.parameters.items():
            if name not in checkpoint.tensors["model"]:
                raise ValueError(f"checkpoint {path} has no weights for {name!r}")
            parameter.data.copy_(checkpoint.tensors["model"][name])
        self.ema.load(checkpoint.tensors["ema"], updates=state["ema_updates"])
        load_optimizer_tensors(self.optimizer, self.parameters, checkpoint.tensors["optimizer"])
        if self.accelerator.scaler is not None and state["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.step = self.saved_step = state["step"]
        self.step_seconds, self.save_seconds, self.sample_seconds = state["durations"]
        self.seconds_before, self.skipped_in_row = state["seconds"], state["skipped_in_row"]

    def _pipeline(self) -> TextToImagePipeline:
        text = {"text_encoder": self.model.text_encoder, "tokenizer": self.model.tokenizer}
        return TextToImagePipeline(self.model.unet, self.objective.sampling_scheduler(), **text)

    def _save_pipeline(self) -> None:
        """Publish the averaged weights as a pipeline: the run folder is what `from_pretrained` takes."""
        if self.accelerator.is_main_process:
            with self.ema.swapped(self.model):
                replace_files(self.folder, self._pipeline().save_pretrained)

    def _sample(self) -> None:
        """Draw a grid with the averaged weights; picture n has seed `seed` + n, as in scripts/sample.py."""
        if not self.accelerator.is_main_process or not self.pictures_in_grid:
            return
        began = monotonic()
        seeds = [self.options.seed + n for n in range(self.pictures_in_grid)]
        prompts = list(self.options.sample_prompts)
        with self.ema.swapped(self.model), self.accelerator.autocast():
            pipeline = self._pipeline()
            pipeline.set_progress_bar_config(disable=True)
            images = pipeline(
                prompts or None,
                num_images_per_prompt=len(seeds) // max(1, len(prompts)),
                num_inference_steps=min(SAMPLE_STEPS, self.objective.num_train_timesteps),
                guidance_scale=SAMPLE_GUIDANCE,
                generator=[torch.Generator().manual_seed(seed) for seed in seeds],
            ).images
        folder = self.folder / "samples"
        folder.mkdir(exist_ok=True)
        captions = prompts or [f"seed {seed}" for seed in seeds]
        picture_grid(images, captions, columns=SAMPLE_COLUMNS).save(folder / f"step-{self.step:06d}.png")
        self.sample_seconds = monotonic() - began

    # around the loop

    def _open_folder(self) -> None:
        if self.accelerator.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "config.yaml").write_text(self.config, encoding="utf-8")
            if self.data.faults:
                self.data.write_faults(self.folder / "skipped.tsv")
        self.log = RunLog(
            self.folder / "logs",
            self.accelerator,
            step=self.step,
            progress=self.progress,
            batch_size=self.options.batch_size,
        )

    def _batches(self) -> Iterator[dict[str, Any]]:
        return self.data.batches(
            self.options.batch_size,
            start_step=self.step + 1,
            rank=self.accelerator.process_index,
            world_size=self.accelerator.num_processes,
            accumulation=self.options.gradient_accumulation_steps,
            pin_memory=self.accelerator.device.type == "cuda",
        )

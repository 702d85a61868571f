"""Training: the loop, and what a run leaves behind.

One optimizer step draws a global batch, whatever the number of processes and micro-batches that share it; everything
random follows from (seed, step, position in the batch), see `unet_attn.sampler`. Each step the processes add up one
small vector: the loss, the main process' progress, whether a signal asked to stop. So all agree with no other message.
"""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from unet_attn.checkpoint import load_checkpoint, save_checkpoint
from unet_attn.clock import RunClock
from unet_attn.consistency import ConsistencyTuning
from unet_attn.data import CaptionedImages, ReplacedPictures, StreamedImages
from unet_attn.divergence import SkippedSteps, check_finite
from unet_attn.ema import ExponentialMovingAverage, trainable
from unet_attn.faults import one_line
from unet_attn.loss_weights import uncertain_loss
from unet_attn.model import TextConditionalUNet
from unet_attn.objective import Objective
from unet_attn.optim import (
    build_optimizer,
    hidden_matrices,
    learning_rate_factor,
    load_optimizer_tensors,
    optimizer_tensors,
    set_learning_rate,
)
from unet_attn.options import TrainOptions, check_unchanged, fixed_settings
from unet_attn.posthoc import TRACKED, PowerFunctionEMA, drop_snapshots, write_snapshot
from unet_attn.run_record import LOGS, NOISE_BINS
from unet_attn.sampler import MODULE_DROPOUT, batch_noise, derived_seed, stratified_uniform
from unet_attn.sharding import OnePiece, copy_whole, gathered, whole
from unet_attn.tracking import RunLog, StopRequest, open_folder, peak_memory, warn
from unet_attn.watching import LOOKS, Watcher

# Convolutions are faster so on CPUs and GPUs alike; one place, for measuring the other.
MEMORY_FORMAT = torch.channels_last


class Trainer:
    """Trains `model` on `data` and leaves a run folder behind.

    config: the resolved configuration, kept as config.yaml; resume_from: a checkpoint, as `check_start` gives it;
    tuning: what the network is tuned to, in place of the objective's own targets.
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
        tuning: ConsistencyTuning | None = None,
    ) -> None:
        data.check_batch_size(options.batch_size)
        objective.check_model(model.unet, model.uncertainty)
        self.model = model.train()
        self.one_piece = OnePiece(model, accelerator) if accelerator.is_fsdp2 else None
        if self.one_piece is None:
            model.to(memory_format=MEMORY_FORMAT)  # fully_shard refuses it
        self.objective, self.data, self.options, self.accelerator = objective, data, options, accelerator
        self.tuning, self.folder, self.config = tuning, Path(options.output_dir), config
        if tuning is not None:
            tuning.prepare(accelerator.device, MEMORY_FORMAT, compile=options.compile)

        optimizer = build_optimizer(
            trainable(model),
            options.optimizer,
            learning_rate=options.learning_rate,
            muon_learning_rate=options.muon_learning_rate,
            matrices=hidden_matrices(model, ends=(model.unet.conv_in, model.unet.conv_out)),
        )
        self.wrapped, self.optimizer = accelerator.prepare(model, optimizer)
        self.parameters = trainable(model)  # FSDP has put others in the place of those before
        self.ema = ExponentialMovingAverage(model, options.ema_decay)
        self.tracks = PowerFunctionEMA(model, TRACKED if options.ema_snapshot_every else ())
        seen = (model, self.ema) if self.one_piece is None else (self.one_piece.model, self.one_piece)
        self.watcher = Watcher(*seen, objective, data, options, accelerator, tuning=tuning)
        model.speed_up(compile=options.compile, checkpointing=options.gradient_checkpointing)

        self.step = 0
        self.clock = RunClock(max_steps=options.max_steps, max_minutes=options.max_minutes)
        self.skips = SkippedSteps()
        self.stop_request = StopRequest()
        self.agreed_to_stop = False
        self.replaced_pictures, self.replaced_in_step = ReplacedPictures(), 0
        self.saved_step: int | None = None
        self.published_step: int | None = None
        self.data_now = data.fingerprint()  # once: it is of all names and captions
        self.data_then: str | None = None  # the data set of the checkpoint
        share, tuned = data.options.validation_share, {} if tuning is None else tuning.settings
        networks = (model.unet, model.text_encoder)
        self.fixed = fixed_settings(options, *networks, objective, validation_share=share, tuning=tuned)
        if resume_from is not None:
            self._load(resume_from)
        self.progress = self._progress()

    def run(self) -> bool:
        """Train to the end. Returns False if a signal ended the run early; its checkpoint is then saved."""
        self.clock.start()
        self._open_folder()
        if self.data_then not in (None, self.data_now):
            warn("the data set is not what it was when the run was left: it goes on with what is there now")
        self.batches = self._batches()
        with self.stop_request:
            try:
                if self.progress >= 1:
                    self.log.say(f"already at {self.step} steps: nothing is left to train")
                elif self.step:
                    self._look()  # a kill may have come between the checkpoint and this
                while self.progress < 1 and not self.agreed_to_stop:
                    self._train_step()
                    self._save_and_look()
                if not self.agreed_to_stop:
                    self._finish()
            finally:
                self.log.close()
        self.accelerator.wait_for_everyone()
        return not self.agreed_to_stop

    # one optimizer step

    def _train_step(self) -> None:
        self.step += 1
        options = self.options
        factor = learning_rate_factor(
            self.step,
            self.progress,
            warmup_steps=options.warmup_steps,
            schedule=options.schedule,
            cooldown_fraction=options.cooldown_fraction,
        )
        set_learning_rate(self.optimizer, factor)

        with self.clock.timed("step"):
            losses, levels, indices = self._accumulate_gradients()
            # not Accelerate's clip_grad_norm_, which under FSDP2 unscales twice where the model has frozen parameters;
            # what else it knows are the other FSDP and DeepSpeed, which train.py refuses, and XLA
            self.accelerator.unscale_gradients()
            norm = float(whole(nn.utils.clip_grad_norm_(self.parameters.values(), options.max_grad_norm)))
            loss, loss_by_noise = self._agree(losses, levels)

            finite = torch.isfinite(torch.tensor([loss, norm])).all().item()
            if finite or self.accelerator.scaler is not None:  # the scaler has to see an overflow to lower its scale
                self.optimizer.step()
            if finite:
                self.ema.update(self.model)
                self.tracks.update(self.model)
                self.skips.in_row = 0
            else:
                self._report_skip(losses, indices)
            self.optimizer.zero_grad(set_to_none=True)

        values = {
            "loss": loss,
            "lr": factor * options.learning_rate,
            "pictures_seen": self.step * options.batch_size,
            "grad_norm": norm,
            "pictures_per_second": options.batch_size / self.clock.durations["step"],
            "data_wait": self.data_wait,
            "memory_gib": peak_memory(self.accelerator.device),
            "loss_by_noise": loss_by_noise,
        }
        self.log.step(values, step=self.step, progress=self.progress)
        self.skips.check(self.step)

    def _accumulate_gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """Backward through this process' micro-batches.

        Returns its samples' losses (b,), their noise levels (b,) in [0, 1] and their data indices (b,).
        """
        uniform = stratified_uniform(self.options.seed, self.step, self.options.batch_size)
        losses, levels, indices = [], [], []
        count = self.options.gradient_accumulation_steps
        self.data_wait = 0.0
        for micro in range(count):
            with self.clock.timed("data"):
                batch = next(self.batches)
            self.data_wait += self.clock.durations["data"]
            # gradients are exchanged once, with the window's last micro-batch
            with nullcontext() if micro == count - 1 else self.accelerator.no_sync(self.wrapped):
                loss, level, log_variance = self._losses(batch, micro, uniform)
                minimized = loss if log_variance is None else uncertain_loss(loss, log_variance)
                self.accelerator.backward(minimized.mean() / count)
            for message in batch["replaced"]:
                warn(f"step {self.step}: a picture that cannot be read any more is replaced: {message}")
            self.replaced_in_step += len(batch["replaced"])
            losses.append(loss.detach())
            levels.append(level)
            indices.append(batch["index"])
        return torch.cat(losses), torch.cat(levels), torch.cat(indices)

    def _losses(self, batch: Mapping[str, Any], micro: int, uniform: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The loss of each sample of a micro-batch (b,), its noise level (b,) in [0, 1] and its log variance (b,)."""
        seed, device, positions = self.options.seed, self.accelerator.device, [key.position for key in batch["key"]]
        clean = batch["image"].to(device)
        noise = batch_noise(seed, self.step, positions, clean.shape[1:]).to(device)
        t = (self.tuning or self.objective).sample_times(uniform[positions]).to(device)
        noisy = self.objective.add_noise(clean, noise, t).to(memory_format=MEMORY_FORMAT)
        target = None
        if self.tuning is not None:
            with self.accelerator.autocast():
                target = self.tuning.target(self.model, self.ema, noisy, t, batch["caption"], self.progress)
        # dropout inside modules draws from the ambient generator: set it, so that a resumed run draws the same
        torch.manual_seed(derived_seed(seed, MODULE_DROPOUT, self.step, micro, self.accelerator.process_index))
        prediction, log_variance = self.wrapped(noisy, self.objective.model_timestep(t), batch["caption"])
        level = t if self.objective.is_flow else t / self.objective.num_train_timesteps
        return self.objective.loss(prediction, clean, noise, t, target=target), level, log_variance

    def _agree(self, losses: Tensor, levels: Tensor) -> tuple[float, list[float]]:
        """Share the losses, the main process' progress and any signal between the processes.

        Returns the mean loss, and that of each of NOISE_BINS parts of the times (not a number where no sample fell).
        """
        accelerator = self.accelerator
        progress = self._progress() if accelerator.is_main_process else 0.0
        losses, part = losses.double().cpu(), (levels * NOISE_BINS).long().clamp(max=NOISE_BINS - 1).cpu()
        sums = torch.zeros(NOISE_BINS, dtype=torch.float64).index_add_(0, part, losses)
        counts = torch.bincount(part, minlength=NOISE_BINS)
        told = [float(losses.mean()) / accelerator.num_processes, progress]
        told += [float(self.stop_request.made), self.replaced_in_step, *sums.tolist(), *counts.tolist()]

        dtype = torch.float32 if accelerator.device.type == "mps" else torch.float64
        shared = accelerator.reduce(torch.tensor(told, dtype=dtype, device=accelerator.device), reduction="sum").cpu()
        loss, self.progress, stop, replaced = shared[:4].tolist()
        self.replaced_pictures.add(round(replaced), self.options.batch_size)  # all processes stop at the same step
        self.replaced_in_step = 0
        self.agreed_to_stop = stop > 0
        return loss, (shared[4 : 4 + NOISE_BINS] / shared[4 + NOISE_BINS :]).tolist()

    def _progress(self) -> float:
        """The part of the run that is done, in [0, 1]; a run by the clock leaves time for what `_finish` does."""
        kept = ["save", "snapshot"] if self.options.ema_snapshot_every else ["save"]
        durations = self.clock.durations
        at_end = sum(durations.get(kind, 1.0) for kind in kept) + self.watcher.seconds(durations)
        return self.clock.progress(self.step, seconds_at_end=at_end)

    def _report_skip(self, losses: Tensor, indices: Tensor) -> None:
        self.skips.in_row += 1
        # an overflow of half precision is the scaler's business, and one process is enough to tell
        if losses.isfinite().all() and (self.accelerator.scaler is not None or not self.accelerator.is_main_process):
            return
        warn(self.skips.describe(self.step, losses, indices, self.data.name))

    # what is kept and looked at

    def _save_and_look(self) -> None:
        skipped = self.skips.in_row > 0
        # What is kept and shown are weights that still work; if they do not, the last good ones stay. A run that stops
        # has to save what it is at, which a skipped step left as it was.
        if skipped and not self.agreed_to_stop:
            return
        # before the checkpoint: a kill between the two leaves a snapshot too many, which resuming makes again
        every = self.options.ema_snapshot_every
        if every and self.step % every == 0 and not skipped:
            self._snapshot()
        if self.step % self.options.checkpoint_every == 0 or self.agreed_to_stop:
            self._save()
        if self.progress < 1 and not self.agreed_to_stop:  # a look that is left out here is taken when the run goes on
            self._look()

    def _finish(self) -> None:
        self.skips.check(self.step, at_end=True)
        if self.options.ema_snapshot_every and self.step % self.options.ema_snapshot_every:
            self._snapshot()
        if self.saved_step != self.step:
            self._save()
        elif self.published_step != self.step:  # a finished run that is resumed
            self._publish()
        self._look(at_end=True)

    def _snapshot(self) -> None:
        """Keep the averages from which scripts/ema.py makes one of another length."""
        with self.clock.timed("snapshot"):
            write_snapshot(self.folder, self.step, self.tracks, is_main=self.accelerator.is_main_process)

    def _publish(self) -> None:
        """Publish the pipeline, from the main process; all have to call it."""
        if self.one_piece is not None:
            self.one_piece.take(self.ema.averages)
        if self.accelerator.is_main_process:
            self.watcher.publish()
        self.published_step = self.step

    def _look(self, *, at_end: bool = False) -> None:
        """Take the looks that are due at this step, at the end all. The main process' work, which may fail.

        A picture that cannot be read, numbers too large for half precision or too little memory are told of, and the
        training goes on: no other process takes part in what is tried here, so that none is left waiting.
        """
        due = [look for look, steps in self.watcher.looks().items() if at_end or self.step % steps == 0]
        if due and self.one_piece is not None:
            self.one_piece.take(self.ema.averages)
        for look in due if self.accelerator.is_main_process else ():
            memory_ran_out = False
            try:
                with self.clock.timed(look):
                    if figures := self.watcher.look(look, self.step):
                        self.log.track(figures, step=self.step)
            except (ValueError, OSError, RuntimeError) as error:
                warn(f"step {self.step}: no {LOOKS[look]}: {one_line(str(error))}")
                memory_ran_out = isinstance(error, torch.OutOfMemoryError)
            if memory_ran_out:  # only here: the error holds on to what it had
                torch.cuda.empty_cache()

    def _save(self) -> None:
        """Write a checkpoint and publish the pipeline. All have to call it; the main process alone writes.

        Raises TrainingDiverged, and writes nothing, if a weight is not finite.
        """
        check_finite(self.parameters.values(), self.step)
        self.saved_step = self.step
        tensors = {
            "model": self.parameters,
            "ema": self.ema.averages,
            "optimizer": optimizer_tensors(self.optimizer, self.parameters),
            **self.tracks.tensors(),
        }
        is_main = self.accelerator.is_main_process
        with self.clock.timed("save"):
            whole_tensors = {kind: gathered(group, keep=is_main) for kind, group in tensors.items()}
            if is_main:
                self._write_checkpoint(whole_tensors)
            self._publish()

    def _write_checkpoint(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        scaler, tokenizer = self.accelerator.scaler, self.model.tokenizer
        save_checkpoint(
            self.folder / "checkpoints",
            self.step,
            tensors=tensors,
            state={
                "seconds": self.clock.seconds(),
                "durations": self.clock.durations,
                "ema_updates": self.ema.updates,
                "scaler": None if scaler is None else scaler.state_dict(),
                "fixed": self.fixed,
                "data": self.data_now,
            },
            keep=self.options.keep_checkpoints,
            write_more=None if tokenizer is None else lambda into: tokenizer.save_pretrained(into / "tokenizer"),
        )

    def _load(self, path: Path) -> None:
        """Go on from a checkpoint. Raises ValueError naming the first setting that is not what it was saved with."""
        checkpoint = load_checkpoint(path, checked=True)
        state = checkpoint.state
        check_unchanged(path, state["fixed"], self.fixed)
        for name in self.parameters:
            if name not in checkpoint.tensors["model"]:
                raise ValueError(f"checkpoint {path} has no weights for {name!r}")
        copy_whole(self.parameters, checkpoint.tensors["model"])
        self.ema.load(checkpoint.tensors["ema"], updates=state["ema_updates"])
        self.tracks.load(checkpoint.tensors, updates=state["ema_updates"])
        load_optimizer_tensors(self.optimizer, self.parameters, checkpoint.tensors["optimizer"])
        if self.accelerator.scaler is not None and state["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.step = self.saved_step = state["step"]
        self.clock.seconds_before, self.clock.durations = state["seconds"], state["durations"]
        self.data_then = state["data"]

    # around the loop

    def _open_folder(self) -> None:
        changed = []
        if self.accelerator.is_main_process:
            drop_snapshots(self.folder, after=self.step)
            changed = open_folder(self.folder, self.config, self.data, step=self.step)
        self.log = RunLog(
            self.folder / LOGS,
            self.accelerator,
            step=self.step,
            progress=self.progress,
            batch_size=self.options.batch_size,
            config=self.fixed,
        )
        if changed:
            self.log.say(f"goes on with other settings than it had: {'; '.join(changed)}")

    def _batches(self) -> Iterator[dict[str, Any]]:
        return self.data.batches(
            self.options.batch_size,
            start_step=self.step + 1,
            rank=self.accelerator.process_index,
            world_size=self.accelerator.num_processes,
            accumulation=self.options.gradient_accumulation_steps,
            pin_memory=self.accelerator.device.type == "cuda",
        )

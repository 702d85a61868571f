"""The options of a training run, and what is refused before any data is read."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Literal

from diffusers import ConfigMixin

from unet_attn.checkpoint import fault, find_checkpoint, numbered, step_of
from unet_attn.config_files import read_config
from unet_attn.objective import Objective
from unet_attn.optim import Schedule
from unet_attn.sampler import micro_batch_size

OBJECTIVE_KEYS = ("prediction_type", "x_prediction", "time_sampling", "logit_mean", "logit_std", "loss_weighting")
# what each release of transformers writes anew of the same text model, which its path names
PER_RELEASE = {"text_encoder.model_config"}


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """How to train, how long, and what to keep.

    Args:
        output_dir: the run's folder; it must not hold another run.
        seed: of the weights, the order of the pictures and every random draw.
        batch_size: pictures per optimizer step, all processes and accumulation steps together.
        gradient_accumulation_steps: into how many parts each process splits its share of a batch, to save memory.
        max_steps: optimizer steps of the run; null = as long as max_minutes lasts.
        max_minutes: minutes of the run, saving included; null = as long as max_steps last. With both, the first counts.
        optimizer: adamw, or muon for hidden matrices and convolutions with AdamW for the rest.
        learning_rate: AdamW's.
        muon_learning_rate: Muon's; unused with adamw.
        warmup_steps: over which the learning rate rises; at most a tenth of the run.
        schedule: constant, with a linear cool-down to 0 at the end, or cosine, which falls from the warm-up on.
        cooldown_fraction: last part of the run, over which a constant learning rate falls to 0.
        max_grad_norm: gradients longer than this are shortened to it.
        ema_decay: of the averaged weights, which are what is sampled and published.
        ema_snapshot_every: steps from one snapshot for scripts/ema.py to the next, and one at the end; null = none.
        checkpoint_every: steps from one checkpoint to the next.
        keep_checkpoints: how many are kept; null = all.
        resume: latest, the path of a checkpoint, or null for a fresh run.
        sample_every: steps from one sample grid to the next, and one at the end; null = none.
        sample_prompts: what the grids show; null = some of the data's own captions.
        validate_every: steps from one validation to the next, and one at the end; null = none. It looks at the pictures
            that data.validation_share holds out, or at some of those that are trained on if none are.
        trackers: where metrics go besides logs/metrics.jsonl, any that Accelerate knows: tensorboard, wandb, ...
        compile: let torch.compile make the networks faster, which takes a minute or more at the start.
        gradient_checkpointing: keep fewer activations and compute them twice, to save memory.
    """

    output_dir: str
    seed: int = 0
    batch_size: int = 64
    gradient_accumulation_steps: int = 1
    max_steps: int | None = None
    max_minutes: float | None = None
    optimizer: Literal["adamw", "muon"] = "muon"
    learning_rate: float = 1e-3
    muon_learning_rate: float = 0.01
    warmup_steps: int = 100
    schedule: Schedule = "constant"
    cooldown_fraction: float = 0.3
    max_grad_norm: float = 1.0
    ema_decay: float = 0.999
    ema_snapshot_every: int | None = None
    checkpoint_every: int = 500
    keep_checkpoints: int | None = 2
    resume: str | None = None
    sample_every: int | None = 500
    sample_prompts: tuple[str, ...] | None = ()
    validate_every: int | None = 500
    trackers: tuple[str, ...] = ("tensorboard",)
    compile: bool = False
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        if self.max_steps is None and self.max_minutes is None:
            raise ValueError("a run needs an end: set train.max_steps or train.max_minutes")
        for name in (
            "batch_size",
            "gradient_accumulation_steps",
            "max_steps",
            "max_minutes",
            "learning_rate",
            "muon_learning_rate",
            "max_grad_norm",
            "checkpoint_every",
            "ema_snapshot_every",
            "keep_checkpoints",
            "sample_every",
            "validate_every",
        ):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"train.{name} must be above 0 and finite, got {value}")
        for name in ("seed", "warmup_steps"):
            if not 0 <= getattr(self, name) < 2**63:
                raise ValueError(f"train.{name} must be at least 0 and below 2^63, got {getattr(self, name)}")
        if not 0 <= self.cooldown_fraction <= 1:
            raise ValueError(f"train.cooldown_fraction must be in [0, 1], got {self.cooldown_fraction}")
        if not 0 <= self.ema_decay < 1:
            raise ValueError(f"train.ema_decay must be at least 0 and below 1, got {self.ema_decay}")

    def check_prompts(self, *, has_text: bool) -> None:
        """Raise ValueError if prompts are to be drawn by a model without text."""
        if self.sample_prompts and not has_text:
            raise ValueError("train.sample_prompts need a text_encoder, and this model has none: set them to []")


def check_config_files(arguments: Sequence[str]) -> None:
    """Refuse a --config of this command line that is no configuration, by its name.

    Of a section that is a number, the command line's parser would keep the number, and lose what was there before.
    """
    given = [value for flag, value in pairwise(arguments) if flag == "--config"]
    given += [part.removeprefix("--config=") for part in arguments if part.startswith("--config=")]
    for path in filter(Path.is_file, map(Path, given)):
        read_config(path)


def check_unchanged(path: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise ValueError naming the first setting that is not what the checkpoint at `path` was saved with."""
    for key in sorted({*now, *saved} - PER_RELEASE):
        was, is_now = saved.get(key), now.get(key)
        if was != is_now:
            raise ValueError(f"checkpoint {path} was trained with {key} {was}, but it is {is_now} now")


def check_start(options: TrainOptions, *, num_processes: int) -> Path | None:
    """Refuse what can be refused before data is read; return the checkpoint to resume from, None for a fresh run.

    Raises ValueError if the batch does not split, the run folder holds another run, or there is nothing to resume.
    """
    micro_batch_size(options.batch_size, world_size=num_processes, accumulation=options.gradient_accumulation_steps)
    folder = Path(options.output_dir)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"train.output_dir {folder} is a file")
    for path in (folder, *folder.parents):
        if path.is_symlink() and not path.exists():
            raise ValueError(f"train.output_dir {folder} cannot be made: {path} is a link to nothing")
    _check_writable(folder)
    used = folder.is_dir() and any(folder.iterdir())
    if options.resume is not None:
        return _checkpoint_to_resume(folder, options.resume, used=used)
    if used:
        remedy = "continue the run there with --train.resume latest"
        if not numbered(folder / "checkpoints"):
            remedy = "no run there can be continued, so remove it if it is worth nothing"
        raise ValueError(
            f"train.output_dir {folder} already holds files: {remedy}, or choose another --train.output_dir"
        )
    return None


def fixed_settings(
    options: TrainOptions,
    unet: ConfigMixin,
    text_encoder: ConfigMixin | None,
    objective: Objective,
    *,
    validation_share: float,
    tuning: Mapping[str, Any],
) -> dict[str, Any]:
    """What must not change when a run is resumed, by config key: networks, objective and the stream of samples.

    tuning: the settings of a run that tunes another, empty for one that begins at random weights.
    """
    settings = {f"unet.{key}": value for key, value in unet.config.items()}
    settings["text_encoder"] = None if text_encoder is None else type(text_encoder).__name__
    if text_encoder is not None:
        settings |= {f"text_encoder.{key}": value for key, value in text_encoder.config.items()}
    settings["scheduler"] = type(objective.scheduler).__name__
    settings |= {f"scheduler.{key}": value for key, value in objective.scheduler.config.items()}
    settings |= {f"objective.{key}": getattr(objective, key) for key in OBJECTIVE_KEYS}
    settings |= {f"train.{key}": getattr(options, key) for key in ("batch_size", "optimizer", "schedule", "seed")}
    # another share would validate on what was trained on
    settings["data.validation_share"] = validation_share
    settings |= tuning
    if tuning:  # how far apart its points are follows the end: a later one would undo what was learned nearer by
        settings |= {f"train.{key}": getattr(options, key) for key in ("max_steps", "max_minutes")}
    # keys of diffusers itself begin with an underscore; through JSON tuples become lists, as a checkpoint has them
    return json.loads(json.dumps({key: value for key, value in settings.items() if "._" not in key}, default=str))


def _check_writable(folder: Path) -> None:
    """Raise ValueError if the folder cannot be made or written, without leaving anything behind."""
    above = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    try:
        # it has no name on Linux: another process that sees one would take the folder for one that holds a run
        with TemporaryFile(dir=above):
            pass
    except OSError as error:
        raise ValueError(f"train.output_dir {folder} cannot be written: {error.strerror}") from None


def _checkpoint_to_resume(folder: Path, resume: str, *, used: bool) -> Path:
    if resume == "latest" and not used:
        raise ValueError(f"there is no run to resume in {folder}: start it without --train.resume")
    checkpoints = folder / "checkpoints"
    chosen = find_checkpoint(checkpoints, resume)
    if chosen.resolve().parent != checkpoints.resolve():
        if used:
            raise ValueError(f"{folder} holds another run than {chosen}: choose another --train.output_dir")
        return chosen
    later = [path for path in numbered(checkpoints) if step_of(path) > step_of(chosen) and fault(path) is None]
    if later:
        # going on from here would leave two histories in one folder, of which `latest` would take the wrong one
        raise ValueError(f"{later[-1]} is later than {chosen}: resume that one, or choose another --train.output_dir")
    return chosen

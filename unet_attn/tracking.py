"""What a run tells while it goes, and what it hears: metrics, progress and an early estimate; signals to stop."""

import json
import math
import re
import resource
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from time import monotonic
from types import FrameType, TracebackType
from typing import Any

import torch
import yaml
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from tqdm import tqdm

from unet_attn.checkpoint import write_whole
from unet_attn.data import CaptionedImages, StreamedImages
from unet_attn.run_record import CONFIG, DATA_SUMMARY, METRICS, SKIPPED

# the first steps are slow (caches, thread pools), so the estimate looks at those from FIRST_TIMED to ESTIMATE_AFTER
FIRST_TIMED, ESTIMATE_AFTER = 3, 20
_YEARS = 100 * 366 * 24 * 3600.0  # seconds
_UNTIL = re.compile(r"config-until-step-(\d+)\.yaml")


class RunLog:
    """Writes a line of metrics per optimizer step and keeps the progress bar; does nothing but on the main process.

    folder: `logs` of the run, whose name the trackers show. step: the last finished step, above 0 when the run is
    resumed: lines of later steps, from beyond the checkpoint, are dropped. progress: the part of the run that is done,
    in [0, 1]. config: what the trackers show of the run's settings.
    """

    def __init__(
        self,
        folder: Path,
        accelerator: Accelerator,
        *,
        step: int,
        progress: float,
        batch_size: int,
        config: Mapping[str, Any],
    ) -> None:
        self.active = accelerator.is_main_process
        self.accelerator = accelerator
        self.batch_size = batch_size
        self.first_step = step
        self.first_progress = progress
        self.shown_speed = 0.0
        self.timed_from: float | None = None
        if not self.active:
            return
        folder.mkdir(parents=True, exist_ok=True)
        drop_later_lines(folder / METRICS, last_step=step)
        self.file = (folder / METRICS).open("a", encoding="utf-8")
        plain = {name: value if isinstance(value, (int, float)) else str(value) for name, value in config.items()}
        accelerator.init_trackers(folder.resolve().parent.name, config=plain)
        self.bar = tqdm(
            total=1.0,
            initial=progress,
            bar_format="{percentage:3.0f}% |{bar:24}| {desc} [{elapsed}, {remaining} left]",
            # off where nobody looks, unlike the lines
            disable=None,
        )

    def step(self, values: dict[str, float | list[float]], *, step: int, progress: float) -> None:
        """Record one optimizer step. values: by name; what is not finite is written as null."""
        if not self.active:
            return
        finite = {name: _finite(value) for name, value in values.items()}
        self.file.write(json.dumps({"step": step, **finite}) + "\n")
        self.file.flush()
        self.track(finite, step=step)

        speed = values["pictures_per_second"]
        self.shown_speed = speed if not self.shown_speed else 0.9 * self.shown_speed + 0.1 * speed
        self.bar.set_description_str(
            f"step {step}  loss {values['loss']:.4f}  {self.shown_speed:.0f} pictures/s", refresh=False
        )
        self.bar.update(progress - self.bar.n)
        self._estimate(step, progress)

    def track(self, values: Mapping[str, float | list[float | None] | None], *, step: int) -> None:
        """Give values to the trackers alone; those of a list are named by their place, None is left out."""
        if not self.active:
            return
        flat = {name: value for name, value in values.items() if not isinstance(value, list)}
        lists = {name: value for name, value in values.items() if isinstance(value, list)}
        flat |= {f"{name}/{place}": value for name, each in lists.items() for place, value in enumerate(each)}
        self.accelerator.log({name: value for name, value in flat.items() if value is not None}, step=step)

    def say(self, text: str) -> None:
        """Print a line without breaking the progress bar."""
        if self.active:
            self.bar.write(text)

    def close(self) -> None:
        """Flush and close files and trackers."""
        if self.active:
            self.bar.close()
            self.file.close()
            for tracker in self.accelerator.trackers:
                tracker.finish()

    def _estimate(self, step: int, progress: float) -> None:
        """After some steps, say once when the run will end and how many pictures it will have seen."""
        since = step - self.first_step
        if since == FIRST_TIMED:
            self.timed_from, self.timed_progress = monotonic(), progress
        if since != ESTIMATE_AFTER or self.timed_from is None or progress <= self.timed_progress:
            return
        seconds = monotonic() - self.timed_from
        rate = (ESTIMATE_AFTER - FIRST_TIMED) / seconds
        left = seconds * (1 - progress) / (progress - self.timed_progress)
        steps = step + round(rate * left)
        if left > _YEARS:  # no calendar has that day
            self.say(f"after {since} steps: {rate:.2f} steps/s; {steps} steps take more than a lifetime: give fewer")
            return
        end = datetime.now() + timedelta(seconds=left)
        self.say(
            f"after {since} steps: {rate:.2f} steps/s, {rate * self.batch_size:.0f} pictures/s; expected to end at "
            f"{end:%H:%M:%S} (in {timedelta(seconds=round(left))}) after about {steps} steps "
            f"and {steps * self.batch_size:,} pictures"
        )


def warn(text: str) -> None:
    """Print a warning without breaking the progress bar, from whichever process has one."""
    tqdm.write(f"warning: {text}", file=sys.stderr)


def drop_later_lines(path: Path, *, last_step: int) -> None:
    """Take from a file of JSON lines those beyond `last_step` and one that was left unfinished, if there are any."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if _step_of(line) is not None and _step_of(line) <= last_step]
    if kept != lines:
        write_whole(path, "".join(kept))


def open_folder(folder: Path, config: str, data: CaptionedImages | StreamedImages, *, step: int) -> list[str]:
    """Make the run's folder, or take that of a run which goes on after `step`, and write what the session begins with.

    Returns what its earlier config.yaml said otherwise, as `keep_config` does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DATA_SUMMARY).write_text(data.summary() + "\n", encoding="utf-8")
    (folder / SKIPPED).unlink(missing_ok=True)  # an earlier session may have read other pictures
    if data.faults:
        data.write_faults(folder / SKIPPED)
    return keep_config(folder, config, step=step)


def keep_config(folder: Path, text: str, *, step: int) -> list[str]:
    """Write config.yaml; that of the steps up to `step`, if it said something else, stays beside it.

    Returns what it said otherwise, as lines of key, old and new value.
    """
    path = folder / CONFIG
    # Sessions that went on from here or from later trained nothing that is left. What the steps up to here had is what
    # the first of those put aside.
    numbers = {each: int(found[1]) for each in folder.iterdir() if (found := _UNTIL.fullmatch(each.name))}
    aside = sorted((each for each, number in numbers.items() if number >= step), key=numbers.get)
    earlier = next((each for each in (*aside, path) if each.exists()), None)
    before, now = (_flat(yaml.safe_load(each)) for each in (earlier.read_text("utf-8") if earlier else text, text))
    keys = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key) and key != "train.resume"]
    kept = earlier.replace(folder / f"config-until-step-{step:06d}.yaml") if keys else None
    for each in aside:
        if each != kept:
            each.unlink(missing_ok=True)
    write_whole(path, text)
    return [f"{key} {before.get(key)} -> {now.get(key)}" for key in keys]


def _flat(section: Any, prefix: str = "") -> dict[str, Any]:
    """A nested configuration by dotted keys."""
    if not isinstance(section, dict) or not section:
        return {prefix: section}
    names = {key: f"{prefix}.{key}" if prefix else str(key) for key in section}
    return {name: value for key in section for name, value in _flat(section[key], names[key]).items()}


def peak_memory(device: torch.device) -> float:
    """The most memory that this process has held, in GiB: of the GPU if it trains on one, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)  # macOS counts bytes, Linux KiB


def check_trackers(names: Sequence[str]) -> None:
    """Raise ValueError for a tracker that Accelerate does not know, or whose package is missing: it would be silent."""
    known = {str(name) for name in LOGGER_TYPE_TO_CLASS}
    for name in names:
        if name not in known:
            raise ValueError(f"train.trackers must be among {', '.join(sorted(known))}, got {name!r}")
        if name not in {str(found) for found in get_available_trackers()}:
            raise ValueError(f"train.trackers has {name!r}, which is not installed: pip install {name}")


def _finite(value: float | list[float]) -> float | list[float | None] | None:
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return value if math.isfinite(value) else None


def _step_of(line: str) -> int | None:
    """The step of a whole line; None for one that is torn or says none."""
    try:
        return json.loads(line)["step"] if line.endswith("\n") else None
    except (ValueError, KeyError, TypeError):
        return None


class StopRequest:
    """A context in which SIGTERM and SIGINT ask for an orderly end, seen in `made`; a second one ends as usual."""

    def __init__(self) -> None:
        self.made = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # Python lets no other thread handle signals
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._restore()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.made = True
        self._restore()

    def _restore(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

"""How long training waits for its pictures, and how fast they are checked before it starts.

The waits are those of scripts/train.py's own trainer for `next(batches)`, as shares of its steps; what is checked goes
through the data set's own constructor.
"""

import argparse
import io
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from _measure import describe_machine
from PIL import Image

import unet_attn.data
from unet_attn.data import CaptionedImages, DataOptions, load_image, resize_and_crop

if TYPE_CHECKING:  # brings diffusers, which takes seconds
    from unet_attn.training import Trainer

WARM_UP_STEPS = 8  # workers read ahead while the first steps are slow: after these the buffers are as they stay
IN_MEMORY_SIDE, FROM_FILES_SIDE, CHECKED_SIDE = 32, 128, 64  # pixels
WORKERS = 2
TIMED_ALONE = 500  # pictures whose parts of the check are timed one by one

TrainerFor = Callable[[list[str]], "Trainer"]
ArgumentsFor = Callable[..., list[str]]


class Waits(NamedTuple):
    """What one training waited for, in seconds a step, and how long its steps were."""

    waiting: list[float]
    steps: list[float]

    @property
    def share(self) -> float:
        return sum(self.waiting) / sum(self.steps)


class TimedBatches:
    """The same batches, noting how long each was waited for."""

    def __init__(self, batches: Iterator[dict[str, Any]]) -> None:
        self.batches = batches
        self.seconds: list[float] = []

    def __iter__(self) -> "TimedBatches":
        return self

    def __next__(self) -> dict[str, Any]:
        start = time.perf_counter()
        batch = next(self.batches)
        self.seconds.append(time.perf_counter() - start)
        return batch


def add_arguments(parser: argparse.ArgumentParser, *, config: Path) -> None:
    parser.add_argument("--config", type=Path, default=config)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=40, help=f"timed steps, after {WARM_UP_STEPS} of warm-up (40)")
    parser.add_argument("--checked", type=int, default=10_000, help="pictures to check (10000)")


def benchmark_data(options: argparse.Namespace, trainer_for: TrainerFor, arguments_for: ArgumentsFor) -> None:
    """Print the three measurements. The functions are benchmark.py's: a configuration's trainer on other pictures."""
    for name in ("batch_size", "steps", "checked"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(options, name)}")
    with TemporaryDirectory() as name, cache_folder(Path(name) / "cache"):
        folder = Path(name)
        print(describe_machine())
        print(f"{options.config.name}, batch {options.batch_size}, {options.steps} steps")

        def waits(name: str, side: int, *more: str) -> Waits:
            data = png_files(folder / name, max(256, options.batch_size), side)
            arguments = training_arguments(options, arguments_for, data, folder / f"{name}-run")
            return measured_waits(trainer_for([*arguments, "--data.resolution", str(side), *more]))

        print_waits(f"{IN_MEMORY_SIDE} px held in memory", waits("held", IN_MEMORY_SIDE))
        from_files = ["--data.num_workers", str(WORKERS), "--unet.patch_size", "4", "--unet.in_channels", "3"]
        with nothing_held():
            read = waits("read", FROM_FILES_SIDE, *from_files)
        print_waits(f"{FROM_FILES_SIDE} px from PNG files, {WORKERS} workers", read)
        check_rate(png_files(folder / "checked", options.checked, CHECKED_SIDE))


def training_arguments(options: argparse.Namespace, arguments_for: ArgumentsFor, data: Path, run: Path) -> list[str]:
    return arguments_for(
        options.config,
        data,
        run,
        batch_size=options.batch_size,
        max_steps=WARM_UP_STEPS + options.steps,
        gradient_accumulation_steps=1,
        max_minutes="null",
        sample_every="null",
        resume="null",
    )


def measured_waits(trainer: "Trainer") -> Waits:
    """Run a trainer to its end, and tell its steps after the warm-up. Raises ValueError if a signal ended it early."""
    batches = TimedBatches(trainer._batches())
    trainer._batches = lambda: batches
    if not trainer.run():
        raise ValueError("a signal ended the training that was measured")
    lines = Path(trainer.options.output_dir, "logs", "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [trainer.options.batch_size / json.loads(line)["pictures_per_second"] for line in lines]
    return Waits(batches.seconds[WARM_UP_STEPS:], steps[WARM_UP_STEPS:])


def print_waits(what: str, waits: Waits) -> None:
    wait, step = (1000 * sum(seconds) / len(seconds) for seconds in waits)
    print(f"  {what}: {100 * waits.share:.1f} % of a step is waiting for data ({wait:.1f} of {step:.0f} ms)")


def check_rate(folder: Path) -> None:
    """Check a folder for the first time and once more, and time the parts of the check on one thread."""
    options = DataOptions(path=str(folder), resolution=32)
    wall, cpu, count = timed(lambda: CaptionedImages(options))
    again = timed(lambda: CaptionedImages(options))[0]
    rates = f"{count / wall:.0f} pictures/s, {count / cpu:.0f} per core"
    print(f"  checking {count} PNG files of {CHECKED_SIDE} px: {rates}")
    parts = {name: 1e6 * seconds for name, seconds in seconds_of_parts(folder).items()}
    parts["the rest"] = 1e6 * cpu / count - sum(parts.values())
    listed = ", ".join(f"{name} {microseconds:.0f}" for name, microseconds in parts.items())
    print(f"  microseconds a picture: {listed}; the second start takes {again:.2f} s")


def timed(make: Callable[[], CaptionedImages]) -> tuple[float, float, int]:
    """Seconds on the clock, seconds of all cores together, and the number of pictures."""
    clock, cores = time.perf_counter(), time.process_time()
    images = make()
    return time.perf_counter() - clock, time.process_time() - cores, len(images)


def seconds_of_parts(folder: Path) -> dict[str, float]:
    """Seconds of a core for reading, decoding and scaling a picture, each alone and warm."""
    paths = sorted(folder.glob("*.png"))[:TIMED_ALONE]
    seconds = dict.fromkeys(("reading", "decoding", "scaling"), 0.0)
    for path in paths:
        marks = [time.process_time()]
        data = path.read_bytes()
        marks.append(time.process_time())
        image = load_image(io.BytesIO(data))
        marks.append(time.process_time())
        resize_and_crop(image, 32)
        marks.append(time.process_time())
        for name, (start, end) in zip(seconds, pairwise(marks), strict=True):
            seconds[name] += (end - start) / len(paths)
    return seconds


# ---------------------------------------------------------------------------------------------------- what is measured


def png_files(folder: Path, count: int, side: int) -> Path:
    """Soft shapes with some grain, as photographs are, with captions: noise alone would decode otherwise."""
    folder.mkdir()
    random = np.random.default_rng(0)
    rows = []
    for number in range(count):
        shapes = Image.fromarray(random.integers(0, 256, (5, 5, 3), dtype=np.uint8)).resize((side, side))
        grain = random.integers(-8, 9, (side, side, 3))
        Image.fromarray(np.clip(np.asarray(shapes) + grain, 0, 255).astype(np.uint8)).save(folder / f"{number}.png")
        rows.append(json.dumps({"file_name": f"{number}.png", "text": f"thing {number % 97}"}))
    (folder / "metadata.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return folder


@contextmanager
def nothing_held() -> Iterator[None]:
    """As with pictures that do not fit into memory, without writing a gigabyte of them."""
    limit = unet_attn.data.MEMORY_LIMIT
    unet_attn.data.MEMORY_LIMIT = 0
    try:
        yield
    finally:
        unet_attn.data.MEMORY_LIMIT = limit


@contextmanager
def cache_folder(folder: Path) -> Iterator[None]:
    """Keep what a check leaves behind out of the user's cache."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["XDG_CACHE_HOME"]
        else:
            os.environ["XDG_CACHE_HOME"] = before

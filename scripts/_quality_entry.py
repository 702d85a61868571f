"""One entry of `benchmark.py quality` in a process of its own: train by the clock, and draw at chosen moments.

    python scripts/_quality_entry.py FOLDER        where FOLDER/task.json says what to do

What is drawn goes to FOLDER as uint8 arrays, with FOLDER/record.json beside it; judging it is the other process' work,
so that memory and time here are those of training and sampling alone.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch
from _measure import describe_machine, resident_mib
from _peer import Asked, Classes, Sampler, choose_layout
from _peers import make_peer
from torch import Tensor
from train import build, make_accelerator, make_parser

from unet_attn.checkpoint import write_whole
from unet_attn.clock import RunClock
from unet_attn.data import CaptionedImages, DataOptions
from unet_attn.extractors import to_bytes
from unet_attn.options import TrainOptions
from unet_attn.training import Trainer

# the channels of the larger and the smaller one; the first is the configuration's own
OUR_SIZES: dict[str, list[int] | None] = {"ours": None, "ours-l": [48, 96, 160], "ours-s": [24, 48, 96]}
OUR_SAMPLERS = {
    "main": Sampler("the run's own", 25, 3.0),
    "fast": Sampler("the run's own", 10, 3.0),
    "unguided": Sampler("the run's own", 25, 1.0),
}
SAMPLING_BATCH = 64
NEVER = 10**9  # steps
IMPORTS_MIB = resident_mib("VmRSS")  # what the libraries take before anything is built

Draw = Callable[[Asked, Sampler, int], Tensor]  # what is asked for, how, and the first seed -> (N, C, H, W)


@dataclass(frozen=True)
class Task:
    """What to train, and when to draw what.

    moments: parts of `minutes` after which pictures are drawn, rising to 1; chosen: the pictures of the data set whose
    captions are asked for, of which all at the end and `num_between` before; threads: None = torch's own choice.
    """

    name: str
    config: str
    data: str
    minutes: float
    moments: list[float]
    chosen: list[int]
    num_between: int
    seed: int
    threads: int | None


def data_of(config: str, data: str, *, seed: int) -> CaptionedImages:
    """The pictures as a run by this configuration would read them."""
    parsed = make_parser().parse_args(["--config", config, "--data.path", data, "--train.output_dir", "unused"])
    if parsed.text_encoder is None:
        raise ValueError(f"{config} has no text_encoder: captions are what the entries are compared by")
    if parsed.consistency is not None and parsed.consistency.start is not None:
        raise ValueError(f"{config} tunes another run, whose minutes would not count: give another --config")
    return CaptionedImages(DataOptions(**parsed.data.as_dict()), channels=parsed.unet.in_channels, seed=seed)


class Takes:
    """Draws pictures when a moment has come, with the clock stopped, and remembers what was drawn how fast."""

    def __init__(self, task: Task, folder: Path, asked: Asked, samplers: dict[str, Sampler]) -> None:
        self.task, self.folder, self.asked, self.samplers = task, folder, asked, samplers
        self.moments = list(task.moments)
        self.taken: list[dict[str, Any]] = []
        self.training_mib = 0.0

    def look(self, clock: RunClock, step: int, draw: Draw) -> None:
        """After a step: draw by the main sampler if a moment before the end has come."""
        if len(self.moments) > 1 and clock.seconds() >= 60 * self.task.minutes * self.moments[0]:
            asked = self.asked.part(0, self.task.num_between)
            with paused(clock) as minutes:
                self._take(self.moments.pop(0), minutes, step, "main", asked, draw)

    def last(self, clock: RunClock, step: int, draw: Draw) -> None:
        """At the end: draw by every sampler."""
        with paused(clock) as minutes:
            for sampler in self.samplers:
                self._take(self.moments[-1], minutes, step, sampler, self.asked, draw)

    def _take(self, moment: float, minutes: float, step: int, name: str, asked: Asked, draw: Draw) -> None:
        # whatever is drawn later, this is the peak of training
        self.training_mib = self.training_mib or resident_mib("VmHWM")
        sampler, count = self.samplers[name], len(asked.captions)
        began = monotonic()
        seeds = range(self.task.seed, self.task.seed + count, SAMPLING_BATCH)
        parts = [draw(asked.part(seed - self.task.seed, SAMPLING_BATCH), sampler, seed) for seed in seeds]
        speed = count / (monotonic() - began)
        file = f"{len(self.taken)}-{name}.npy"
        np.save(self.folder / file, to_bytes(torch.cat(parts)).numpy())
        self.taken.append(
            {
                "moment": moment,
                "minutes": minutes,
                "step": step,
                "sampler": name,
                **sampler._asdict(),
                "pictures": count,
                "pictures_per_second": speed,
                "file": file,
            }
        )


@contextmanager
def paused(clock: RunClock) -> Iterator[float]:
    """The clock stands still meanwhile; gives the minutes that it shows."""
    began = monotonic()
    yield clock.seconds() / 60
    clock.started += monotonic() - began


# ---------------------------------------------------------------------------------------------------------------- ours


class WatchedTrainer(Trainer):
    """scripts/train.py's own trainer, which draws at the moments."""

    takes: Takes

    def _save_and_look(self) -> None:
        super()._save_and_look()
        self.takes.look(self.clock, self.step, self.draw)

    def draw(self, asked: Asked, sampler: Sampler, seed: int) -> Tensor:
        from unet_attn.evaluation import sample_pictures  # whose metrics would count as memory of training

        with self.watcher._pipeline() as pipeline:
            pipeline.set_progress_bar_config(disable=True)
            pictures = sample_pictures(
                pipeline,
                asked.captions,
                seed=seed,
                num_inference_steps=sampler.steps,
                guidance_scale=sampler.guidance,
                batch_size=SAMPLING_BATCH,
            )
            return torch.stack(list(pictures))


def train_ours(task: Task, folder: Path) -> dict[str, Any]:
    """The configuration by its own trainer; what a run saves at its end counts as training, as in any run."""
    keys = {
        "data.path": task.data,
        "train.output_dir": folder / "run",
        "train.seed": task.seed,
        "train.max_minutes": task.minutes,
        "train.max_steps": "null",
        "train.resume": "null",
        "train.sample_every": "null",
        "train.validate_every": "null",
        "train.checkpoint_every": NEVER,
        "train.trackers": "[]",
    }
    if OUR_SIZES[task.name] is not None:
        keys["unet.block_channels"] = OUR_SIZES[task.name]
    arguments = [part for key, value in keys.items() for part in (f"--{key}", str(value))]
    config = make_parser().parse_args(["--config", task.config, *arguments])
    options = TrainOptions(**config.train.as_dict())
    built = build(config, options, None)
    accelerator = make_accelerator(options.output_dir)
    parts = (built.model, built.objective, built.data)
    trainer = WatchedTrainer(*parts, options, accelerator, config="", tuning=built.tuning)
    takes = Takes(task, folder, asked_of(task, built.data, Classes(built.data)), OUR_SAMPLERS)
    trainer.takes = takes
    if not trainer.run():
        raise ValueError("a signal ended the training")
    seconds = trainer.clock.seconds()
    takes.last(trainer.clock, trainer.step, trainer.draw)
    unet = built.model.unet.config
    sizes = f"block_channels {list(unet.block_channels)}, patch_size {unet.patch_size}"
    recipe = {"batch_size": options.batch_size, "optimizer": options.optimizer, "configuration": sizes}
    recipe["samplers"] = {name: sampler._asdict() for name, sampler in OUR_SAMPLERS.items()}
    return record(task, takes, recipe, trainer.parameters.values(), trainer.step, options.batch_size, seconds)


# --------------------------------------------------------------------------------------------------------------- a peer


def train_peer(task: Task, folder: Path) -> dict[str, Any]:
    """The same pictures, by the peer's own recipe, in the layout that is faster for it."""
    data = data_of(task.config, task.data, seed=task.seed)
    torch.manual_seed(task.seed)
    peer = make_peer(task.name, data)
    batch_size = peer.recipe.batch_size
    data.check_batch_size(batch_size)
    batches = data.batches(batch_size)
    layouts = choose_layout(peer, next(batches))
    torch.manual_seed(task.seed + 1)
    peer.start()
    takes = Takes(task, folder, asked_of(task, data, peer.classes), peer.recipe.samplers)

    def draw(asked: Asked, sampler: Sampler, seed: int) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return peer.sample(asked, sampler).clamp(-1, 1)

    clock = RunClock(max_steps=None, max_minutes=task.minutes)
    clock.start()
    while (progress := clock.progress(peer.steps, seconds_at_end=0.0)) < 1:
        with clock.timed("step"):
            peer.step(next(batches), progress)
        takes.look(clock, peer.steps, draw)
    seconds = clock.seconds()
    takes.last(clock, peer.steps, draw)
    recipe = peer.recipe.told() | {"layout": peer.layout, "layout_ms": layouts}
    return record(task, takes, recipe, peer.parameters, peer.steps, batch_size, seconds)


# ------------------------------------------------------------------------------------------------------------- for both


def asked_of(task: Task, data: CaptionedImages, classes: Classes) -> Asked:
    """The first caption of each chosen picture, and its class."""
    captions = [next(iter(data.captions[index]), "") for index in task.chosen]
    return Asked(captions, classes.of[torch.tensor(task.chosen)])


def record(
    task: Task, takes: Takes, recipe: dict[str, Any], parameters: Any, steps: int, batch_size: int, seconds: float
) -> dict[str, Any]:
    """What the entry was and did; the scores are not known here."""
    return {
        "entry": task.name,
        "machine": describe_machine(),
        "recipe": recipe,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "steps": steps,
        "pictures_seen": steps * batch_size,
        "training_seconds": seconds,
        "pictures_per_second": steps * batch_size / seconds,
        "mib": {"imports": IMPORTS_MIB, "training": takes.training_mib, "with_sampling": resident_mib("VmHWM")},
        "takes": takes.taken,
    }


def run(folder: Path) -> None:
    """Do what FOLDER/task.json says; FOLDER/record.json is there only when all is done."""
    task = Task(**json.loads((folder / "task.json").read_text(encoding="utf-8")))
    if task.threads is not None:
        torch.set_num_threads(task.threads)
    result = train_ours(task, folder) if task.name in OUR_SIZES else train_peer(task, folder)
    write_whole(folder / "record.json", json.dumps(result | {"task": asdict(task)}, indent=2) + "\n")


def main() -> int:
    try:
        run(Path(sys.argv[1]))
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

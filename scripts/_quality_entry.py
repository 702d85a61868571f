"""One entry of `benchmark.py quality` in a process of its own: train by the clock, keep weights, draw from them.

    python scripts/_quality_entry.py FOLDER        where FOLDER/task.json says what to do

The weights of chosen moments and FOLDER/training.json stay, so that what is drawn can be drawn again, by other samplers
too, without hours of training. Pictures go to FOLDER as uint8 arrays, with FOLDER/record.json beside them; judging them
is the other process' work, so that memory and time here are those of training and sampling alone.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

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
from unet_attn.pipelines.text_to_image import TextToImagePipeline
from unet_attn.training import MEMORY_FORMAT, Trainer

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


class Drawing(NamedTuple):
    """How an entry draws: by which samplers, what, and what loads kept weights to draw with."""

    samplers: dict[str, Sampler]
    asked: Asked
    load: Callable[[Path], Draw]


@dataclass(frozen=True)
class Task:
    """What to train, and what to draw from the weights of which moments.

    moments: parts of `minutes` after which weights are kept, rising to 1; chosen: the pictures of the data set whose
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


class Kept:
    """Keeps an entry's weights when a moment has come, with the clock stopped, to draw from them afterwards.

    save: writes them to a path; places: {"moment", "minutes", "step", "weights"} of each.
    """

    def __init__(self, task: Task, folder: Path, save: Callable[[Path], None]) -> None:
        self.task, self.folder, self.save = task, folder, save
        self.moments = list(task.moments)
        self.places: list[dict[str, Any]] = []
        self.training_mib = 0.0

    def look(self, clock: RunClock, step: int) -> None:
        """After a step: keep the weights if a moment before the end has come."""
        if len(self.moments) > 1 and clock.seconds() >= 60 * self.task.minutes * self.moments[0]:
            self.keep(clock, step)

    def last(self, clock: RunClock, step: int) -> None:
        """At the end, whatever moments a run of few steps has passed over."""
        del self.moments[:-1]
        self.keep(clock, step)

    def keep(self, clock: RunClock, step: int) -> None:
        # whatever is kept and drawn later, this is the peak of training
        self.training_mib = self.training_mib or resident_mib("VmHWM")
        moment = self.moments.pop(0)
        weights = f"weights-{moment:g}"
        with paused(clock) as minutes:
            self.save(self.folder / weights)
        self.places.append({"moment": moment, "minutes": minutes, "step": step, "weights": weights})


@contextmanager
def paused(clock: RunClock) -> Iterator[float]:
    """The clock stands still meanwhile; gives the minutes that it shows."""
    began = monotonic()
    yield clock.seconds() / 60
    clock.started += monotonic() - began


# ---------------------------------------------------------------------------------------------------------------- ours


class WatchedTrainer(Trainer):
    """scripts/train.py's own trainer, which keeps its pipeline at the moments."""

    kept: Kept

    def _save_and_look(self) -> None:
        super()._save_and_look()
        self.kept.look(self.clock, self.step)

    def keep_pipeline(self, path: Path) -> None:
        with self.watcher._pipeline() as pipeline:
            pipeline.save_pretrained(path)


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
    trainer.kept = Kept(task, folder, trainer.keep_pipeline)
    if not trainer.run():
        raise ValueError("a signal ended the training")
    seconds = trainer.clock.seconds()
    trainer.kept.last(trainer.clock, trainer.step)
    unet = built.model.unet.config
    sizes = f"block_channels {list(unet.block_channels)}, patch_size {unet.patch_size}"
    recipe = {"batch_size": options.batch_size, "optimizer": options.optimizer, "configuration": sizes}
    return told(task, trainer.kept, recipe, trainer.parameters.values(), trainer.step, options.batch_size, seconds)


def our_drawing(task: Task) -> Drawing:
    from unet_attn.evaluation import sample_pictures  # whose metrics would count as memory of training

    def load(weights: Path) -> Draw:
        pipeline = TextToImagePipeline.from_pretrained(weights)
        pipeline.unet.to(memory_format=MEMORY_FORMAT)
        pipeline.set_progress_bar_config(disable=True)

        def draw(asked: Asked, sampler: Sampler, seed: int) -> Tensor:
            pictures = sample_pictures(
                pipeline,
                asked.captions,
                seed=seed,
                num_inference_steps=sampler.steps,
                guidance_scale=sampler.guidance,
                batch_size=SAMPLING_BATCH,
            )
            return torch.stack(list(pictures))

        return draw

    data = data_of(task.config, task.data, seed=task.seed)
    return Drawing(OUR_SAMPLERS, asked_of(task, data, Classes(data)), load)


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
    kept = Kept(task, folder, peer.save)

    clock = RunClock(max_steps=None, max_minutes=task.minutes)
    clock.start()
    while (progress := clock.progress(peer.steps, seconds_at_end=0.0)) < 1:
        with clock.timed("step"):
            peer.step(next(batches), progress)
        kept.look(clock, peer.steps)
    seconds = clock.seconds()
    kept.last(clock, peer.steps)
    recipe = peer.recipe.told() | {"layout": peer.layout, "layout_ms": layouts}
    return told(task, kept, recipe, peer.parameters, peer.steps, batch_size, seconds)


def peer_drawing(task: Task) -> Drawing:
    data = data_of(task.config, task.data, seed=task.seed)
    peer = make_peer(task.name, data)
    peer.start_average()

    def load(weights: Path) -> Draw:
        peer.load(weights)

        def draw(asked: Asked, sampler: Sampler, seed: int) -> Tensor:
            torch.manual_seed(seed)
            return peer.sample(asked, sampler).clamp(-1, 1)

        return draw

    return Drawing(peer.recipe.samplers, asked_of(task, data, peer.classes), load)


# ------------------------------------------------------------------------------------------------------------- for both


def asked_of(task: Task, data: CaptionedImages, classes: Classes) -> Asked:
    """The first caption of each chosen picture, and its class."""
    captions = [next(iter(data.captions[index]), "") for index in task.chosen]
    return Asked(captions, classes.of[torch.tensor(task.chosen)])


def told(
    task: Task, kept: Kept, recipe: dict[str, Any], parameters: Any, steps: int, batch_size: int, seconds: float
) -> dict[str, Any]:
    """What the entry was and did in training."""
    return {
        "entry": task.name,
        "machine": describe_machine(),
        "recipe": recipe,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "steps": steps,
        "pictures_seen": steps * batch_size,
        "training_seconds": seconds,
        "pictures_per_second": steps * batch_size / seconds,
        "mib": {"imports": IMPORTS_MIB, "training": kept.training_mib},
        "kept": kept.places,
    }


def drawn(task: Task, folder: Path, places: list[dict[str, Any]], drawing: Drawing) -> list[dict[str, Any]]:
    """Draw from all that was kept: before the end by the main sampler, at the end by every one."""
    takes: list[dict[str, Any]] = []
    for place in places:
        at_end = place["moment"] == 1
        asked = drawing.asked if at_end else drawing.asked.part(0, task.num_between)
        draw = drawing.load(folder / place["weights"])
        for name in drawing.samplers if at_end else ("main",):
            sampler, count = drawing.samplers[name], len(asked.captions)
            began = monotonic()
            seeds = range(task.seed, task.seed + count, SAMPLING_BATCH)
            parts = [draw(asked.part(seed - task.seed, SAMPLING_BATCH), sampler, seed) for seed in seeds]
            speed = count / (monotonic() - began)
            file = f"{len(takes)}-{name}.npy"
            np.save(folder / file, to_bytes(torch.cat(parts)).numpy())
            about = {key: place[key] for key in ("moment", "minutes", "step")} | {"sampler": name, **sampler._asdict()}
            takes.append(about | {"pictures": count, "pictures_per_second": speed, "file": file})
    return takes


def run(folder: Path) -> None:
    """Do what FOLDER/task.json says: train, unless FOLDER/training.json is there, and draw."""
    task = Task(**json.loads((folder / "task.json").read_text(encoding="utf-8")))
    if task.threads is not None:
        torch.set_num_threads(task.threads)
    ours, training = task.name in OUR_SIZES, folder / "training.json"
    if not training.exists():
        result = (train_ours if ours else train_peer)(task, folder)
        write_whole(training, json.dumps(result, indent=2) + "\n")
    result = json.loads(training.read_text(encoding="utf-8"))
    drawing = (our_drawing if ours else peer_drawing)(task)
    takes = drawn(task, folder, result.pop("kept"), drawing)
    samplers = {name: sampler._asdict() for name, sampler in drawing.samplers.items()}
    result["recipe"] |= {"samplers": samplers}
    result["mib"]["with_sampling"] = max(result["mib"]["training"], resident_mib("VmHWM"))
    write_whole(folder / "record.json", json.dumps(result | {"takes": takes, "task": asdict(task)}, indent=2) + "\n")


def main() -> int:
    try:
        run(Path(sys.argv[1]))
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What a training step is made of, and what two processes make of it: parts of `benchmark.py train`."""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _children import last_words, run_alone

if TYPE_CHECKING:
    from unet_attn.training import Trainer

TRAIN = Path(__file__).resolve().parent / "train.py"
WARM_UP_STEPS = 3


class CoreTimer:
    """Adds up what forward, backward, clipping and optimizer of a trainer take; the rest of a step is overhead."""

    def __init__(self, trainer: "Trainer") -> None:
        self.seconds = 0.0
        trainer.wrapped = self._timed(trainer.wrapped)
        accelerator, optimizer = trainer.accelerator, trainer.optimizer
        accelerator.backward = self._timed(accelerator.backward)
        accelerator.clip_grad_norm_ = self._timed(accelerator.clip_grad_norm_)
        optimizer.step = self._timed(optimizer.step)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = call(*arguments)
            self.seconds += time.perf_counter() - began
            return result

        return timed


def overhead(trainer: "Trainer") -> tuple[float, float]:
    """Train to the end. Returns what share of the steps is overhead, logging included, and a checkpoint's seconds."""
    step, begins, core = trainer._train_step, [], []
    timer = CoreTimer(trainer)

    def watched() -> None:
        begins.append(time.perf_counter())
        core.append(timer.seconds)
        step()

    trainer._train_step = watched
    trainer.run()
    whole = begins[-1] - begins[WARM_UP_STEPS]
    share = 1 - (core[-1] - core[WARM_UP_STEPS]) / whole
    began = time.perf_counter()
    trainer._save()
    return share, time.perf_counter() - began


def pictures_per_second(run: Path) -> float:
    """The median over a run's steps, without the first."""
    lines = (run / "logs" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return statistics.median(json.loads(line)["pictures_per_second"] for line in lines[WARM_UP_STEPS:])


def two_against_one(arguments: Callable[[Path], list[str]], folder: Path, *, rounds: int) -> tuple[float, float]:
    """Pictures/s of two processes with a thread each, and of one with two, launched in turns.

    arguments: train.py's, given the run's folder. Raises ValueError if one fails.
    """
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    kinds = {"two": (1, ["--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]),
             "one": (2, ["--num_processes", "1"])}  # fmt: skip
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(rounds):
        for kind, (threads, options) in kinds.items():
            run, log = folder / f"{kind}-{number}", folder / f"{kind}-{number}.log"
            threaded = ["--num_cpu_threads_per_process", str(threads), *options]
            command = ["env", f"OMP_NUM_THREADS={threads}", *launch, *threaded, str(TRAIN), *arguments(run)]
            if run_alone(command, log=log):
                raise ValueError(f"a training of {kind} process(es) failed: {last_words(log)}")
            found[kind].append(pictures_per_second(run))
    return statistics.median(found["two"]), statistics.median(found["one"])

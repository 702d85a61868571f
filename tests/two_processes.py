"""What the processes of tests/test_two_processes.py and of some others do: small runs on the CPU, most of two."""

import contextlib
import errno
import importlib.util
import io
import json
import multiprocessing
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from diffusers import FlowMatchEulerDiscreteScheduler
from sharded_model import tiny_model
from torch import Tensor, nn

from unet_attn import checkpoint, data
from unet_attn.data import CaptionedImages, DataError, DataOptions
from unet_attn.objective import Objective
from unet_attn.options import TrainOptions, check_start
from unet_attn.tracking import peak_memory
from unet_attn.training import Trainer

ROOT = Path(__file__).resolve().parent.parent


class CountingTrainer(Trainer):
    """Takes down in which micro-batch of a window gradients travel."""

    exchanges: list[int]

    def _losses(self, batch: dict, micro: int, uniform: Tensor) -> tuple:
        self.micro = micro
        return super()._losses(batch, micro, uniform)

    def exchange(self, state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        self.exchanges.append(self.micro)
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])


class BadPicture(Trainer):
    """A picture that process 1 alone comes across cannot be read."""

    def _train_step(self) -> None:
        if self.step == 1 and self.accelerator.process_index == 1:
            raise DataError("17.png cannot be read")
        super()._train_step()


def refuse() -> None:
    """As a disk does that is full."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def trainer_for(kind: type[Trainer], pictures: Path, run: Path, options: dict[str, object]) -> Trainer:
    torch.set_num_threads(1)
    given = TrainOptions(output_dir=str(run), **options)
    accelerator = Accelerator(cpu=True)
    start = check_start(given, num_processes=accelerator.num_processes)
    model = tiny_model(0)
    model.text_encoder.embedding = nn.Sequential(model.text_encoder.embedding, nn.Dropout(0.3))
    images = CaptionedImages(DataOptions(path=str(pictures), resolution=8), channels=1)
    objective = Objective(FlowMatchEulerDiscreteScheduler())
    return kind(model, objective, images, given, accelerator, config="a: 1\n", resume_from=start)


def train(pictures: Path, run: Path, options: dict[str, object]) -> int:
    """With dropout in the text encoder."""
    assert trainer_for(Trainer, pictures, run, options).run()
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def train_without_looks(pictures: Path, run: Path, options: dict[str, object]) -> int:
    """Whatever is to be looked at, process 0 cannot."""
    trainer = trainer_for(Trainer, pictures, run, options)
    trainer.watcher.sample = trainer.watcher.validate = lambda step: refuse()
    assert trainer.run()
    dist.destroy_process_group()
    return 0


def train_counting(pictures: Path, run: Path, options: dict[str, object]) -> int:
    """Writes the exchanges of process 0 beside the run."""
    trainer = trainer_for(CountingTrainer, pictures, run, options)
    trainer.exchanges = []
    trainer.wrapped.register_comm_hook(None, trainer.exchange)
    assert trainer.run()
    if trainer.accelerator.is_main_process:
        run.with_suffix(".exchanges").write_text(json.dumps(trainer.exchanges))
    dist.destroy_process_group()
    return 0


def script_main(arguments: list[str], *, kind: str) -> int:
    """scripts/train.py. kind: "signalled", process 1 gets a SIGTERM in step 2; "bad picture"; "whole"."""
    spec = importlib.util.spec_from_file_location("train_script", ROOT / "scripts" / "train.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)

    class Signalled(Trainer):
        def _train_step(self) -> None:
            if self.step == 1 and self.accelerator.process_index == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            super()._train_step()

    script.Trainer = {
        "signalled": Signalled,
        "bad picture": BadPicture,
        "whole": Trainer,
    }[kind]
    return script.main(arguments)


def signalled(arguments: list[str]) -> int:
    return script_main(arguments, kind="signalled")


def full_disk(arguments: list[str]) -> int:
    """Process 0 has no room for a checkpoint that all have given their share of, and has to say so in one line."""
    if os.environ["RANK"] != "0":
        return script_main(arguments, kind="whole")

    checkpoint.save_file = lambda tensors, path: refuse()
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = script_main(arguments, kind="whole")
    (told,) = [line for line in said.getvalue().splitlines() if line.startswith("error: ")]
    assert "step-000002 could not be written ([Errno 28] No space left on device)" in told
    assert "Traceback" not in said.getvalue()
    return code


def bad_picture(arguments: list[str], log: Path) -> int:
    if os.environ["RANK"] == "1":
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    return script_main(arguments, kind="bad picture")


def whole(arguments: list[str]) -> int:
    return script_main(arguments, kind="whole")


def train_in_a_group(arguments: list[str]) -> None:
    """scripts/train.py in a process group of its own, with pictures that its loader processes read from the disk."""
    os.setsid()
    multiprocessing.set_start_method("fork", force=True)  # as the script has it, which no server has forked
    data.MEMORY_LIMIT = 0
    raise SystemExit(whole(arguments))


def hold_a_block() -> int:
    """256 MiB; peak_memory has to see them."""
    before = peak_memory(torch.device("cpu"))
    block = torch.ones(2**28, dtype=torch.uint8)
    assert 0.24 < peak_memory(torch.device("cpu")) - before < 0.3
    del block
    return 0

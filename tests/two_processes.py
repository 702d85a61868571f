"""What the processes of tests/test_two_processes.py do: small runs of two that learn together, on the CPU."""

import importlib.util
import json
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from diffusers import FlowMatchEulerDiscreteScheduler
from sharded_model import tiny_model
from torch import Tensor, nn

from unet_attn.checkpoint import CheckpointError
from unet_attn.data import CaptionedImages, DataError, DataOptions
from unet_attn.objective import Objective
from unet_attn.options import TrainOptions, check_start
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


class FullDisk(Trainer):
    """Its main process cannot save."""

    def _save(self) -> None:
        if self.accelerator.is_main_process:
            raise CheckpointError("checkpoint step-000002 could not be written (no space left on device)")
        super()._save()


def trainer_for(kind: type[Trainer], pictures: Path, run: Path, options: dict[str, object]) -> Trainer:
    torch.set_num_threads(1)
    given = TrainOptions(output_dir=str(run), **options)
    accelerator = Accelerator(cpu=True)
    start = check_start(given, num_processes=accelerator.num_processes)
    model = tiny_model(0)
    model.text_encoder.embedding = nn.Sequential(model.text_encoder.embedding, nn.Dropout(0.3))
    data = CaptionedImages(DataOptions(path=str(pictures), resolution=8), channels=1)
    objective = Objective(FlowMatchEulerDiscreteScheduler())
    return kind(model, objective, data, given, accelerator, config="a: 1\n", resume_from=start)


def train(pictures: Path, run: Path, options: dict[str, object]) -> int:
    """With dropout in the text encoder."""
    assert trainer_for(Trainer, pictures, run, options).run()
    if dist.is_initialized():
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
    """scripts/train.py. kind: "signalled", process 1 gets a SIGTERM in step 2; "full disk"; "bad picture"; "whole"."""
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
        "full disk": FullDisk,
        "bad picture": BadPicture,
        "whole": Trainer,
    }[kind]
    return script.main(arguments)


def signalled(arguments: list[str]) -> int:
    return script_main(arguments, kind="signalled")


def full_disk(arguments: list[str]) -> int:
    return script_main(arguments, kind="full disk")


def bad_picture(arguments: list[str], log: Path) -> int:
    if os.environ["RANK"] == "1":
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    return script_main(arguments, kind="bad picture")


def whole(arguments: list[str]) -> int:
    return script_main(arguments, kind="whole")

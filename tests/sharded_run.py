"""What the processes of tests/test_sharded_training.py do: whole runs through Accelerate's own FSDP2, on the CPU."""

from pathlib import Path

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType
from diffusers import FlowMatchEulerDiscreteScheduler, FlowMatchLCMScheduler
from sharded_model import tiny_model

from unet_attn.consistency import ConsistencyOptions, ConsistencyTuning
from unet_attn.data import CaptionedImages, DataOptions
from unet_attn.objective import Objective
from unet_attn.options import TrainOptions, check_start
from unet_attn.pipelines.text_to_image import TextToImagePipeline
from unet_attn.sharding import is_sharded
from unet_attn.training import Trainer


def accelerator_for(sharded: bool) -> Accelerator:
    accelerator = Accelerator(cpu=True)
    if sharded:
        # what it sets up where there are GPUs; on a CPU it would fall back to DDP, which is why train.py refuses that
        accelerator.state.distributed_type = DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP  # or `prepare` would take it back
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["UNetLayer"],
            reshard_after_forward=True,
            cpu_ram_efficient_loading=False,
        )
    return accelerator


def train(pictures: Path, run: Path, sharded: bool, options: dict[str, object], *, tuned: bool = False) -> None:
    """tuned: towards another tiny model, rather than by the pictures."""
    torch.set_num_threads(1)
    given = TrainOptions(output_dir=str(run), **options)
    accelerator = accelerator_for(sharded)
    start = check_start(given, num_processes=accelerator.num_processes)
    data = CaptionedImages(DataOptions(path=str(pictures), resolution=8), channels=1)
    objective, tuning = Objective(FlowMatchEulerDiscreteScheduler()), None
    if tuned:
        objective, other = Objective(FlowMatchLCMScheduler()), tiny_model(1)
        pipeline = TextToImagePipeline(
            other.unet, FlowMatchEulerDiscreteScheduler(), text_encoder=other.text_encoder, tokenizer=other.tokenizer
        )
        tuning = ConsistencyTuning(ConsistencyOptions(start="other"), pipeline, objective)
    trainer = Trainer(
        tiny_model(0), objective, data, given, accelerator, config="a: 1\n", resume_from=start, tuning=tuning
    )
    assert is_sharded(trainer.parameters.values()) == sharded
    assert trainer.run()
    if accelerator.num_processes > 1:
        torch.distributed.destroy_process_group()


def train_tuned(pictures: Path, run: Path, sharded: bool, options: dict[str, object]) -> None:
    train(pictures, run, sharded, options, tuned=True)

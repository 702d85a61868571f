"""What the processes of tests/test_sharding.py do: train a tiny model in one piece and sharded, and save all of it."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from unet_attn.checkpoint import load_checkpoint, save_checkpoint
from unet_attn.ema import ExponentialMovingAverage, trainable
from unet_attn.model import TextConditionalUNet
from unet_attn.sharding import copy_whole, gathered, plain_copy, sharded_like, whole
from unet_attn.text_encoder import TextEncoder
from unet_attn.tokenizer import train_tokenizer
from unet_attn.unet import AttnUNet2D

CAPTIONS = ["a red thing", "a blue one", "nothing", "a red one", "some thing", ""]
STEPS = 2


def tiny_model(seed: int) -> TextConditionalUNet:
    torch.manual_seed(seed)
    tokenizer = train_tokenizer(CAPTIONS, 300, 11)
    unet = AttnUNet2D(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        block_channels=(8, 24),
        attention_levels=(1,),
        dim_head=8,
        context_dim=10,
    )
    nn.init.normal_(unet.conv_out.weight, std=0.1)  # from 0, other weights would get no gradient in the first step
    return TextConditionalUNet(unet, TextEncoder(len(tokenizer), dim=10, depth=1, heads=2, max_length=11), tokenizer)


def shard(model: TextConditionalUNet) -> TextConditionalUNet:
    """In place, as configs/accelerate/fsdp2.yaml asks Accelerate to: each layer of the U-Net, then what is left."""
    for module in model.modules():
        if type(module).__name__ == "UNetLayer":
            fully_shard(module)
    return fully_shard(model)


def train(model: TextConditionalUNet, *, rank: int, size: int) -> dict[str, dict[str, Tensor]]:
    """Some steps of AdamW with an average. Returns its tensors, whole, in every process, and each step's norms."""
    parameters = trainable(model)
    # with the usual eps of 1e-8 the rounding of a gradient that is nearly 0 would decide in which direction it goes
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.01, eps=1e-4, weight_decay=0.0, fused=True)
    ema = ExponentialMovingAverage(model, 0.5)
    generator = torch.Generator().manual_seed(3)
    pictures = torch.randn(len(CAPTIONS), 1, 8, 8, generator=generator)
    mine, norms = slice(rank, None, size), []
    for step in range(STEPS):
        t = torch.full((len(CAPTIONS),), 100.0 * step)
        prediction, _ = model(pictures[mine], t[mine], CAPTIONS[mine])
        prediction.sub(pictures[mine]).square().mean().backward()
        norms.append(whole(nn.utils.clip_grad_norm_(parameters.values(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
        ema.update(model)
    moments = {f"{name} exp_avg": optimizer.state[parameter]["exp_avg"] for name, parameter in parameters.items()}
    everything = {"model": parameters, "ema": ema.averages, "optimizer": moments, "norms": {"": torch.stack(norms)}}
    return {kind: gathered(tensors, keep=True) for kind, tensors in everything.items()}


def shard_train_save_and_load(folder: Path) -> None:
    """Everything that is collective, once; process 0 leaves what it saw in `folder`."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    one_piece = train(tiny_model(0), rank=0, size=1)

    model = shard(tiny_model(0))
    sharded = train(model, rank=rank, size=size)
    nothing = gathered(trainable(model), keep=rank == 0)
    assert rank == 0 or nothing == {}

    if rank == 0:
        save_checkpoint(folder / "checkpoints", STEPS, tensors=sharded, state={})
        save_checkpoint(folder / "one piece", STEPS, tensors=one_piece, state={})
    dist.barrier()
    saved = load_checkpoint(folder / "checkpoints" / f"step-{STEPS:06d}").tensors["model"]
    in_one_piece = tiny_model(1)
    copy = plain_copy(in_one_piece)
    copy_whole(trainable(in_one_piece), saved)
    again = shard(tiny_model(1))
    copy_whole(trainable(again), saved)
    copy_whole(copy.state_dict(), saved)
    slices = {name: parameter.to_local() for name, parameter in trainable(again).items()}
    expected = {name: sharded_like(saved[name], again.get_parameter(name)).to_local() for name in slices}
    assert all(torch.equal(slices[name], expected[name]) for name in slices)
    assert sum(part.numel() for part in slices.values()) < 0.6 * sum(value.numel() for value in saved.values())

    loaded = {
        "sharded": gathered(trainable(again), keep=True),
        "plain": trainable(in_one_piece),
        "copy": copy.state_dict(),
    }
    if rank == 0:
        save_checkpoint(folder / "loaded", 0, tensors=loaded, state={})
        copy.unet.save_pretrained(folder / "published" / "unet")
    dist.destroy_process_group()

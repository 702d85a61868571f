"""Whole tensors out of sharded ones and back: what lets a checkpoint ignore how many devices shared the weights.

FSDP2 (`torch.distributed.fsdp.fully_shard`; Zhao et al. 2023, "PyTorch FSDP") turns each parameter into a `DTensor` of
which every process holds a slice along the first axis. The optimizer and the averages work on slices as they are; only
what looks at a whole tensor has to ask for it here: a checkpoint, the published pipeline, Muon. Every function takes
plain tensors too and then does nothing, or what plain tensors need, so that callers do not ask which they have.

"Collective" marks what all processes have to call, in the same order: the slices travel between them.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

# The names by which wrappers hold a module: torch.compile, DDP, activation checkpointing, FSDP of the first version.
WRAPPERS = frozenset({"_orig_mod", "module", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def clean_name(name: str) -> str:
    """The name that a parameter has in the bare model, whatever wrappers its module lies in.

    A wrapper counts as often as it stands: `module._orig_mod.unet.conv_in.weight` is `unet.conv_in.weight`.
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def is_sharded(tensors: Iterable[Tensor]) -> bool:
    """Whether any of the tensors lies in slices with several processes."""
    return any(isinstance(tensor, DTensor) for tensor in tensors)


def whole(tensor: Tensor) -> Tensor:
    """The tensor that the slices make up, in every process; a plain one is returned as it is. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gathered(tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """The whole tensors by name, each moved to the CPU before the next is put together. Collective.

    keep: False in the processes that only give their slices; they get an empty dictionary. Plain tensors are passed on
    where they are, and kept by all: they cost nothing.
    """
    if not is_sharded(tensors.values()):
        return dict(tensors)
    result = {}
    for name, tensor in tensors.items():
        full = whole(tensor.detach())
        if keep:
            result[name] = full.cpu()
    return result


def sharded_like(full: Tensor, like: Tensor) -> Tensor:
    """A whole tensor as `like` is: sliced for this process, on like's device, if that is sharded, else as it is.

    full: of like's shape, the same in every process, so that nothing needs to travel. Raises ValueError if the shapes
    differ.
    """
    if full.shape != like.shape:
        raise ValueError(f"expected a tensor of shape {tuple(like.shape)}, got {tuple(full.shape)}")
    if not isinstance(like, DTensor):
        return full
    # src_data_rank=None: every process cuts its slice from its own copy instead of waiting for process 0's
    local = full.detach().to(like.device)
    return distribute_tensor(local, like.device_mesh, like.placements, src_data_rank=None)


@torch.no_grad()
def copy_whole(targets: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> None:
    """Copy whole tensors into the targets of the same names, sharded or plain. Every target needs its source."""
    for name, target in targets.items():
        target.copy_(sharded_like(sources[name], target))


def reshard(model: nn.Module) -> None:
    """Give up the whole weights that a pass has gathered, so that the next one gathers what the slices hold then."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class OnePiece:
    """A copy of a sharded model that holds its averages, for what the main process does alone: to draw and publish.

    One process cannot run a sharded model by itself, since the slices of each layer travel when it is called. To be
    made of a model that `accelerator` has not sharded yet; frozen children of it are then left whole.
    model: the copy; in the other processes, which have no use for one, the model itself.
    """

    def __init__(self, model: nn.Module, accelerator: Accelerator) -> None:
        self.is_main, self.device = accelerator.is_main_process, accelerator.device
        self.model = plain_copy(model) if self.is_main else model
        # A frozen text encoder is asked for captions that are new, which are more in one process than in another: if it
        # were sharded, each call would wait for slices that the others have no reason to send.
        accelerator.state.fsdp_plugin.ignored_modules = [child for child in model.children() if not _is_trained(child)]

    def take(self, averages: Mapping[str, Tensor]) -> None:
        """Bring the copy up to now. Collective."""
        found = gathered(averages, keep=self.is_main)
        if self.is_main:
            parameters = dict(self.model.named_parameters())
            copy_whole({name: parameters[name] for name in averages}, found)

    @contextmanager
    def swapped(self, model: nn.Module) -> Iterator[None]:
        """What `ExponentialMovingAverage.swapped` is for other models: the copy is ready for use, on the device."""
        try:
            model.to(self.device)
            yield
        finally:
            model.cpu()  # a device that needs sharded weights has no room for whole ones


def plain_copy(model: nn.Module) -> nn.Module:
    """A copy of a model on the CPU, in eval mode and not to be trained."""
    return copy.deepcopy(model).cpu().eval().requires_grad_(False)


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())

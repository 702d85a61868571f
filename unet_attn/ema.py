"""An exponential moving average of a model's trainable weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from unet_attn.sharding import clean_name, copy_whole


def ema_decay(decay: float, updates: int) -> float:
    """The decay of the next update when `updates` were made before: short at first, so that early noise is forgotten.

    The warm-up min(decay, (1 + n) / (10 + n)) is that of TensorFlow's ExponentialMovingAverage.
    """
    return min(decay, (1 + updates) / (10 + updates))


class ExponentialMovingAverage:
    """Averages of the trainable parameters of `model`, in float32 and in tensors of their own.

    decay: in [0, 1); 0 follows the live weights. `updates` counts the optimizer steps that were averaged.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"the EMA decay must be at least 0 and below 1, got {decay}")
        self.decay = decay
        self.updates = 0
        self.averages = float_copies(model)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Take in the weights that an optimizer step has just made."""
        parameters = trainable(model)
        live = [parameters[name].float() for name in self.averages]
        torch._foreach_lerp_(list(self.averages.values()), live, 1 - ema_decay(self.decay, self.updates))
        self.updates += 1

    @contextmanager
    def swapped(self, model: nn.Module) -> Iterator[None]:
        """Within the context `model` holds the averages; its live weights return afterwards, even after an error."""
        parameters = trainable(model)
        live = {name: parameters[name].detach().clone() for name in self.averages}
        try:
            _copy_into(parameters, self.averages)
            yield
        finally:
            _copy_into(parameters, live)

    def load(self, averages: Mapping[str, Tensor], *, updates: int) -> None:
        """Go on from saved averages. Raises ValueError naming a parameter that is missing or has another shape."""
        load_averages(self.averages, averages)
        self.updates = updates


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that training changes, by name: what is optimized, averaged and checkpointed."""
    return {clean_name(name): parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def float_copies(model: nn.Module) -> dict[str, Tensor]:
    """The trainable parameters of `model` in float32, in tensors of their own and in the memory order they have."""
    return {
        name: torch.empty_like(parameter, dtype=torch.float32, requires_grad=False).copy_(parameter.detach())
        for name, parameter in trainable(model).items()
    }


def load_averages(targets: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Copy saved averages into `targets`. Raises ValueError naming one that is missing or has another shape."""
    for name, target in targets.items():
        if name not in saved:
            raise ValueError(f"the saved EMA has no weights for {name!r}")
        if saved[name].shape != target.shape:
            raise ValueError(
                f"the saved EMA of {name!r} has shape {tuple(saved[name].shape)}, the model's is {tuple(target.shape)}"
            )
    copy_whole(targets, saved)


@torch.no_grad()
def _copy_into(targets: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> None:
    for name, target in targets.items():
        if name in sources:
            target.copy_(sources[name])

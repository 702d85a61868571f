"""What the peers of `benchmark.py quality` have in common: what they are asked, a recipe, a step of training."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _measure import seconds
from torch import Tensor, nn

from unet_attn.data import CaptionedImages
from unet_attn.optim import learning_rate_factor, set_learning_rate

LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
MAX_GRAD_NORM = 1.0  # in all three recipes


class Sampler(NamedTuple):
    """A way to draw pictures; `steps` passes through the network, twice as many with a guidance other than 1.

    averaged: by the averaged weights, or by those of the last step.
    """

    scheduler: str
    steps: int
    guidance: float
    averaged: bool = True


class Asked(NamedTuple):
    """What is to be drawn: N captions, and their classes (N,) for peers without text."""

    captions: list[str]
    classes: Tensor

    def part(self, first: int, count: int) -> "Asked":
        return Asked(self.captions[first : first + count], self.classes[first : first + count])


@dataclass(frozen=True)
class Recipe:
    """How a project trains and samples. samplers: by what they are for; "main" scores along the way."""

    batch_size: int
    optimizer: type[torch.optim.Optimizer]
    learning_rate: float
    betas: tuple[float, float]
    weight_decay: float
    warmup_steps: int
    schedule: str
    cooldown_fraction: float
    objective: str
    average: str
    samplers: dict[str, Sampler]

    def told(self) -> dict[str, Any]:
        """As a result file has it."""
        return vars(self) | {
            "optimizer": self.optimizer.__name__,
            "samplers": {name: sampler._asdict() for name, sampler in self.samplers.items()},
        }


class Classes:
    """The first words of a data set's captions, or its class folders, as numbers from 0.

    of: (pictures,) the class of each picture; names: what each is called.
    """

    def __init__(self, data: CaptionedImages) -> None:
        whole = data.kind.startswith("the names of")  # of class folders
        words = [class_word(variants[0] if variants else "", whole=whole) for variants in data.captions]
        self.names = list(dict.fromkeys(words))
        number = {name: place for place, name in enumerate(self.names)}
        self.of = torch.tensor([number[word] for word in words])


def class_word(caption: str, *, whole: bool = False) -> str:
    """The class of a caption: its first word without punctuation, or all of it where captions are class names."""
    if whole:
        return caption.lower().strip()
    return next(iter(caption.lower().split()), "").strip(".,:;!?")


class Peer:
    """A network of another project under training. Subclasses say what the loss is and how pictures are drawn.

    modules: all that is trained. `start` comes before the first step. average: as the subclass makes it, with torch's
    state_dict and load_state_dict.
    """

    def __init__(self, modules: Sequence[nn.Module], recipe: Recipe) -> None:
        self.modules, self.recipe = list(modules), recipe
        self.parameters = [
            parameter for module in modules for parameter in module.parameters() if parameter.requires_grad
        ]
        self.layout, self.steps = "contiguous", 0

    def use_layout(self, layout: str) -> None:
        self.layout = layout
        for module in self.modules:
            module.to(memory_format=LAYOUTS[layout])

    def start(self) -> None:
        recipe = self.recipe
        # the fused kernel computes the same in less time
        self.optimizer = recipe.optimizer(
            self.parameters,
            lr=recipe.learning_rate,
            betas=recipe.betas,
            weight_decay=recipe.weight_decay,
            fused=True,
        )
        for group in self.optimizer.param_groups:
            group["full_lr"] = group["lr"]
        self.start_average()

    def step(self, batch: dict[str, Any], progress: float) -> None:
        """One optimizer step; progress: the part of the run that lies behind."""
        self.steps += 1
        recipe = self.recipe
        factor = learning_rate_factor(
            self.steps,
            progress,
            warmup_steps=recipe.warmup_steps,
            schedule=recipe.schedule,
            cooldown_fraction=recipe.cooldown_fraction,
        )
        set_learning_rate(self.optimizer, factor)
        self.loss(batch).backward()
        nn.utils.clip_grad_norm_(self.parameters, MAX_GRAD_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.update_average()

    def save(self, path: Path) -> None:
        """Keep the weights and their average, for `load` after `start_average`."""
        states = {"modules": [module.state_dict() for module in self.modules], "average": self.average.state_dict()}
        torch.save(states | {"layout": self.layout}, path)

    def load(self, path: Path) -> None:
        states = torch.load(path)
        self.use_layout(states["layout"])
        for module, state in zip(self.modules, states["modules"], strict=True):
            module.load_state_dict(state)
        self.average.load_state_dict(states["average"])

    def loss(self, batch: dict[str, Any]) -> Tensor:
        raise NotImplementedError

    def start_average(self) -> None:
        raise NotImplementedError

    def update_average(self) -> None:
        raise NotImplementedError

    def sample(self, asked: Asked, sampler: Sampler) -> Tensor:
        """Pictures (N, C, H, W), about in [-1, 1]; noise from torch's global generator."""
        raise NotImplementedError

    def pictures(self, batch: dict[str, Any]) -> Tensor:
        return batch["image"].contiguous(memory_format=LAYOUTS[self.layout])


def choose_layout(peer: Peer, batch: dict[str, Any], *, repeats: int = 3) -> dict[str, float]:
    """Give the peer the memory layout in which its step is faster; returns the milliseconds of both."""
    times = {}
    for layout in LAYOUTS:
        peer.use_layout(layout)
        # the first pass pays for memory and for kernels that are chosen once
        times[layout] = 1000 * min([seconds(lambda: peer.loss(batch).backward()) for _ in range(repeats)][1:])
        for parameter in peer.parameters:
            parameter.grad = None
    peer.use_layout(min(times, key=times.__getitem__))
    return {layout: round(value, 1) for layout, value in times.items()}

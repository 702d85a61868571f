"""Which word drew which pixel: the U-Net's attention to the text, averaged while it samples.

The fused attention does not show its weights. A forward hook on each cross-attention computes them a second time beside
it, so that the picture does not change, for the chosen levels and steps only; what is kept is one running sum for each
size of map. After Tang et al. 2023, https://arxiv.org/abs/2210.04885, who add the maps of all levels, heads and steps;
here they are then normalised over the words.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from torch import Tensor, nn

from unet_attn.pipelines.captions import Words


@dataclass(frozen=True)
class AttentionChoice:
    """What the maps are averaged over; None is all there is.

    levels: of the U-Net, among its attention_levels, 0 = the highest resolution; heads: from 0; steps: calls of the
    U-Net, from 0 (a second-order scheduler makes nearly two of them for each inference step).
    Raises ValueError for what is no list of whole numbers.
    """

    levels: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    steps: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name, chosen in vars(self).items():
            is_list = isinstance(chosen, tuple | list | range) and all(isinstance(each, Integral) for each in chosen)
            if chosen is not None and not is_list:
                raise ValueError(f"attention {name} must be a tuple of whole numbers, got {chosen!r}")


class WordMaps(NamedTuple):
    """The heat maps of one picture. words: W; maps: (W, H, W) float32 on the CPU, at each pixel 1 over all words."""

    words: tuple[str, ...]
    maps: Tensor


class AttentionRecorder:
    """Adds up attention weights of a U-Net during one call of a pipeline.

    unet: an AttnUNet2D with text; choice: what to average over; pictures: the last rows of the U-Net's batch, the ones
    under the prompts; size: height and width in pixels; steps: calls of the U-Net to come.
    Set `step` before each call of the U-Net. Raises ValueError if the choice names what the U-Net does not have.
    """

    def __init__(
        self, unet: nn.Module, choice: AttentionChoice, *, pictures: int, size: tuple[int, int], steps: int
    ) -> None:
        # by name: in a saved folder's code the U-Net's classes are a copy of their own
        self.layers = [part for part in unet.modules() if type(part).__name__ == "CrossAttention2d"]
        if not self.layers:
            raise ValueError("this U-Net attends to no text, so there is no attention to return")
        _check_choice("levels", choice.levels, sorted(unet.config.attention_levels))
        _check_choice("heads", choice.heads, range(min(layer.heads for layer in self.layers)))
        self.choice = choice
        self.check_steps(steps)
        self.pictures = pictures
        self.size = size
        self.step = 0
        self._heights = {size[0] // unet.config.patch_size >> level: level for level in unet.config.attention_levels}
        self._sums: dict[tuple[int, int], Tensor] = {}

    def check_steps(self, steps: int) -> None:
        """Raise ValueError for a choice of other calls of the U-Net than there will be."""
        _check_choice("steps", self.choice.steps, range(steps))

    @contextmanager
    def recording(self) -> Iterator[None]:
        handles = [layer.register_forward_hook(self._add) for layer in self.layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def word_maps(self, words: list[Words]) -> list[WordMaps]:
        """The maps of each picture, which has the words of the same place in the list."""
        if not self._sums:
            raise ValueError("no attention was recorded: the chosen steps were not reached, or the U-Net is compiled")
        return [self._word_maps(row, each) for row, each in enumerate(words)]

    def _word_maps(self, row: int, words: Words) -> WordMaps:
        total = torch.zeros(len(words.names), *self.size)
        if not words.names:
            return WordMaps((), total)
        for sums in self._sums.values():
            maps = einsum(words.tokens, sums[row].cpu(), "words n, n h w -> words h w")
            total += F.interpolate(maps[None], size=self.size, mode="bilinear", align_corners=False)[0]
        # so that a pixel that heeds no word at all belongs to all of them
        total += torch.finfo(total.dtype).tiny
        return WordMaps(words.names, total / total.sum(dim=0))

    def _add(self, layer: nn.Module, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
        """The hook: inputs are the map (B, C, H, W), the text (B, N, D) and its mask (B, N) or None."""
        height, width = inputs[0].shape[-2:]
        levels, steps = self.choice.levels, self.choice.steps
        if (levels is not None and self._heights[height] not in levels) or (
            steps is not None and self.step not in steps
        ):
            return
        rows = (None if each is None else each[-self.pictures :] for each in inputs)
        # forward itself, as calling the layer would come back here
        _, weights = layer.forward(*rows, return_weights=True)
        weights = weights if self.choice.heads is None else weights[:, list(self.choice.heads)]
        maps = rearrange(weights.float().mean(dim=1), "b (h w) n -> b n h w", h=height)
        known = self._sums.get((height, width))
        self._sums[height, width] = maps if known is None else known.add_(maps)


def _check_choice(name: str, chosen: tuple[int, ...] | None, known: list[int] | range) -> None:
    if chosen is not None and (not chosen or any(each not in known for each in chosen)):
        raise ValueError(f"attention {name} must be some of {_span(known)}, got {tuple(chosen)}")


def _span(known: list[int] | range) -> str:
    return f"0..{len(known) - 1}" if isinstance(known, range) else ", ".join(map(str, known))

"""From a picture and its captions to what one place in training sees: the draws, and the batch."""

from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from PIL import Image

from unet_attn.data_options import DataOptions
from unet_attn.images import channels_first, corner, fit, load_image, scaled
from unet_attn.sampler import AUGMENT, CAPTION, DROPOUT, SampleKey, sample_generator


def decode(picture: Path | BinaryIO, options: DataOptions, *, channels: int) -> Image.Image:
    """A picture as it lies on the disk or in a table. Raises ImageError if it cannot be decoded."""
    return load_image(picture, channels=channels, background=options.background, max_pixels=options.max_pixels)


def fitted_pixels(image: Image.Image, options: DataOptions, *, size: tuple[int, int]) -> np.ndarray:
    """A decoded picture scaled to cover `size` (width, height): uint8 (C, h, w)."""
    return np.ascontiguousarray(channels_first(np.asarray(fit(image, size, options.crop))))


def plain_item(pixels: np.ndarray, size: tuple[int, int], captions: list[str], index: int) -> dict[str, Any]:
    """A picture without augmentation: its middle and its first caption. pixels: uint8 (C, h, w)."""
    return _item(_cut(pixels, size, None), next(iter(captions), ""), SampleKey(index, 0, 0))


def training_item(
    pixels: np.ndarray, size: tuple[int, int], captions: list[str], key: SampleKey, *, options: DataOptions, seed: int
) -> dict[str, Any]:
    """{"image": float32 (C, H, W) in [-1, 1], "caption": str, "index": int, "key": SampleKey, "replaced": ""}.

    pixels: uint8 (C, h, w), at least as large as size (W, H); captions: the variants, [] = none. Place of the crop,
    flip, caption and its dropout are drawn from (seed, key.step, key.position) alone.
    """
    draws = None
    if options.horizontal_flip or options.crop == "random":
        draws = sample_generator(seed, AUGMENT, key.step, key.position)
    cut = _cut(pixels, size, draws if options.crop == "random" else None)
    if options.horizontal_flip and torch.rand((), generator=draws).item() < 0.5:
        cut = cut[..., ::-1].copy()

    caption = ""
    if captions and not (options.caption_dropout and _draw(seed, DROPOUT, key) < options.caption_dropout):
        caption = captions[0] if len(captions) == 1 else captions[int(_draw(seed, CAPTION, key) * len(captions))]
    return _item(cut, caption, key)


def _item(pixels: np.ndarray, caption: str, key: SampleKey) -> dict[str, Any]:
    return {"image": scaled(pixels), "caption": caption, "index": key.index, "key": key, "replaced": ""}


def _cut(pixels: np.ndarray, size: tuple[int, int], generator: torch.Generator | None) -> np.ndarray:
    left, top = corner((pixels.shape[2], pixels.shape[1]), size, generator)
    return pixels[:, top : top + size[1], left : left + size[0]]


def _draw(seed: int, purpose: int, key: SampleKey) -> float:
    """A number in [0, 1) that depends on the place in training alone."""
    return torch.rand((), generator=sample_generator(seed, purpose, key.step, key.position)).item()


def collate(items: list[dict[str, Any]]) -> dict[str, Any]:
    """{"image": (B, C, H, W), "caption": B strings, "index": int64 (B,), "key": B SampleKeys, "replaced": messages}.

    `replaced` says of each picture that broke during training and had to be replaced which one it was, and why.
    """
    return {
        "image": torch.stack([item["image"] for item in items]),
        "caption": [item["caption"] for item in items],
        "index": torch.tensor([item["index"] for item in items]),
        "key": [item["key"] for item in items],
        "replaced": [item["replaced"] for item in items if item["replaced"]],
    }

"""A folder of captioned pictures as a torch data set.

Files are found by `sources`, decoded by `images`; here they are checked, kept in memory if they are few, and handed
out with one caption each. What is random about an item follows from the seed and its SampleKey, its place in training.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset
from tqdm import tqdm

from unet_attn.images import (
    Crop,
    ImageError,
    background_colour,
    channels_first,
    corner,
    fit,
    load_image,
    resize_and_crop,
    scaled,
    to_tensor,
)
from unet_attn.sampler import AUGMENT, CAPTION, DROPOUT, SampleKey, sample_generator
from unet_attn.sources import DataError, Fault, find_pictures, shown

__all__ = [
    "CaptionedImages",
    "DataError",
    "Fault",
    "ImageError",
    "collate",
    "load_image",
    "resize_and_crop",
    "to_tensor",
]

MEMORY_LIMIT = 1 << 30  # bytes of decoded pictures that are kept instead of being read again in every epoch
MAX_LISTED = 10  # skipped files in the summary; .faults has all


class Sample(NamedTuple):
    """What reading one file gave: its fitted pixels, uint8 (C, h, w), and its own size; or a fault."""

    pixels: np.ndarray | None
    size: tuple[int, int]
    fault: Fault | None


class CaptionedImages(Dataset[dict[str, Any]]):
    """The pictures of a folder with their captions, each file checked before training starts.

    Args:
        path: the folder; sub-folders are searched. Captions come from metadata.jsonl, metadata.csv, text files beside
            the pictures, or the names of class folders (see unet_attn.sources).
        resolution: side of the square pictures in pixels.
        channels: 1 (grey) or 3 (colour), the U-Net's in_channels.
        caption_dropout: probability that a visit has the empty caption, which guidance needs; in [0, 1].
        caption_extension: of the text files, with or without the dot.
        horizontal_flip: mirror half of the visits; wrong for writing and for left and right.
        crop: what is cut out of a picture that is not square: its middle, or a random place at each visit.
        background: the colour behind transparent pixels.
        on_error: "fail" lists every file that cannot be used, "skip" leaves them out.
        require_captions: whether a folder without any caption is an error; False for unconditional models.
        num_workers: loader processes for sets too large for memory; as many threads check the files (at least up to 4).
        max_pixels: refuse larger pictures; null is Pillow's limit against decompression bombs.
        seed: of caption choice, caption dropout, flips and crops.

    Small sets are decoded once and held as uint8; `in_memory` tells. Items are for training if indexed by a SampleKey,
    plain (first caption, no dropout, no flip, centre crop) if indexed by an int.
    Raises DataError naming every unusable file, or saying that there are no pictures or no captions.
    """

    def __init__(
        self,
        path: str | Path,
        resolution: int = 32,
        channels: int = 3,
        *,
        caption_dropout: float = 0.1,
        caption_extension: str = ".txt",
        horizontal_flip: bool = False,
        crop: Crop = "center",
        background: str = "white",
        on_error: Literal["fail", "skip"] = "fail",
        require_captions: bool = True,
        num_workers: int = 0,
        max_pixels: int | None = None,
        seed: int = 0,
    ) -> None:
        if resolution < 1:
            raise ValueError(f"resolution must be at least 1, got {resolution}")
        if channels not in (1, 3):
            raise ValueError(f"channels must be 1 (grey) or 3 (colour), got {channels}")
        if not 0 <= caption_dropout <= 1:
            raise ValueError(f"caption_dropout must be in [0, 1], got {caption_dropout}")
        if crop not in ("center", "random"):
            raise ValueError(f'crop must be "center" or "random", got {crop!r}')
        if on_error not in ("fail", "skip"):
            raise ValueError(f'on_error must be "fail" or "skip", got {on_error!r}')
        background_colour(background)
        self.path = Path(path)
        self.resolution, self.channels = resolution, channels
        self.caption_dropout, self.horizontal_flip, self.crop = caption_dropout, horizontal_flip, crop
        self.background, self.max_pixels = background, max_pixels
        self.on_error, self.num_workers, self.seed = on_error, num_workers, seed

        found = find_pictures(self.path, caption_extension)
        samples = self._read_all(found.paths)
        good = [i for i, sample in enumerate(samples) if sample.fault is None]
        self.faults = found.faults + [sample.fault for sample in samples if sample.fault is not None]
        self._refuse_faults(len(good))
        self.paths = [found.paths[i] for i in good]
        self.captions = [found.captions[i] for i in good]
        self.kind, self.notes = found.kind, found.notes
        if require_captions and not any(self.captions):
            raise DataError(self._no_captions(caption_extension))
        held = [samples[i].pixels for i in good]
        self._pixels = None if any(pixels is None for pixels in held) else held
        self._enlarged = sum(min(samples[i].size) < resolution for i in good)

    @property
    def in_memory(self) -> bool:
        """Whether items come from memory: then loader processes only cost."""
        return self._pixels is not None

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, key: int | SampleKey) -> dict[str, Any]:
        """{"image": float32 (C, H, W) in [-1, 1], "caption": str, "index": int, "key": SampleKey}."""
        if not isinstance(key, SampleKey):
            index = range(len(self))[key]
            return self._item(SampleKey(index, 0, 0), self._cut(index, None), next(iter(self.captions[index]), ""))
        draws = None
        if self.horizontal_flip or self.crop == "random":
            draws = sample_generator(self.seed, AUGMENT, key.step, key.position)
        pixels = self._cut(key.index, draws if self.crop == "random" else None)
        if self.horizontal_flip and torch.rand((), generator=draws).item() < 0.5:
            pixels = pixels[..., ::-1].copy()
        return self._item(key, pixels, self._caption(key))

    def _item(self, key: SampleKey, pixels: np.ndarray, caption: str) -> dict[str, Any]:
        return {"image": scaled(pixels), "caption": caption, "index": key.index, "key": key}

    def _caption(self, key: SampleKey) -> str:
        variants = self.captions[key.index]
        if not variants or (self.caption_dropout and self._draw(DROPOUT, key) < self.caption_dropout):
            return ""
        return variants[0] if len(variants) == 1 else variants[int(self._draw(CAPTION, key) * len(variants))]

    def _draw(self, purpose: int, key: SampleKey) -> float:
        """A number in [0, 1) that depends on the place in training alone."""
        return torch.rand((), generator=sample_generator(self.seed, purpose, key.step, key.position)).item()

    def _cut(self, index: int, generator: torch.Generator | None) -> np.ndarray:
        """The resolution x resolution pixels of a picture, uint8 (C, H, W)."""
        pixels = self._pixels[index] if self._pixels is not None else self._read(self.paths[index])[0]
        left, top = corner(pixels.shape[2], pixels.shape[1], self.resolution, generator)
        return pixels[:, top : top + self.resolution, left : left + self.resolution]

    def _read(self, path: Path) -> tuple[np.ndarray, tuple[int, int]]:
        """Decode and fit one file: uint8 (C, h, w) and the picture's own (width, height)."""
        image = load_image(path, channels=self.channels, background=self.background, max_pixels=self.max_pixels)
        return np.ascontiguousarray(channels_first(np.asarray(fit(image, self.resolution, self.crop)))), image.size

    def _read_all(self, paths: list[Path]) -> list[Sample]:
        """Decode every file once: this is the check, and what the small sets keep."""
        samples, used, keep = [], 0, True
        with ThreadPoolExecutor(max(self.num_workers, min(4, os.cpu_count() or 1))) as pool:
            bar = tqdm(
                pool.map(self._sample, paths), "reading pictures", len(paths), leave=False, disable=None, delay=2
            )
            for sample in bar:
                used += 0 if sample.pixels is None else sample.pixels.nbytes
                if keep and used > MEMORY_LIMIT:
                    keep, samples = False, [s._replace(pixels=None) for s in samples]
                samples.append(sample if keep else sample._replace(pixels=None))
        return samples

    def _sample(self, path: Path) -> Sample:
        try:
            pixels, size = self._read(path)
        except ImageError as error:
            return Sample(None, (0, 0), Fault(path, error.reason))
        return Sample(pixels, size, None)

    def _refuse_faults(self, good: int) -> None:
        lines = [f"  {fault}" for fault in self.faults]
        if not good:
            raise DataError("\n".join([f"no usable picture among the files of {shown(self.path)}:", *lines]))
        if self.faults and self.on_error == "fail":
            plural = "s" if len(lines) > 1 else ""
            head = f"{len(lines)} fault{plural} in {shown(self.path)} (on_error: skip would train on {good} pictures):"
            raise DataError("\n".join([head, *lines]))

    def _no_captions(self, caption_extension: str) -> str:
        suffix = "." + caption_extension.lstrip(".")
        return "; ".join(
            [
                f"none of the {len(self)} images in {shown(self.path)} has a caption: expected NAME{suffix} beside "
                "NAME.png, or metadata.jsonl or metadata.csv with file_name and text, or one folder per class "
                "(a model without text needs none: set text_encoder to null)",
                *self.notes,
            ]
        )

    def summary(self) -> str:
        """What was found, for the start of a run: a few lines."""
        where = (
            f"held in memory ({sum(p.nbytes for p in self._pixels) / 2**20:.1f} MiB)"
            if self._pixels
            else "read from disk"
        )
        size = f"{self.resolution} x {self.resolution} {'grey' if self.channels == 1 else 'colour'}"
        lines = [f"{len(self)} pictures in {shown(self.path)}, {size}, {where}; captions: {self.kind}"]
        missing = sum(not variants for variants in self.captions)
        if missing and any(self.captions):
            lines.append(f"{missing} of {len(self)} images have no caption: they train the empty caption")
        if self._enlarged:
            lines.append(f"{self._enlarged} pictures are smaller than {self.resolution} pixels and get enlarged")
        if self.faults:
            shown_faults = [
                f"{fault.path and shown(fault.path)} ({fault.reason})" for fault in self.faults[:MAX_LISTED]
            ]
            more = [f"and {len(self.faults) - MAX_LISTED} more"] if len(self.faults) > MAX_LISTED else []
            lines.append(f"{len(self.faults)} skipped: " + ", ".join(shown_faults + more))
        return "\n".join(lines + self.notes)


def collate(items: list[dict[str, Any]]) -> dict[str, Any]:
    """{"image": (B, C, H, W), "caption": B strings, "index": int64 (B,), "key": B SampleKeys}."""
    return {
        "image": torch.stack([item["image"] for item in items]),
        "caption": [item["caption"] for item in items],
        "index": torch.tensor([item["index"] for item in items]),
        "key": [item["key"] for item in items],
    }

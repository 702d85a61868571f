"""Captioned pictures as a torch data set: a folder of files or a data set of the `datasets` library.

Found by `sources` or `tables`, checked by `checking`, decoded by `images`; here they are kept in memory if they are few
and handed out one place in training at a time. What is random about an item follows from the seed and its SampleKey.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from torch import Generator
from torch.utils.data import DataLoader, Dataset

from unet_attn.buckets import bucket_sizes, nearest_bucket
from unet_attn.cache import CheckCache, Checked, stamp
from unet_attn.checking import ReplacedPictures, check_pictures
from unet_attn.data_options import DataOptions
from unet_attn.faults import CAPTION, METADATA, DataError, Fault, counted, printable, shown, write_faults
from unet_attn.images import READING, ImageError, fitted_size, load_image, resize_and_crop, to_tensor
from unet_attn.items import collate, decode, fitted_pixels, plain_item, training_item
from unet_attn.sampler import GlobalBatchSampler, SampleKey, held_out
from unet_attn.sources import Found, find_pictures
from unet_attn.stream import StreamedImages
from unet_attn.tables import find_rows, is_table

__all__ = [
    "CaptionedImages",
    "DataError",
    "DataOptions",
    "Fault",
    "ImageError",
    "ReplacedPictures",
    "StreamedImages",
    "collate",
    "load_image",
    "open_data",
    "resize_and_crop",
    "to_tensor",
]

MEMORY_LIMIT = 1 << 30  # bytes of decoded pictures that are kept instead of being read again in every epoch
MAX_LISTED = 10  # skipped files in the summary; .faults has all
MAX_REASONS = 3  # faults that are given as reasons why there is no caption at all
MOST_SUBSTITUTES = 8  # for one broken picture: if so many in a row are broken too, it is not the pictures


def open_data(
    options: DataOptions, *, channels: int = 3, seed: int = 0, require_captions: bool = True, multiple_of: int = 1
) -> "CaptionedImages | StreamedImages":
    """The data set that `options` describe; parameters and errors as those of CaptionedImages."""
    if options.streaming:
        return StreamedImages(options, channels=channels, seed=seed, require_captions=require_captions)
    return CaptionedImages(
        options, channels=channels, seed=seed, require_captions=require_captions, multiple_of=multiple_of
    )


class CaptionedImages(Dataset[dict[str, Any]]):
    """Pictures with their captions, each checked before training starts.

    channels: 1 (grey) or 3 (colour), the U-Net's in_channels; seed: of caption choice, caption dropout, flips and
    crops; require_captions: whether a data set without any caption is an error, False for unconditional models;
    multiple_of: what divides the sides of all buckets, the U-Net's downsample_factor.

    Small sets are decoded once and held as uint8; `in_memory` tells. Items are for training if indexed by a SampleKey,
    plain (first caption, no dropout, no flip, middle) if indexed by an int.
    Raises DataError naming every unusable file, or saying that there are no pictures or no captions.
    """

    def __init__(
        self,
        options: DataOptions,
        *,
        channels: int = 3,
        seed: int = 0,
        require_captions: bool = True,
        multiple_of: int = 1,
    ) -> None:
        if channels not in (1, 3):
            raise ValueError(f"channels (unet.in_channels) must be 1 (grey) or 3 (colour), got {channels}")
        self.options, self.channels, self.seed = options, channels, seed
        square = (options.resolution, options.resolution)
        self.sizes = bucket_sizes(options.resolution, multiple_of) if options.buckets else [square]

        found = find_rows(options) if is_table(options) else self._find_files()
        checks = self._check(found)
        good = [at for at, check in enumerate(checks) if check.kind is None]
        broken = [Fault(found.paths[at], check.reason, check.kind) for at, check in enumerate(checks) if check.kind]
        self.faults = found.faults + broken
        self._refuse_faults(len(good))

        self.pictures, self.places = found.pictures, good
        self.paths = [found.paths[at] for at in good]
        self.captions = [found.captions[at] for at in good]
        self.kind, self.notes = found.kind, found.notes
        if require_captions and not any(self.captions):
            raise DataError(self.no_captions())
        self.image_sizes = [checks[at].size for at in good]
        self.buckets = [nearest_bucket(size, self.sizes) for size in self.image_sizes]
        self.held_out = held_out([self._relative(path) for path in self.paths], options.validation_share)
        held = [checks[at].pixels for at in good]
        self._pixels = None if None in held else held

    @property
    def in_memory(self) -> bool:
        """Whether items come from memory: then loader processes only cost."""
        return self._pixels is not None

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, key: int | SampleKey) -> dict[str, Any]:
        """See `training_item` and `plain_item`. A picture that has broken since the check is replaced by another."""
        if not isinstance(key, SampleKey):
            index = range(len(self))[key]
            return plain_item(self._fitted(index), self._size(index), self.captions[index], index)
        index, replaced = key.index, ""
        for _ in range(MOST_SUBSTITUTES):
            try:
                pixels = self._fitted(index)
            except ImageError as error:
                replaced = replaced or f"{shown(self.paths[index])}: {error.reason}"
                index = self._next_in_bucket(index)
                continue
            place = key._replace(index=index)
            item = training_item(
                pixels, self._size(index), self.captions[index], place, options=self.options, seed=self.seed
            )
            return item | {"replaced": replaced}
        raise DataError(f"{replaced}; {MOST_SUBSTITUTES} pictures in a row cannot be read any more")

    def batches(
        self,
        batch_size: int,
        *,
        start_step: int = 1,
        rank: int = 0,
        world_size: int = 1,
        accumulation: int = 1,
        pin_memory: bool = False,
    ) -> Iterator[dict[str, Any]]:
        """The micro-batches of one process from a step on, for ever; see GlobalBatchSampler and `collate`."""
        sampler = GlobalBatchSampler(
            len(self),
            batch_size,
            self.seed,
            buckets=[None if out else bucket for out, bucket in zip(self.held_out, self.buckets, strict=True)],
            start_step=start_step,
            rank=rank,
            world_size=world_size,
            accumulation=accumulation,
        )
        loader = DataLoader(
            self,
            batch_sampler=sampler,
            collate_fn=collate,
            num_workers=0 if self.in_memory else self.options.num_workers,
            pin_memory=pin_memory,
            generator=Generator(),  # else it would draw from the ambient one
            worker_init_fn=_leave_group,
        )
        return _in_plain_words(iter(loader))

    @property
    def has_held_out(self) -> bool:
        return any(self.held_out)

    def fingerprint(self) -> str:
        """Changes with the pictures' names, shapes and captions, and with nothing else."""
        names = [self._relative(path) for path in self.paths]
        parts = zip(names, self.image_sizes, self.captions, strict=True)
        return hashlib.blake2b(repr(list(parts)).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()

    def validation_indices(self, most: int) -> list[int]:
        """At most so many pictures of one shape, spread over those that are held out, or over all if none is.

        Those with captions are preferred.
        """
        pool = [index for index in range(len(self)) if self.held_out[index]] or list(range(len(self)))
        pool = [index for index in pool if self.captions[index]] or pool
        bucket = Counter(self.buckets[index] for index in pool).most_common(1)[0][0]
        pool = [index for index in pool if self.buckets[index] == bucket]
        count = min(most, len(pool))
        return [pool[place * len(pool) // count] for place in range(count)]

    def check_batch_size(self, batch_size: int) -> None:
        """Raises DataError if there are fewer pictures than a batch takes."""
        usable = len(self) - sum(self.held_out)
        if usable < batch_size:
            less = f" ({counted(sum(self.held_out), 'picture')} held out)" if self.has_held_out else ""
            pictures = counted(usable, "picture")
            raise DataError(f"the data set has {pictures}{less}, fewer than train.batch_size {batch_size}")

    def write_faults(self, path: Path) -> None:
        """Write the list of what was skipped, a line each. Raises OSError if it cannot be written."""
        write_faults(self.faults, path)

    def encoded(self, index: int) -> bytes:
        """The bytes of a picture's file. Raises OSError or ImageError if they cannot be read."""
        picture = self.pictures[self.places[index]]
        return picture.read_bytes() if isinstance(picture, Path) else picture.read()

    # reading

    def _find_files(self) -> Found:
        options = self.options
        return find_pictures(
            Path(options.path),
            options.caption_extension,
            class_template=options.class_template,
            text_column=options.text_column,
        )

    def _check(self, found: Found) -> list[Checked]:
        options = self.options
        settings = (self.channels, options.resolution, options.crop, options.background, self.sizes)
        return check_pictures(
            found.pictures,
            [str(path) for path in found.paths],
            [stamp(path) for path in found.paths] if found.stamps is None else found.stamps,
            read=self._read,
            shape=self._shape,
            threads=max(options.num_workers, min(4, os.cpu_count() or 1)),
            memory_limit=MEMORY_LIMIT,
            cache=CheckCache(
                Path(options.path),
                guard=f"image_column {options.image_column}, max_pixels {options.max_pixels}, reading {READING}",
                settings=repr(settings),
            ),
        )

    def _read(self, picture: Path | BinaryIO, bucket: int | None = None) -> tuple[np.ndarray, tuple[int, int]]:
        """Decode and fit a picture, to the nearest bucket unless told: uint8 (C, h, w) and its own (width, height)."""
        image = decode(picture, self.options, channels=self.channels)
        bucket = nearest_bucket(image.size, self.sizes) if bucket is None else bucket
        return fitted_pixels(image, self.options, size=self.sizes[bucket]), image.size

    def _shape(self, image_size: tuple[int, int]) -> tuple[int, int, int]:
        """(C, h, w) of what `_read` gives for a picture of this (width, height)."""
        size = self.sizes[nearest_bucket(image_size, self.sizes)]
        width, height = fitted_size(image_size, size, self.options.crop)
        return self.channels, height, width

    def _size(self, index: int) -> tuple[int, int]:
        """(width, height) of a picture's items."""
        return self.sizes[self.buckets[index]]

    def _fitted(self, index: int) -> np.ndarray:
        if self._pixels is not None:
            return np.frombuffer(self._pixels[index], np.uint8).reshape(self._shape(self.image_sizes[index]))
        # the bucket is that of the check: a file that changed its shape since must not break its batch
        return self._read(self.pictures[self.places[index]], self.buckets[index])[0]

    def _next_in_bucket(self, index: int) -> int:
        bucket = self.buckets[index]
        while True:
            index = (index + 1) % len(self)
            if self.buckets[index] == bucket and not self.held_out[index]:
                return index

    def _relative(self, path: Path) -> str:
        """A picture's name within the data set, which does not change when the data set is moved."""
        root = Path(self.options.path)
        return (path.relative_to(root) if path.is_relative_to(root) else path).as_posix()

    # what is said about it

    def _refuse_faults(self, good: int) -> None:
        lines = [f"  {fault}" for fault in self.faults]
        where = shown(Path(self.options.path))
        if not good:
            raise DataError("\n".join([f"no usable picture among the files of {where}:", *lines]))
        if self.faults and self.options.on_error == "fail":
            usable = counted(good, "picture")
            head = f"{counted(len(lines), 'fault')} in {where} (on_error: skip would train on {usable}):"
            raise DataError("\n".join([head, *lines]))

    def no_captions(self) -> str:
        """Why there is nothing to condition on, where captions were looked for, and what was wrong there."""
        faults = [str(fault) for fault in self.faults if fault.kind in (CAPTION, METADATA)]
        more = [f"and {counted(len(faults) - MAX_REASONS, 'more fault')}"] if len(faults) > MAX_REASONS else []
        suffix = "." + self.options.caption_extension.lstrip(".")
        return "; ".join(
            [
                f"none of the {len(self)} images in {shown(Path(self.options.path))} has a caption: expected "
                f"NAME{suffix} beside NAME.png, or metadata.jsonl, .csv or .parquet with file_name and "
                f"{self.options.text_column}, or one folder per class "
                "(a model without text needs none: set text_encoder to null)",
                *self.notes,
                *faults[:MAX_REASONS],
                *more,
            ]
        )

    def name(self, index: int) -> str:
        """What messages call picture number `index`."""
        return shown(self.paths[index])

    def summary(self) -> str:
        """What was found, for the start of a run: a few lines."""
        lines = self.description()
        if self.faults:
            listed = [printable(f"{fault.path} ({fault.reason})") for fault in self.faults[:MAX_LISTED]]
            more = [f"and {len(self.faults) - MAX_LISTED} more"] if len(self.faults) > MAX_LISTED else []
            lines.append(f"{len(self.faults)} skipped: " + ", ".join(listed + more))
        return "\n".join(lines)

    def description(self) -> list[str]:
        """What was found that can be used, in lines."""
        where = "read from disk"
        if self._pixels is not None:
            where = f"held in memory ({sum(map(len, self._pixels)) / 2**20:.1f} MiB)"
        elif self.options.num_workers:
            where += f" by {counted(self.options.num_workers, 'worker')} per process"
        side, grey = self.options.resolution, "grey" if self.channels == 1 else "colour"
        place = shown(Path(self.options.path))
        pictures = counted(len(self), "picture")
        lines = [f"{pictures} in {place}, {side} x {side} {grey}, {where}; captions: {self.kind}"]
        if self.options.buckets:
            counts = [f"{self.sizes[bucket][0]} x {self.sizes[bucket][1]}: {n}" for bucket, n in self.bucket_counts()]
            lines.append(f"in {counted(len(counts), 'bucket')}, width x height: {', '.join(counts)}")
        if self.has_held_out:
            lines.append(f"{counted(sum(self.held_out), 'picture')} held out for validation")
        elif self.options.validation_share:
            lines.append("no picture falls into data.validation_share: validation looks at trained pictures")
        missing = sum(not variants for variants in self.captions)
        if missing and any(self.captions):
            have = "has no caption: it trains" if missing == 1 else "have no caption: they train"
            lines.append(f"{missing} of {len(self)} images {have} the empty caption")
        enlarged = sum(
            own[0] < size[0] or own[1] < size[1]
            for own, size in zip(self.image_sizes, map(self._size, range(len(self))), strict=True)
        )
        if enlarged:
            one, several = (
                "picture is smaller than it is trained, and gets",
                "pictures are smaller than they are trained, and get",
            )
            lines.append(f"{counted(enlarged, one, several)} enlarged")
        return lines + self.notes

    def bucket_counts(self) -> list[tuple[int, int]]:
        """The buckets that hold pictures, as (number in `sizes`, pictures)."""
        return sorted(Counter(self.buckets).items())


def _leave_group(worker: int) -> None:
    """A signal to the process group is the trainer's, who ends its loader processes once it has saved."""
    os.setpgid(0, 0)


def _in_plain_words(batches: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The batches; an error of a loader process, which torch wraps in its traceback, becomes its own message again."""
    try:
        yield from batches
    except DataError as error:
        raise DataError(str(error).strip().splitlines()[-1].removeprefix("unet_attn.faults.DataError: ")) from None

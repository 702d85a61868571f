"""Every picture is read before training starts; what is wrong comes out then, not after hours.

Files are decoded by a pool of threads: Pillow's decoders run outside Python's lock, and threads need no second copy of
torch. What an earlier start found about an unchanged file is taken from the cache.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tqdm import tqdm

from unet_attn.cache import CheckCache, Checked
from unet_attn.faults import DataError
from unet_attn.images import UNREADABLE, ImageError

IN_FLIGHT = 8  # pictures per thread that are read ahead, which bounds the memory
MOST_REPLACED = 0.05  # of the pictures seen in training
FEWEST_SEEN = 100  # before that, a share means nothing

Read = Callable[[Path | BinaryIO], tuple[np.ndarray, tuple[int, int]]]  # -> uint8 (C, h, w), own (width, height)
PixelShape = Callable[[tuple[int, int]], tuple[int, int, int]]  # own (width, height) -> the (C, h, w) that Read gives


def check_pictures(
    pictures: Sequence[Path | BinaryIO],
    names: Sequence[str],
    stamps: Sequence[str | None],
    *,
    read: Read,
    shape: PixelShape,
    threads: int,
    memory_limit: int,
    cache: CheckCache,
) -> list[Checked]:
    """Read every picture that the cache does not know.

    Either all usable pictures come with their pixels, or none: if they need more than memory_limit bytes together.
    """
    checks = [check and _believed(check, shape) for check in cache.load(names, stamps)]
    needed = sum(prod(shape(check.size)) for check in checks if check is not None and check.kind is None)
    keep = needed <= memory_limit
    unread = [at for at, check in enumerate(checks) if check is None or (keep and _lacks_pixels(check))]
    for at, check in zip(unread, _read_all(pictures, unread, read, threads), strict=True):
        needed += len(check.pixels or b"") if checks[at] is None else 0
        if keep and needed > memory_limit:
            keep = False
            checks = [known and known._replace(pixels=None) for known in checks]
        checks[at] = check if keep else check._replace(pixels=None)
    if not keep:
        checks = [check._replace(pixels=None) for check in checks]
    if unread:
        cache.store(names, stamps, checks, [at for at in unread if checks[at].kind != UNREADABLE])
    return checks


def _lacks_pixels(check: Checked) -> bool:
    return check.kind is None and check.pixels is None


def _believed(check: Checked, shape: PixelShape) -> Checked:
    """A cached check, without pixels that cannot be the picture's."""
    fits = check.pixels is not None and check.kind is None and len(check.pixels) == prod(shape(check.size))
    return check if fits else check._replace(pixels=None)


def _read_all(
    pictures: Sequence[Path | BinaryIO], places: Sequence[int], read: Read, threads: int
) -> Iterator[Checked]:
    """Read the pictures at these places, in their order, with a progress bar once it takes seconds."""
    waiting: deque = deque()
    main = os.environ.get("RANK", "0") == "0"
    bar = tqdm(total=len(places), desc="reading pictures", leave=False, disable=None if main else True, delay=2)
    with bar, ThreadPoolExecutor(threads) as pool:
        for at in places:
            # taken here, not in the thread: a data set's table is not made for several at once
            waiting.append(pool.submit(_check, _take(pictures, at), read))
            if len(waiting) >= IN_FLIGHT * threads:
                yield waiting.popleft().result()
                bar.update()
        while waiting:
            yield waiting.popleft().result()
            bar.update()


def _take(pictures: Sequence[Path | BinaryIO], at: int) -> Path | BinaryIO | ImageError:
    try:
        return pictures[at]
    except ImageError as error:
        return error


def _check(picture: Path | BinaryIO | ImageError, read: Read) -> Checked:
    try:
        if isinstance(picture, ImageError):
            raise picture
        pixels, size = read(picture)
    except ImageError as error:
        return Checked((0, 0), error.kind, error.reason, None)
    return Checked(size, None, None, pixels.tobytes())


class ReplacedPictures:
    """Counts pictures that broke during training and were replaced by others. One per process, of its own samples."""

    def __init__(self) -> None:
        self.replaced = self.seen = 0

    def add(self, replaced: int, seen: int) -> None:
        """Raises DataError once more than 5 % of the pictures seen were replaced."""
        self.replaced += replaced
        self.seen += seen
        if self.seen >= FEWEST_SEEN and self.replaced > MOST_REPLACED * self.seen:
            raise DataError(
                f"{self.replaced} of {self.seen} pictures could not be read any more during training, over "
                f"{MOST_REPLACED:.0%}: is their disk still there?"
            )

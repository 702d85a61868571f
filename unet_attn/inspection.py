"""What a data set holds and what training would see of it, found out before any training.

Everything comes from the code that training uses: the same check, the same items, the same tokenizer.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from unet_attn.data import CaptionedImages, DataError, DataOptions
from unet_attn.faults import Fault, counted, one_line

THUMB = 16  # side of the pictures that are compared
SAME = 0.995  # correlation of thumbs from which two pictures are near duplicates; a JPEG of a PNG has more
FLAT = 4.0  # of 255: contrast below this is no structure, and counts less
MOST_COMPARED = 30_000  # pictures: every one with every other
AT_ONCE = 1024

MakeTokenizer = Callable[[list[str]], PreTrainedTokenizerBase]


@dataclass
class Captions:
    """The captions of a data set as the text encoder gets them; lengths in tokens, special ones included."""

    count: int
    distinct: int
    pictures_without: int
    pictures_with_several: int
    lengths: list[int]
    limit: int
    words: list[tuple[str, int]]

    @property
    def cut(self) -> int:
        """How many are longer than the limit."""
        return sum(length > self.limit for length in self.lengths)


@dataclass
class Inspection:
    """What is known of a data set. `problems` says why training would not start; none = it would."""

    path: str
    problems: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    images: CaptionedImages | None = None
    captions: Captions | None = None
    exact: list[list[int]] = field(default_factory=list)  # groups of pictures that are one and the same file
    near: list[list[int]] | None = field(default_factory=list)  # None: too many to compare
    sheet: list[tuple[Image.Image, str]] = field(default_factory=list)


def inspect(
    options: DataOptions,
    *,
    channels: int,
    seed: int,
    batch_size: int,
    multiple_of: int,
    make_tokenizer: MakeTokenizer | None,
    sheet_size: int,
) -> Inspection:
    """Look at a data set as a training with these options would; make_tokenizer None = a model without text.

    make_tokenizer: gives a tokenizer whose model_max_length is the most tokens that training reads.
    """
    found = Inspection(options.path)
    try:
        images = CaptionedImages(
            replace(options, on_error="skip"),
            channels=channels,
            seed=seed,
            require_captions=False,
            multiple_of=multiple_of,
        )
    except DataError as error:
        found.problems.append(str(error))
        return found
    found.images, found.faults = images, images.faults
    if options.resolution % multiple_of:
        found.problems.append(
            f"data.resolution must be a multiple of {multiple_of} for this U-Net, got {options.resolution}"
        )
    if images.faults and options.on_error == "fail":
        faults, them = counted(len(images.faults), "fault"), "it" if len(images.faults) == 1 else "them"
        found.problems.append(f"{faults}, and data.on_error is fail: mend {them}, or set data.on_error to skip")
    try:
        images.check_batch_size(batch_size)
    except DataError as error:
        found.problems.append(str(error))

    tokenizer = None
    if make_tokenizer is not None:
        texts = [caption for variants in images.captions for caption in variants]
        if not texts:
            found.problems.append(images.no_captions())
        else:
            try:
                tokenizer = make_tokenizer(texts)
                found.captions = describe_captions(images.captions, tokenizer, limit=tokenizer.model_max_length)
            except ValueError as error:
                found.problems.append(str(error))
    found.exact = same_files(images)
    found.near = near_duplicates(images, found.exact)
    found.sheet = list(islice(contact_sheet(images, tokenizer, batch_size), sheet_size))
    return found


def some_captions(captions: Sequence[Sequence[str]], most: int = 4) -> tuple[str, ...]:
    """Prompts for sample grids: the first caption of `most` pictures from all over the data, each once."""
    known = list(dict.fromkeys(variants[0] for variants in captions if variants))
    return tuple(known[:: max(1, len(known) // most)][:most])


def describe_captions(captions: list[list[str]], tokenizer: PreTrainedTokenizerBase, *, limit: int) -> Captions:
    """captions: those of each picture; limit: the most tokens that are read, special ones included."""
    texts = [caption for variants in captions for caption in variants]
    lengths = [len(ids) for ids in tokenizer(texts, truncation=False, verbose=False)["input_ids"]]
    words = Counter(word for text in texts for word in re.findall(r"[^\W_]+(?:['’][^\W_]+)*", text.lower()))
    return Captions(
        count=len(texts),
        distinct=len(set(texts)),
        pictures_without=sum(not variants for variants in captions),
        pictures_with_several=sum(len(variants) > 1 for variants in captions),
        lengths=lengths,
        limit=limit,
        words=words.most_common(40),
    )


def contact_sheet(
    images: CaptionedImages, tokenizer: PreTrainedTokenizerBase | None, batch_size: int
) -> Iterator[tuple[Image.Image, str]]:
    """What the first steps of a training see: the very tensors, as pictures, and what is left of the captions."""
    for batch in images.batches(batch_size):
        for tensor, caption in zip(batch["image"], batch["caption"], strict=True):
            yield as_picture(tensor), caption if tokenizer is None else as_tokenized(caption, tokenizer)


def as_tokenized(caption: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """A caption cut to the limit and read back from its tokens."""
    ids = tokenizer(caption, truncation=True)["input_ids"]
    return one_line(tokenizer.decode(ids, skip_special_tokens=True))


def as_picture(tensor: Tensor) -> Image.Image:
    """(C, H, W) in [-1, 1] as the 8-bit picture that it was made of."""
    pixels = ((tensor + 1) * 127.5).round().to(torch.uint8).numpy()
    return Image.fromarray(pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0)))


def same_files(images: CaptionedImages) -> list[list[int]]:
    """Groups of pictures whose files are equal, byte for byte."""
    by_length: dict[int, list[int]] = {}
    for index in range(len(images)):
        by_length.setdefault(_length(images, index), []).append(index)
    groups: dict[bytes, list[int]] = {}
    for indices in by_length.values():
        for index in indices if len(indices) > 1 else []:
            groups.setdefault(hashlib.blake2b(images.encoded(index), digest_size=16).digest(), []).append(index)
    return sorted(group for group in groups.values() if len(group) > 1)


def _length(images: CaptionedImages, index: int) -> int:
    picture = images.pictures[images.places[index]]
    return picture.stat().st_size if isinstance(picture, Path) else len(picture.getbuffer())


def near_duplicates(images: CaptionedImages, exact: list[list[int]]) -> list[list[int]] | None:
    """Groups of pictures that look the same at 16 x 16 pixels whatever their contrast, without those of one file alone.

    None if there are too many pictures to compare each with each.
    """
    if len(images) > MOST_COMPARED:
        return None
    thumbs = torch.stack([_thumb(images[index]["image"]) for index in range(len(images))])
    groups = _Groups(len(images))
    for group in exact:
        for index in group[1:]:
            groups.join(group[0], index)
    for start in range(0, len(thumbs), AT_ONCE):
        likeness = thumbs[start : start + AT_ONCE] @ thumbs.T
        for row, column in (likeness >= SAME).nonzero().tolist():
            if column > start + row:
                groups.join(start + row, column)
    known = {tuple(group) for group in exact}
    return [group for group in groups.all() if tuple(group) not in known]


def _thumb(tensor: Tensor) -> Tensor:
    """A unit vector of a picture's structure: the product of two is their correlation. tensor: (C, H, W)."""
    small = torch.nn.functional.adaptive_avg_pool2d(tensor, THUMB).flatten() * 127.5
    centred = small - small.mean()
    # the last number lets flat pictures differ from each other by their brightness, and from anything with structure
    whole = torch.cat([centred, FLAT * small.mean()[None] / 8])
    return whole / whole.norm().clamp(min=1e-6)


class _Groups:
    """Which indices were joined, directly or through others."""

    def __init__(self, size: int) -> None:
        self.parent = list(range(size))

    def root(self, index: int) -> int:
        while self.parent[index] != index:
            self.parent[index] = self.parent[self.parent[index]]
            index = self.parent[index]
        return index

    def join(self, first: int, second: int) -> None:
        low, high = sorted((self.root(first), self.root(second)))
        self.parent[high] = low

    def all(self) -> list[list[int]]:
        """Groups of two or more, each in order."""
        found: dict[int, list[int]] = {}
        for index in range(len(self.parent)):
            found.setdefault(self.root(index), []).append(index)
        return [group for group in found.values() if len(group) > 1]

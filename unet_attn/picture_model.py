"""What the judge and the captioner share: an image transformer that meets captions, how it is trained and kept.

Both see pictures of one size, learn from captioned ones, a part of which is held out, and lie in a folder as
KIND.json, model.safetensors and tokenizer/. Letters: B batch, N pictures, C channels, H W pixels.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from math import cos, pi
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol, Self

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import BatchEncoding, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from unet_attn.checkpoint import replace_files, write_json
from unet_attn.image_transformer import ImageTransformer
from unet_attn.sampler import epoch_order, sample_generator

FORMAT_VERSION = 1
KINDS = ("judge", "captioner")
WARMUP_STEPS = 50
WEIGHT_DECAY = 0.1
SHIFT = 2  # pixels by which a training picture is moved; mirrored it would be another one: "arrow left"
LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601, which Pillow's grey is as well
HELD_OUT_SHARE = 10  # one picture in so many is never trained on
FEWEST_HELD_OUT = 100
# purposes of the draws, away from those of `sampler`
HOLD_OUT, MOVE = 101, 102


class PictureSize(Protocol):
    """What every size says of the image transformer; a NamedTuple of numbers, which JSON holds."""

    image_size: int
    channels: int
    patch_size: int
    dim: int
    depth: int
    heads: int

    def _asdict(self) -> dict[str, int]: ...


class PictureModel(nn.Module):
    """An image transformer, `eye`, and a tokenizer; a subclass adds what reads or writes captions.

    kind names it in messages and its file; made_by: the command that makes one; size_type: a NamedTuple.
    record: what it was trained on and how well it did, kept with the weights.
    """

    kind: ClassVar[str]
    made_by: ClassVar[str]
    size_type: ClassVar[type[NamedTuple]]

    def __init__(self, size: PictureSize, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__()
        self.size, self.tokenizer = size, tokenizer
        self.record: dict[str, object] = {}
        self.eye = ImageTransformer(
            size.image_size,
            size.channels,
            patch_size=size.patch_size,
            dim=size.dim,
            depth=size.depth,
            heads=size.heads,
        )

    @property
    def device(self) -> torch.device:
        return self.eye.position.device

    def fitted(self, pictures: Tensor) -> Tensor:
        """Pictures (B, 1 or 3, H, W) of any size as the eye takes them: (B, channels, image_size, image_size)."""
        if pictures.shape[1] == 3 and self.size.channels == 1:
            luma = torch.tensor(LUMA, device=pictures.device, dtype=pictures.dtype)
            pictures = (pictures * luma[:, None, None]).sum(dim=1, keepdim=True)
        pictures = pictures.expand(-1, self.size.channels, -1, -1)
        side = (self.size.image_size, self.size.image_size)
        if pictures.shape[-2:] == side:
            return pictures
        return F.interpolate(pictures, size=side, mode="bicubic", antialias=True).clamp(-1, 1)

    def tokens(self, captions: Sequence[str]) -> BatchEncoding:
        """input_ids and attention_mask of B captions, filled up to the longest, on the model's device."""
        return self.tokenizer(list(captions), padding=True, truncation=True, return_tensors="pt").to(self.device)

    def save(self, folder: Path) -> None:
        """Write KIND.json, model.safetensors and tokenizer/ into a folder, each whole or not at all.

        Raises ValueError for a folder that holds something else than a model of this kind: a run has a tokenizer/ too.
        """
        if folder.is_dir() and any(folder.iterdir()) and not (folder / f"{self.kind}.json").is_file():
            raise ValueError(f"{folder} holds something else than a {self.kind}, which would be damaged: give another")

        def write(into: Path) -> None:
            about = {"format_version": FORMAT_VERSION, "size": self.size._asdict(), "record": self.record}
            write_json(into / f"{self.kind}.json", about)
            weights = {name: value.cpu().contiguous() for name, value in self.state_dict().items()}
            save_file(weights, into / "model.safetensors")
            self.tokenizer.save_pretrained(into / "tokenizer")

        folder.mkdir(parents=True, exist_ok=True)
        replace_files(folder, write)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """A saved one, in evaluation mode. Nothing in the folder is executed.

        Raises FileNotFoundError if it holds none, or one of another kind, ValueError if it cannot be read.
        """
        path = folder / f"{cls.kind}.json"
        if not path.is_file():
            others = [kind for kind in KINDS if (folder / f"{kind}.json").is_file()]
            if others:
                raise FileNotFoundError(f"{folder} holds a {others[0]}, not a {cls.kind}: {cls.made_by}")
            raise FileNotFoundError(f"{folder} holds no {cls.kind} (no {path.name}): {cls.made_by}")
        try:
            about = json.loads(path.read_text(encoding="utf-8"))
            found = about.get("format_version")
            if found != FORMAT_VERSION:
                raise ValueError(
                    f"it has format_version {found}, this release of unet-attn reads {FORMAT_VERSION}: "
                    f"install a release that reads {found}"
                )
            model = cls(cls.size_type(**about["size"]), PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer"))
            weights = load_file(folder / "model.safetensors")
            # torch would list every one of them
            if _shapes(weights) != _shapes(model.state_dict()):
                raise ValueError(f"model.safetensors holds the weights of another model than {path.name} describes")
            model.load_state_dict(weights)
            model.record = dict(about["record"])
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            ArithmeticError,  # a size of 0
            RuntimeError,
            OSError,
            SafetensorError,
        ) as error:
            raise ValueError(f"the {cls.kind} in {folder} cannot be read: {' '.join(str(error).split())}") from error
        return model.eval()


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in weights.items()}


def caption_key(caption: str) -> str:
    """What makes two captions the same: case and spacing do not, which the tokenizer drops as well."""
    return " ".join(caption.lower().split())


def split_held_out(count: int, seed: int) -> tuple[list[int], list[int]]:
    """Numbers of the pictures to train on, and of those that are held out: a tenth, but at least 100.

    They are drawn one by one, so that of two pictures that are nearly the same one may be trained on, the other not.
    Raises ValueError if that leaves fewer to train on than are held out.
    """
    held_out = max(FEWEST_HELD_OUT, count // HELD_OUT_SHARE)
    if count < 2 * held_out:
        raise ValueError(
            f"{count} captioned pictures are too few: {2 * held_out} are needed, {held_out} of them to be held out"
        )
    order = torch.randperm(count, generator=sample_generator(seed, HOLD_OUT)).tolist()
    return sorted(order[held_out:]), sorted(order[:held_out])


def train_on_pictures(
    model: PictureModel,
    pictures: Tensor,
    loss: Callable[[Tensor, list[int]], Tensor],
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
    on_step: Callable[[int, float], None] | None,
) -> None:
    """Train in place on pictures (N, C, H, W) in [-1, 1] of the model's size, each moved a little at every visit.

    loss: of pictures (B, C, H, W) and their B numbers, a scalar; on_step: called with the number of the step, from 1,
    and its loss. A batch larger than the set becomes the set.
    """
    batch_size = min(batch_size, len(pictures))
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
    per_epoch = len(pictures) // batch_size
    model.train()
    for step in range(steps):
        epoch, place = divmod(step, per_epoch)
        chosen = epoch_order(seed, epoch, len(pictures))[place * batch_size : (place + 1) * batch_size]
        value = loss(_moved(pictures[chosen], sample_generator(seed, MOVE, step)).to(model.device), chosen)

        optimizer.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if on_step is not None:
            on_step(step + 1, value.item())
    model.eval()


def _rate(step: int, steps: int) -> float:
    """Warm-up, then half a cosine down to zero."""
    return min(1.0, (step + 1) / min(WARMUP_STEPS, steps)) * 0.5 * (1 + cos(pi * step / steps))


def _moved(pictures: Tensor, generator: torch.Generator) -> Tensor:
    """Each picture shifted by up to SHIFT pixels, its edge drawn out."""
    side = pictures.shape[-1]
    padded = F.pad(pictures, (SHIFT,) * 4, mode="replicate")
    corners = torch.randint(2 * SHIFT + 1, (len(pictures), 2), generator=generator).tolist()
    moved = [each[:, top : top + side, left : left + side] for each, (top, left) in zip(padded, corners, strict=True)]
    return torch.stack(moved)

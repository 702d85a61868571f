"""A judge of one's own data: it learns from captioned pictures which caption belongs to which picture.

An image transformer and a text encoder are trained so that a picture and its caption point the same way (Radford et al.
2021, https://arxiv.org/abs/2103.00020, section 2.3). It then tells whether sampled pictures show what they were asked
for, ranks several samples of a prompt, and gives features for the distances. Letters: B batch, E embedding width.
"""

import json
from collections.abc import Callable, Sequence
from math import cos, log, pi
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from unet_attn.checkpoint import replace_files, write_json
from unet_attn.image_transformer import ImageTransformer
from unet_attn.measures import CANDIDATES, Estimate, found_among, mean_with_error
from unet_attn.sampler import epoch_order, sample_generator
from unet_attn.text_encoder import TextEncoder

FORMAT_VERSION = 1
LARGEST_SCALE = 100.0  # Radford et al. 2021, section 2.5
WARMUP_STEPS = 50
WEIGHT_DECAY = 0.1
SHIFT = 2  # pixels by which a training picture is moved; mirrored it would be another one: "arrow left"
LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601, which Pillow's grey is as well
HELD_OUT_SHARE = 10  # one picture in so many is never trained on
FEWEST_HELD_OUT = 100
# purposes of the draws, away from those of `sampler`
HOLD_OUT, MOVE = 101, 102


class JudgeSize(NamedTuple):
    """What a judge is made of. The image transformer is the textbook's smallest: 48 wide, four heads of 12."""

    image_size: int = 32
    channels: int = 3
    patch_size: int = 8  # 16 tokens at 32 px: in a CPU's minutes they learn more than the 64 of patches of 4
    dim: int = 48
    depth: int = 4
    heads: int = 4
    text_dim: int = 96
    text_depth: int = 2
    embedding_dim: int = 64


class Judge(nn.Module):
    """Maps pictures and captions to directions; the cosine between two says how well they fit.

    record: what it was trained on and how well it did, kept with the weights.
    """

    def __init__(self, size: JudgeSize, tokenizer: PreTrainedTokenizerBase) -> None:
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
        self.reader = TextEncoder(
            len(tokenizer), size.text_dim, size.text_depth, heads=4, max_length=tokenizer.model_max_length
        )
        self.from_picture = nn.Linear(size.dim, size.embedding_dim, bias=False)
        self.from_caption = nn.Linear(size.text_dim, size.embedding_dim, bias=False)
        self.log_scale = nn.Parameter(torch.tensor(log(10.0)))

    @property
    def num_features(self) -> int:
        return self.size.dim

    def features(self, pictures: Tensor) -> Tensor:
        """What it sees in pictures before it thinks of captions, for the distances.

        pictures: (B, 1 or 3, H, W) in [-1, 1] of any size. Returns (B, dim).
        """
        return self.eye(self._fitted(pictures)).mean(dim=1)

    def picture_embeddings(self, pictures: Tensor) -> Tensor:
        """pictures: (B, 1 or 3, H, W) in [-1, 1] of any size. Returns (B, E) of length 1."""
        return F.normalize(self.from_picture(self.features(pictures)), dim=-1)

    def caption_embeddings(self, captions: Sequence[str]) -> Tensor:
        """Returns (B, E) of length 1."""
        tokens = self.tokenizer(list(captions), padding=True, truncation=True, return_tensors="pt")
        device = self.log_scale.device
        output = self.reader(tokens.input_ids.to(device), tokens.attention_mask.to(device))
        return F.normalize(self.from_caption(output.pooler_output), dim=-1)

    def _fitted(self, pictures: Tensor) -> Tensor:
        if pictures.shape[1] == 3 and self.size.channels == 1:
            luma = torch.tensor(LUMA, device=pictures.device, dtype=pictures.dtype)
            pictures = (pictures * luma[:, None, None]).sum(dim=1, keepdim=True)
        pictures = pictures.expand(-1, self.size.channels, -1, -1)
        side = (self.size.image_size, self.size.image_size)
        if pictures.shape[-2:] == side:
            return pictures
        return F.interpolate(pictures, size=side, mode="bicubic", antialias=True).clamp(-1, 1)

    def save(self, folder: Path) -> None:
        """Write judge.json, model.safetensors and tokenizer/ into a folder, each whole or not at all."""

        def write(into: Path) -> None:
            about = {"format_version": FORMAT_VERSION, "size": self.size._asdict(), "record": self.record}
            write_json(into / "judge.json", about)
            weights = {name: value.cpu().contiguous() for name, value in self.state_dict().items()}
            save_file(weights, into / "model.safetensors")
            self.tokenizer.save_pretrained(into / "tokenizer")

        folder.mkdir(parents=True, exist_ok=True)
        replace_files(folder, write)

    @classmethod
    def load(cls, folder: Path) -> "Judge":
        """A saved judge, in evaluation mode. Nothing in the folder is executed.

        Raises FileNotFoundError if it holds none, ValueError if it cannot be read.
        """
        path = folder / "judge.json"
        if not path.is_file():
            raise FileNotFoundError(f"{folder} holds no judge (no judge.json): train one with scripts/train_judge.py")
        try:
            about = json.loads(path.read_text(encoding="utf-8"))
            found = about.get("format_version")
            if found != FORMAT_VERSION:
                raise ValueError(
                    f"it has format_version {found}, this release of unet-attn reads {FORMAT_VERSION}: "
                    f"install a release that reads {found}"
                )
            judge = cls(JudgeSize(**about["size"]), PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer"))
            judge.load_state_dict(load_file(folder / "model.safetensors"))
        except (ValueError, KeyError, TypeError, RuntimeError, OSError, SafetensorError) as error:
            raise ValueError(f"the judge in {folder} cannot be read: {' '.join(str(error).split())}") from error
        judge.record = about["record"]
        return judge.eval()


class JudgeFeatures(nn.Module):
    """The judge as a feature network for `evaluation.extract_features`."""

    def __init__(self, judge: Judge) -> None:
        super().__init__()
        self.judge = judge
        self.num_features = judge.num_features

    def forward(self, pictures: Tensor) -> Tensor:
        return self.judge.features(pictures)


def caption_key(caption: str) -> str:
    """What makes two captions the same: case and spacing do not, which the tokenizer drops as well."""
    return " ".join(caption.lower().split())


def contrastive_loss(similarity: Tensor, captions: Sequence[str]) -> Tensor:
    """Cross-entropy of finding a picture's caption in the batch, and a caption's picture; Radford 2021, figure 3.

    similarity: (B, B) of picture row and caption column, scaled. Where two pictures of a batch have the same caption,
    each is left out of the other's choice: to tell them apart would be to learn what is not so. Returns a scalar.
    """
    numbers = {key: number for number, key in enumerate(dict.fromkeys(map(caption_key, captions)))}
    ids = torch.tensor([numbers[caption_key(caption)] for caption in captions], device=similarity.device)
    twins = (ids[:, None] == ids[None, :]).fill_diagonal_(False)
    similarity = similarity.masked_fill(twins, -torch.inf)
    target = torch.arange(len(captions), device=similarity.device)
    return (F.cross_entropy(similarity, target) + F.cross_entropy(similarity.T, target)) / 2


def split_held_out(count: int, seed: int) -> tuple[list[int], list[int]]:
    """Numbers of the pictures to train on, and of those that are held out: a tenth, but at least 100.

    Raises ValueError if that leaves fewer to train on than are held out.
    """
    held_out = max(FEWEST_HELD_OUT, count // HELD_OUT_SHARE)
    if count < 2 * held_out:
        raise ValueError(f"{count} captioned pictures are too few to train a judge: {2 * held_out} are needed")
    order = torch.randperm(count, generator=sample_generator(seed, HOLD_OUT)).tolist()
    return sorted(order[held_out:]), sorted(order[:held_out])


def train_judge(
    judge: Judge,
    pictures: Tensor,
    captions: Sequence[str],
    *,
    steps: int,
    batch_size: int = 128,
    learning_rate: float = 1e-3,
    seed: int = 0,
    on_step: Callable[[int, float], None] | None = None,
) -> None:
    """Train in place on pictures (N, C, H, W) in [-1, 1] of the judge's size, and their N captions.

    on_step: called with the number of the step, from 1, and its loss. A batch larger than the set becomes the set.
    """
    batch_size = min(batch_size, len(pictures))
    optimizer = torch.optim.AdamW(judge.parameters(), lr=learning_rate, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
    per_epoch = len(pictures) // batch_size
    judge.train()
    for step in range(steps):
        epoch, place = divmod(step, per_epoch)
        chosen = epoch_order(seed, epoch, len(pictures))[place * batch_size : (place + 1) * batch_size]
        batch = _moved(pictures[chosen], sample_generator(seed, MOVE, step)).to(judge.log_scale.device)
        texts = [captions[index] for index in chosen]

        scale = judge.log_scale.exp().clamp(max=LARGEST_SCALE)
        similarity = scale * judge.picture_embeddings(batch) @ judge.caption_embeddings(texts).T
        loss = contrastive_loss(similarity, texts)

        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(judge.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if on_step is not None:
            on_step(step + 1, loss.item())
    judge.eval()


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


@torch.inference_mode()
def similarities(judge: Judge, pictures: Tensor, captions: Sequence[str], *, batch_size: int = 256) -> Tensor:
    """The cosine of every picture (N, C, H, W) with every one of M captions: (N, M) on the CPU."""
    device = judge.log_scale.device
    seen = [judge.picture_embeddings(batch.to(device)) for batch in pictures.split(batch_size)]
    read = [judge.caption_embeddings(captions[at : at + batch_size]) for at in range(0, len(captions), batch_size)]
    return (torch.cat(seen) @ torch.cat(read).T).cpu()


def caption_agreement(
    judge: Judge,
    pictures: Tensor,
    captions: Sequence[str],
    known: Sequence[str],
    *,
    candidates: int = CANDIDATES,
    seed: int = 0,
) -> Estimate:
    """The share of pictures (N, C, H, W) whose own caption the judge finds among others; chance is 1 in `candidates`.

    captions: N; known: the captions from which the others are drawn. Raises ValueError if there are too few of them.
    """
    distinct = list(dict.fromkeys(map(caption_key, [*known, *captions])))
    place = {key: number for number, key in enumerate(distinct)}
    own = torch.tensor([place[caption_key(caption)] for caption in captions])
    found = found_among(similarities(judge, pictures, distinct), own, candidates=candidates, seed=seed)
    return mean_with_error(found, seed=seed)


def best_first(judge: Judge, pictures: Tensor, caption: str) -> list[int]:
    """The numbers of several pictures (N, C, H, W) of one caption, the one that fits it best first."""
    return similarities(judge, pictures, [caption])[:, 0].argsort(descending=True, stable=True).tolist()

"""A judge of one's own data: it learns from captioned pictures which caption belongs to which picture.

An image transformer and a text encoder are trained so that a picture and its caption point the same way (Radford et al.
2021, https://arxiv.org/abs/2103.00020, section 2.3). It then tells whether sampled pictures show what they were asked
for, ranks several samples of a prompt, and gives features for the distances. Letters: B batch, E embedding width.
"""

from collections.abc import Callable, Sequence
from math import log
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from unet_attn.measures import CANDIDATES, Estimate, found_among, mean_with_error
from unet_attn.picture_model import PictureModel, caption_key, train_on_pictures
from unet_attn.text_encoder import TextEncoder

LARGEST_SCALE = 100.0  # Radford et al. 2021, section 2.5


class JudgeSize(NamedTuple):
    """What a judge is made of. The image transformer is the textbook's smallest: 48 wide, four heads of 12."""

    image_size: int = 32
    channels: int = 3
    # 16 tokens at 32 px: in the same 57 seconds of a core it learns to find 0.60 of held-out icons' captions among 100,
    # with the 64 tokens of patches of 4, each step of which takes 2.6 times as long, 0.18
    patch_size: int = 8
    dim: int = 48
    depth: int = 4
    heads: int = 4
    text_dim: int = 96
    text_depth: int = 2
    embedding_dim: int = 64


class Judge(PictureModel):
    """Maps pictures and captions to directions; the cosine between two says how well they fit."""

    kind = "judge"
    made_by = "train one with scripts/train_judge.py"
    size_type = JudgeSize

    def __init__(self, size: JudgeSize, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(size, tokenizer)
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
        return self.eye(self.fitted(pictures)).mean(dim=1)

    def picture_embeddings(self, pictures: Tensor) -> Tensor:
        """pictures: (B, 1 or 3, H, W) in [-1, 1] of any size. Returns (B, E) of length 1."""
        return F.normalize(self.from_picture(self.features(pictures)), dim=-1)

    def caption_embeddings(self, captions: Sequence[str]) -> Tensor:
        """Returns (B, E) of length 1."""
        tokens = self.tokens(captions)
        output = self.reader(tokens.input_ids, tokens.attention_mask)
        return F.normalize(self.from_caption(output.pooler_output), dim=-1)


class JudgeFeatures(nn.Module):
    """The judge as a feature network for `extractors.extract_features`."""

    def __init__(self, judge: Judge) -> None:
        super().__init__()
        self.judge = judge
        self.num_features = judge.num_features

    def forward(self, pictures: Tensor) -> Tensor:
        return self.judge.features(pictures)


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

    def loss(batch: Tensor, chosen: list[int]) -> Tensor:
        texts = [captions[index] for index in chosen]
        scale = judge.log_scale.exp().clamp(max=LARGEST_SCALE)
        return contrastive_loss(scale * judge.picture_embeddings(batch) @ judge.caption_embeddings(texts).T, texts)

    train_on_pictures(
        judge,
        pictures,
        loss,
        steps=steps,
        batch_size=batch_size,
        learning_rate=learning_rate,
        seed=seed,
        on_step=on_step,
    )


@torch.inference_mode()
def similarities(judge: Judge, pictures: Tensor, captions: Sequence[str], *, batch_size: int = 256) -> Tensor:
    """The cosine of every picture (N, C, H, W) with every one of M captions: (N, M) on the CPU."""
    seen = [judge.picture_embeddings(batch.to(judge.device)) for batch in pictures.split(batch_size)]
    read = [judge.caption_embeddings(captions[at : at + batch_size]) for at in range(0, len(captions), batch_size)]
    return (torch.cat(seen) @ torch.cat(read).T).cpu()


def captions_found(
    judge: Judge,
    pictures: Tensor,
    captions: Sequence[str],
    known: Sequence[str],
    *,
    candidates: int = CANDIDATES,
    seed: int = 0,
) -> Tensor:
    """Of which pictures (N, C, H, W) the judge finds the own caption among others: (N,) bool.

    captions: N; known: the captions from which the others are drawn. Raises ValueError if there are too few of them.
    """
    distinct = list(dict.fromkeys(map(caption_key, [*known, *captions])))
    place = {key: number for number, key in enumerate(distinct)}
    own = torch.tensor([place[caption_key(caption)] for caption in captions])
    return found_among(similarities(judge, pictures, distinct), own, candidates=candidates, seed=seed)


def caption_agreement(
    judge: Judge,
    pictures: Tensor,
    captions: Sequence[str],
    known: Sequence[str],
    *,
    candidates: int = CANDIDATES,
    seed: int = 0,
) -> Estimate:
    """The share of `captions_found`, whose arguments these are; by chance it is 1 in `candidates`."""
    return mean_with_error(
        captions_found(judge, pictures, captions, known, candidates=candidates, seed=seed), seed=seed
    )


def best_first(judge: Judge, pictures: Tensor, caption: str) -> list[int]:
    """The numbers of several pictures (N, C, H, W) of one caption, the one that fits it best first."""
    return similarities(judge, pictures, [caption])[:, 0].argsort(descending=True, stable=True).tolist()

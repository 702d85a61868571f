"""A captioner of one's own data: it learns from captioned pictures, and writes captions for those that have none.

An image transformer sees the picture, and a decoder writes the caption token by token: each layer looks back at what
is written (masked self-attention) and at the picture's patches (cross-attention). Letters: B batch, N patches, T
tokens, D width, V vocabulary, M pictures of a set.
Sources: the decoder, Vaswani et al. 2017, https://arxiv.org/abs/1706.03762; attending to the parts of a picture while
its caption is written, Xu et al. 2015, https://arxiv.org/abs/1502.03044.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from unet_attn.measures import Estimate, mean_with_error
from unet_attn.picture_model import PictureModel, caption_key, train_on_pictures
from unet_attn.transformer import DecoderLayer, TokenEmbedding, causal_mask


class CaptionerSize(NamedTuple):
    """What a captioner is made of; eye and writer have the same width."""

    image_size: int = 32
    channels: int = 3
    patch_size: int = 8
    dim: int = 64
    depth: int = 4  # of the image transformer
    heads: int = 4
    writer_depth: int = 2


class Proposal(NamedTuple):
    """A caption for a picture, and how probable the captioner thinks it is, to the word; in [0, 1]."""

    caption: str
    confidence: float


class Captioner(PictureModel):
    """Writes the captions of pictures, the next token from what it sees and what it has written."""

    kind = "captioner"
    made_by = "train one with scripts/caption.py DIR --save FOLDER"
    size_type = CaptionerSize

    def __init__(self, size: CaptionerSize, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(size, tokenizer)
        self.embedding = TokenEmbedding(len(tokenizer), size.dim, tokenizer.model_max_length)
        self.writer = nn.ModuleList(DecoderLayer(size.dim, size.heads, 4 * size.dim) for _ in range(size.writer_depth))
        self.norm = nn.LayerNorm(size.dim)
        self.to_logits = nn.Linear(size.dim, len(tokenizer))

    def forward(self, pictures: Tensor, ids: Tensor) -> Tensor:
        """The logits of each next token, (B, T, V).

        pictures: (B, 1 or 3, H, W) in [-1, 1] of any size; ids: (B, T), `<bos>` first.
        """
        return self.write(self.eye(self.fitted(pictures)), ids)

    def write(self, seen: Tensor, ids: Tensor) -> Tensor:
        """The same from what the eye has seen. seen: (B, N, D); ids: (B, T). Returns (B, T, V)."""
        x = self.embedding(ids)
        past = causal_mask(ids.shape[1], ids.device)
        for layer in self.writer:
            x = layer(x, seen, tgt_mask=past)
        return self.to_logits(self.norm(x))

    @torch.inference_mode()
    def generate(self, pictures: Tensor) -> list[Proposal]:
        """A caption for each picture: the most probable token at each place, until `<eos>` or the longest length.

        pictures: (B, 1 or 3, H, W) in [-1, 1] of any size, B at least 1. The confidence is the product of the tokens'
        probabilities, `<eos>` among them. A beam search, of 4, found no better captions of icons.
        """
        seen = self.eye(self.fitted(pictures.to(self.device)))
        pad, bos, eos = (getattr(self.tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos"))
        ids = torch.full((len(seen), 1), bos, device=self.device)
        log_probability = torch.zeros(len(seen), device=self.device)
        ended = torch.zeros(len(seen), dtype=torch.bool, device=self.device)

        while ids.shape[1] < self.tokenizer.model_max_length and not ended.all():
            logits = self.write(seen, ids)[:, -1]
            # a caption has no start or filling within, and at least one word
            logits[:, [bos, pad, eos] if ids.shape[1] == 1 else [bos, pad]] = -torch.inf
            probability, following = logits.log_softmax(dim=-1).max(dim=-1)
            log_probability += probability.masked_fill(ended, 0.0)
            following = following.masked_fill(ended, pad)
            ids = torch.cat([ids, following[:, None]], dim=1)
            ended = ended | (following == eos)

        captions = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        confidences = log_probability.exp().tolist()
        return [Proposal(" ".join(c.split()), p) for c, p in zip(captions, confidences, strict=True)]


def train_captioner(
    captioner: Captioner,
    pictures: Tensor,
    captions: Sequence[str],
    *,
    steps: int,
    batch_size: int = 128,
    learning_rate: float = 3e-3,
    seed: int = 0,
    on_step: Callable[[int, float], None] | None = None,
) -> None:
    """Train in place on pictures (M, C, H, W) in [-1, 1] of the captioner's size, and their M captions.

    Each token is learned after the true ones before it (teacher forcing). on_step: called with the number of the step,
    from 1, and its loss. A batch larger than the set becomes the set.
    """
    pad = captioner.tokenizer.pad_token_id

    def loss(batch: Tensor, chosen: list[int]) -> Tensor:
        ids = captioner.tokens([captions[index] for index in chosen]).input_ids
        return F.cross_entropy(captioner(batch, ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), ignore_index=pad)

    train_on_pictures(
        captioner,
        pictures,
        loss,
        steps=steps,
        batch_size=batch_size,
        learning_rate=learning_rate,
        seed=seed,
        on_step=on_step,
    )


def propose(captioner: Captioner, pictures: Tensor, *, batch_size: int = 256) -> list[Proposal]:
    """A caption for each of M pictures (M, C, H, W), of which there may be none."""
    return [proposal for batch in pictures.split(batch_size) if len(batch) for proposal in captioner.generate(batch)]


@torch.inference_mode()
def token_accuracy(
    captioner: Captioner, pictures: Tensor, captions: Sequence[str], *, batch_size: int = 256, seed: int = 0
) -> Estimate:
    """The share of a caption's tokens, `<eos>` among them, that are guessed right after the true ones before them.

    pictures: (M, C, H, W); captions: M. The mean over pictures.
    """
    ids = captioner.tokens(captions).input_ids
    guessed = [
        captioner(batch.to(captioner.device), before).argmax(dim=-1)
        for batch, before in zip(pictures.split(batch_size), ids[:, :-1].split(batch_size), strict=True)
    ]
    return mean_with_error(_share_right(torch.cat(guessed), ids[:, 1:], captioner.tokenizer.pad_token_id), seed=seed)


def constant_token_accuracy(
    tokenizer: PreTrainedTokenizerBase, constant: str, captions: Sequence[str], *, seed: int = 0
) -> Estimate:
    """The same for guessing the tokens of one constant caption, each at its place, whatever the picture."""
    ids = tokenizer([constant, *captions], padding=True, truncation=True, return_tensors="pt").input_ids[:, 1:]
    return mean_with_error(_share_right(ids[:1].expand_as(ids[1:]), ids[1:], tokenizer.pad_token_id), seed=seed)


def _share_right(guessed: Tensor, ids: Tensor, pad: int) -> Tensor:
    """guessed, ids: (M, T). Returns (M,), the share of each row's tokens that is right, filling left out."""
    counted = ids != pad
    return ((guessed == ids) & counted).sum(dim=1) / counted.sum(dim=1)


def exact_match(proposed: Sequence[str], captions: Sequence[str], *, seed: int = 0) -> Estimate:
    """The share of proposed captions that are the true ones, whatever the letter case and spacing."""
    same = [caption_key(a) == caption_key(b) for a, b in zip(proposed, captions, strict=True)]
    return mean_with_error(torch.tensor(same), seed=seed)

"""Captions as the networks see them: tokens, their encoded vectors, and which tokens make up which word."""

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from diffusers import ModelMixin
from diffusers.utils import logging
from torch import Tensor
from transformers import BatchEncoding, PreTrainedTokenizerBase

SHOWN = 200  # characters of what was cut off, in a warning
logger = logging.get_logger(__name__)

UNBOUNDED = 10**6  # transformers writes 1e30 for a tokenizer whose limit is not known
# models of transformers whose first token stands at position pad_token_id + 1
POSITIONS_AFTER_PADDING = (
    "camembert",
    "data2vec-text",
    "esm",
    "ibert",
    "longformer",
    "luke",
    "markuplm",
    "mpnet",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
)


def encode_captions(
    captions: list[str], tokenizer: PreTrainedTokenizerBase, text_encoder: ModelMixin
) -> tuple[Tensor, Tensor]:
    """Encode captions for the U-Net; the empty caption stands for no caption (guidance, caption dropout).

    captions: B strings, padded to the longest and cut to what tokenizer and encoder hold, keeping the end token.
    Returns (B, N, D) vectors, through which gradients flow, and their mask (B, N) bool, True = real token.
    """
    tokens = tokenize(captions, tokenizer, text_encoder).to(text_encoder.device)
    output = text_encoder(tokens.input_ids, tokens.attention_mask)
    return output.last_hidden_state, tokens.attention_mask.bool()


def tokenize(
    captions: list[str], tokenizer: PreTrainedTokenizerBase, text_encoder: ModelMixin, *, with_places: bool = False
) -> BatchEncoding:
    """The captions' tokens, (B, N) each; with_places adds each token's place in its caption, and which are special."""
    limit = caption_limit(tokenizer, text_encoder)
    bounds = {"truncation": True, "max_length": limit} if limit < UNBOUNDED else {}
    places = {"return_offsets_mapping": True, "return_special_tokens_mask": True} if with_places else {}
    asked = {"return_tensors": "pt", "padding_side": "right", **_as_text(tokenizer), **places}
    tokens = tokenizer(captions, padding=True, **bounds, **asked)
    if not tokens.input_ids.shape[1]:  # empty captions, of which no special token remains: a network needs one place
        tokens = tokenizer(captions, padding="max_length", max_length=1, **asked)
    return tokens


def _as_text(tokenizer: PreTrainedTokenizerBase) -> dict[str, bool]:
    """What makes of "<eos>" in a caption the text that it is; a slow tokenizer would split a user's own tokens too."""
    return {"split_special_tokens": True} if tokenizer.is_fast else {}


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, text_encoder: ModelMixin) -> None:
    """Raise ValueError for a tokenizer whose tokens this text encoder cannot take, or no batch can be made of."""
    if tokenizer.pad_token is None:
        raise ValueError("the tokenizer has no pad_token to fill a batch up with: set one that it has, as eos_token")
    if tokenizer.truncation_side != "right":
        raise ValueError("the tokenizer's truncation_side must be 'right': a caption that is too long loses its end")
    config = text_encoder.config
    rows = config.get("vocab_size") or (config.get("model_config") or {}).get("vocab_size")
    if rows and len(tokenizer) > rows:
        raise ValueError(f"the tokenizer has {len(tokenizer)} tokens, the text encoder vectors for {rows}")


def warn_of_cuts(captions: list[str], tokenizer: PreTrainedTokenizerBase, text_encoder: ModelMixin) -> None:
    """Log, in one warning, what of the captions `encode_captions` cuts off."""
    limit = caption_limit(tokenizer, text_encoder)
    kept = limit - tokenizer.num_special_tokens_to_add()
    plain = {"add_special_tokens": False, "verbose": False, **_as_text(tokenizer)}
    tokens = tokenizer(list(dict.fromkeys(captions)), **plain).input_ids
    cut = [tokenizer.decode(each[kept:]).strip() for each in tokens if len(each) > kept]
    if cut:
        shown = "; ".join(f"'{each if len(each) <= SHOWN else each[:SHOWN] + '...'}'" for each in cut)
        logger.warning(f"only the first {kept} tokens of a prompt are read, this is cut off: {shown}")


def caption_limit(tokenizer: PreTrainedTokenizerBase, text_encoder: ModelMixin) -> int:
    """The most tokens that both hold, special ones included; UNBOUNDED or more where neither has a limit."""
    config = text_encoder.config
    limits = (config.get("max_length"), position_limit(config.get("model_config") or {}))
    return min(tokenizer.model_max_length, *(each or UNBOUNDED for each in limits))


def position_limit(model_config: Mapping[str, object]) -> int | None:
    """The most tokens that a text model of transformers has positions for; None where it has no table of them.

    model_config: its configuration, as `to_dict()` gives it.
    """
    rows = model_config.get("max_position_embeddings") or model_config.get("n_positions")
    if rows and model_config.get("model_type") in POSITIONS_AFTER_PADDING:
        rows -= (model_config.get("pad_token_id") or 0) + 1
    return rows


class Words(NamedTuple):
    """The words of one caption that its tokens hold.

    names: W words as written; tokens: (W, N) float32, 1 where the token belongs to the word, 0 elsewhere, as for the
    special tokens and padding.
    """

    names: tuple[str, ...]
    tokens: Tensor


def caption_words(captions: list[str], tokenizer: PreTrainedTokenizerBase, text_encoder: ModelMixin) -> list[Words]:
    """The words of each caption, over the tokens that `encode_captions` makes of the same list.

    A word is what stands between spaces. A word that was cut off as a whole is left out.
    Raises ValueError for a tokenizer that does not know where in the caption its tokens come from.
    """
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} cannot tell which token belongs to which word: use a fast one")
    encoding = tokenize(captions, tokenizer, text_encoder, with_places=True)
    places, special = encoding.offset_mapping.tolist(), encoding.special_tokens_mask.tolist()
    return [_words(*each) for each in zip(captions, places, special, strict=True)]


def _words(caption: str, places: list[list[int]], special: list[int]) -> Words:
    """places: N pairs of first and one past the last character; special: N flags, set for padding as well."""
    words = list(re.finditer(r"\S+", caption))
    tokens = torch.zeros(len(words), len(places))
    for token, (start, _) in enumerate(places):
        if special[token]:
            continue
        # the first word that ends behind the token's start, so that a space before a word is the word's
        row = next((row for row, word in enumerate(words) if word.end() > start), None)
        if row is not None:
            tokens[row, token] = 1.0
    kept = tokens.any(dim=1)
    names = tuple(word.group() for word, keep in zip(words, kept.tolist(), strict=True) if keep)
    return Words(names, tokens[kept])

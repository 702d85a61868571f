"""Transformer layers over `attention.MultiHeadAttention`, and a sequence-to-sequence Transformer made of them.

Layers normalise before each sub-layer (pre-norm), so a stack needs one more norm at its end.
Letters: B batch, N tokens (S source, T target), D width, V vocabulary.
Masks are bool or 0/1, non-zero = may be attended.
Sources: Vaswani et al. 2017, https://arxiv.org/abs/1706.03762; pre-norm: Xiong et al. 2020, https://arxiv.org/abs/2002.04745.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unet_attn.attention import MultiHeadAttention


def causal_mask(n: int, device: torch.device | None = None) -> Tensor:
    """(1, n, n) bool: position i may attend to positions 0..i."""
    return torch.ones(1, n, n, dtype=torch.bool, device=device).tril()


def masked_mean(tokens: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over the real tokens, 0 where there is none. tokens: (B, N, D); mask: (B, N). Returns (B, D).

    Raises ValueError if the mask does not fit; one row of it may serve the whole batch.
    """
    if mask is None:
        return tokens.mean(dim=1) if tokens.shape[1] else tokens.sum(dim=1)
    batch, length, _ = tokens.shape
    if mask.ndim != 2 or mask.shape[0] not in (1, batch) or mask.shape[1] != length:
        raise ValueError(f"mask must be {(batch, length)}, as there are tokens, got shape {tuple(mask.shape)}")
    mask = (mask != 0).unsqueeze(-1)
    # the sum passes what float16 holds long before the mean does
    total = tokens.masked_fill(~mask, 0.0).sum(dim=1, dtype=torch.promote_types(tokens.dtype, torch.float32))
    return (total / mask.sum(dim=1).clamp(min=1)).to(tokens.dtype)


class TokenEmbedding(nn.Module):
    """Token ids to vectors: a learned vector per token plus a learned vector per position."""

    def __init__(self, vocab_size: int, dim: int, max_length: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab_size, dim)
        self.position = nn.Embedding(max_length, dim)
        # at the default of N(0, 1) the residual stream would start far larger than what the layers add to it
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=dim**-0.5)

    def forward(self, ids: Tensor) -> Tensor:
        """ids: (B, N) integers. Returns (B, N, D). Raises ValueError if N exceeds max_length."""
        length, limit = ids.shape[1], self.position.num_embeddings
        if length > limit:
            raise ValueError(f"a sequence of {length} tokens is longer than max_length {limit}; truncate it")
        return self.token(ids) + self.position.weight[:length]


class FeedForward(nn.Module):
    """Two linear layers with a GELU between, on each token alone."""

    def __init__(self, dim: int, ff_dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.expand = nn.Linear(dim, ff_dim)
        self.dropout = nn.Dropout(dropout)
        self.contract = nn.Linear(ff_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., D). Returns (..., D)."""
        return self.contract(self.dropout(F.gelu(self.expand(x))))


class EncoderLayer(nn.Module):
    """Self-attention, then feed-forward, each with its norm and residual."""

    def __init__(self, dim: int, heads: int, ff_dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = MultiHeadAttention(dim, heads, dropout=dropout)
        self.feed_forward_norm = nn.LayerNorm(dim)
        self.feed_forward = FeedForward(dim, ff_dim, dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x: (B, N, D); mask: (B, N), (B, N, N) or (B, heads, N, N). Returns (B, N, D)."""
        normed = self.attention_norm(x)
        x = x + self.dropout(self.attention(normed, normed, normed, mask))

        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class DecoderLayer(nn.Module):
    """Masked self-attention, cross-attention over the encoder's output, feed-forward; each with norm and residual."""

    def __init__(self, dim: int, heads: int, ff_dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.self_attention_norm = nn.LayerNorm(dim)
        self.self_attention = MultiHeadAttention(dim, heads, dropout=dropout)
        self.cross_attention_norm = nn.LayerNorm(dim)
        self.cross_attention = MultiHeadAttention(dim, heads, dropout=dropout)
        self.feed_forward_norm = nn.LayerNorm(dim)
        self.feed_forward = FeedForward(dim, ff_dim, dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, memory: Tensor, src_mask: Tensor | None = None, tgt_mask: Tensor | None = None
    ) -> Tensor:
        """x: (B, T, D); memory: (B, S, D), the encoder's output. Returns (B, T, D).

        src_mask: which tokens of memory may be attended, (B, S) or (B, T, S);
        tgt_mask: which tokens of x, (B, T) or (B, T, T): pass `causal_mask(T)` to keep the future unseen.
        """
        normed = self.self_attention_norm(x)
        x = x + self.dropout(self.self_attention(normed, normed, normed, tgt_mask))

        x = x + self.dropout(self.cross_attention(self.cross_attention_norm(x), memory, memory, src_mask))

        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class Transformer(nn.Module):
    """An encoder and a decoder for sequence-to-sequence work such as translation.

    depth: layers of each; the feed-forward layers are 4 x dim wide; sequences are at most max_length tokens.
    """

    def __init__(
        self,
        source_vocab_size: int,
        target_vocab_size: int,
        dim: int,
        depth: int,
        heads: int,
        max_length: int,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.source_embedding = TokenEmbedding(source_vocab_size, dim, max_length)
        self.encoder = nn.ModuleList(EncoderLayer(dim, heads, 4 * dim, dropout) for _ in range(depth))
        self.encoder_norm = nn.LayerNorm(dim)

        self.target_embedding = TokenEmbedding(target_vocab_size, dim, max_length)
        self.decoder = nn.ModuleList(DecoderLayer(dim, heads, 4 * dim, dropout) for _ in range(depth))
        self.decoder_norm = nn.LayerNorm(dim)
        self.to_logits = nn.Linear(dim, target_vocab_size)

    def encode(self, source: Tensor, src_mask: Tensor | None = None) -> Tensor:
        """source: (B, S) ids; src_mask: (B, S). Returns the memory, (B, S, D)."""
        x = self.source_embedding(source)
        for layer in self.encoder:
            x = layer(x, src_mask)
        return self.encoder_norm(x)

    def decode(self, target: Tensor, memory: Tensor, src_mask: Tensor | None = None) -> Tensor:
        """target: (B, T) ids; memory: (B, S, D); src_mask: (B, S). Returns logits of the next token, (B, T, V)."""
        x = self.target_embedding(target)
        tgt_mask = causal_mask(target.shape[1], target.device)
        for layer in self.decoder:
            x = layer(x, memory, src_mask, tgt_mask)
        return self.to_logits(self.decoder_norm(x))

    def forward(self, source: Tensor, target: Tensor, src_mask: Tensor | None = None) -> Tensor:
        """source: (B, S) ids; target: (B, T) ids, from the start token on; src_mask: (B, S). Returns (B, T, V)."""
        return self.decode(target, self.encode(source, src_mask), src_mask)

    @torch.no_grad()
    def generate(
        self, source: Tensor, *, start_id: int, end_id: int, max_length: int, src_mask: Tensor | None = None
    ) -> Tensor:
        """Greedy decoding: the most probable token at each position, until every row has ended.

        source: (B, S) ids. Returns (B, T) ids with T <= max_length, beginning with start_id; a row that has ended is
        filled up with end_id. Call eval() first where the model has dropout.
        """
        memory = self.encode(source, src_mask)
        target = source.new_full((source.shape[0], 1), start_id)
        ended = torch.zeros(source.shape[0], dtype=torch.bool, device=source.device)

        while target.shape[1] < max_length and not ended.all():
            following = self.decode(target, memory, src_mask)[:, -1].argmax(dim=-1)
            following = following.masked_fill(ended, end_id)
            target = torch.cat([target, following[:, None]], dim=1)
            ended = ended | (following == end_id)
        return target

"""Query/key/value attention, and every module that owns its projections.

This file needs torch and einops only and imports nothing of the project: copy it into any network.

Letters: B batch, N tokens (Nq queries, Nk keys), D width, d width of one head, C channels, H W the map.
Masks are bool or 0/1 numbers, non-zero (NaN too) = may be attended. A query with nothing to attend to gives output 0
and weights 0, with finite gradients. NaN in a key or value reaches the queries that may attend to it and no other,
neither output nor gradient (`is_causal` alone does not hide it: give a mask where NaN may lie ahead).
Source: Vaswani et al. 2017, "Attention Is All You Need", https://arxiv.org/abs/1706.03762.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: Callable[[Tensor], Tensor] | None = None,
    *,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The textbook form, which shows its weights: softmax(Q K^T / sqrt(d)) V  (Vaswani et al. 2017, eq. 1).

    query: (..., Nq, d); key: (..., Nk, d); value: (..., Nk, dv); mask: broadcasts to (..., Nq, Nk);
    dropout: a callable on the weights; bias: float, broadcasts to (..., Nq, Nk), added to the scores, never a mask.
    Returns output (..., Nq, dv) and the weights (..., Nq, Nk) that made it, in value's dtype, which may be a half one:
    between them all is float32, under autocast too. Raises ValueError if mask, bias or value does not fit.
    """
    _check_lengths(key, value)
    spoilt = None
    if mask is not None:
        mask = _checked_mask(mask, _shape_of_scores(query, key))
        key, value, spoilt = _hide_masked_keys(key, value, mask)

    dtype = value.dtype
    # float16 ends at 65504, which a score passes soon, and so does a gradient summed over a head
    with _no_autocast(query.device.type):
        query, key, value = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (query, key, value))
        scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)
        hidden = None if mask is None else ~mask
        if bias is not None:
            _check_broadcast("bias", bias, scores.shape)
            scores = scores + _levelled(bias, hidden)
            hidden = scores.isneginf().all(dim=-1, keepdim=True)  # a softmax over that is NaN
        if hidden is not None:
            scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        weights = scores.softmax(dim=-1)
        if hidden is not None:
            weights = weights.masked_fill(hidden, 0.0)
        if dropout is not None:
            weights = dropout(weights)
        output = weights @ value

    if spoilt is not None:
        output, weights = (x.masked_fill(spoilt, float("nan")) for x in (output, weights))
    return output.to(dtype), weights.to(dtype)


def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    heads: int,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
) -> Tensor:
    """The fused form: the same result as `attention` head by head, through torch's memory-saving kernels.

    query: (B, Nq, heads*d); key, value: (B, Nk, heads*d); mask: (B, Nk), (B, Nq, Nk) or (B, heads, Nq, Nk), where a
    size of 1 broadcasts; bias: float, broadcasts to (B, heads, Nq, Nk), added to the scores, never a mask;
    is_causal: query i attends to keys 0..i; dropout_p: probability of dropping a weight. Returns (B, Nq, heads*d).
    Raises ValueError if widths or batches differ, `heads` does not divide them, or mask, bias or value does not fit.
    """
    check_equal("width", -1, query, key, value)
    check_equal("batch size", 0, query, key, value)
    head_width(query.shape[-1], heads)
    query, key, value = (split_heads(x, heads) for x in (query, key, value))
    return merge_heads(_fused(query, key, value, mask, bias, is_causal, dropout_p))


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, N, heads*d) -> (B, heads, N, d)."""
    return rearrange(x, "b n (heads d) -> b heads n d", heads=heads)


def merge_heads(x: Tensor) -> Tensor:
    """(B, heads, N, d) -> (B, N, heads*d)."""
    return rearrange(x, "b heads n d -> b n (heads d)")


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
) -> Tensor:
    """multi_head_attention over heads that are split already: (B, heads, Nq, d) against (B, heads, Nk, d)."""
    _check_lengths(key, value)
    attended = spoilt = None
    if mask is not None:
        mask = _four_axes(mask, _shape_of_scores(query, key))
        if is_causal:
            mask, is_causal = mask & _lower_triangle(query, key), False
        key, value, spoilt = _hide_masked_keys(key, value, mask)
        # a row without any key would be softmax over nothing: let it attend to all, and take its output away below
        attended = mask.any(dim=-1, keepdim=True)
        mask = mask | ~attended
    if bias is not None:
        _check_broadcast("bias", bias, _shape_of_scores(query, key))
        if is_causal:
            mask, is_causal = _lower_triangle(query, key), False
        mask = _levelled(bias, None if mask is None else ~mask).to(query.dtype)
    if mask is None and key.is_cpu and not torch.compiler.is_compiling() and 0 < key.shape[-2] < 16:
        # of so few keys torch's kernel makes a NaN score finite, but not under a mask
        mask, is_causal = _lower_triangle(query, key) | (not is_causal), False

    # a head whose last axis is strided falls off the fast kernels without a word
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    output = F.scaled_dot_product_attention(query, key, value, mask, dropout_p, is_causal)
    if attended is not None:
        output = output.masked_fill(~attended, 0.0)
    return output if spoilt is None else output.masked_fill(spoilt, float("nan"))


def _levelled(bias: Tensor, hidden: Tensor | None) -> Tensor:
    """-inf where hidden, and less the largest of its row, which a softmax does not see: -1e9 would hide the scores."""
    if bias.dtype == torch.bool:
        raise ValueError("bias is added to the scores, so it must be numbers: what may be attended is a mask")
    bias = torch.atleast_2d(bias) if hidden is None else bias.masked_fill(hidden, float("-inf"))
    if bias.shape[-1]:
        bias = bias - bias.detach().amax(dim=-1, keepdim=True).nan_to_num(0.0, posinf=0.0, neginf=0.0)
    return bias


def _lower_triangle(query: Tensor, key: Tensor) -> Tensor:
    return torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()


def _no_autocast(device_type: str) -> AbstractContextManager:
    """Under autocast even a float32 product would be computed in the half precision."""
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def _shape_of_scores(query: Tensor, key: Tensor) -> tuple[int, ...]:
    """(..., Nq, d) and (..., Nk, d) -> (..., Nq, Nk)."""
    (*leading, queries, _), (*others, keys, _) = query.shape, key.shape
    return (*(leading if leading == others else torch.broadcast_shapes(leading, others)), queries, keys)


def _four_axes(mask: Tensor, scores: tuple[int, ...]) -> Tensor:
    """(B, Nk), (B, Nq, Nk) or (B, heads, Nq, Nk) -> bool, with four axes. scores: their sizes, (B, heads, Nq, Nk)."""
    _require_tensor("mask", mask)
    if not 2 <= mask.ndim <= 4:
        raise ValueError(f"mask must be (B, Nk), (B, Nq, Nk) or (B, heads, Nq, Nk), got shape {tuple(mask.shape)}")
    mask = _checked_mask(mask, (scores[0], *scores[5 - mask.ndim :]))
    return mask.reshape(mask.shape[0], *(4 - mask.ndim) * (1,), *mask.shape[1:])


def _checked_mask(mask: Tensor, wanted: tuple[int, ...]) -> Tensor:
    """Returns the mask as bool; refuses one that would not broadcast to the wanted shape, (..., Nk)."""
    _require_tensor("mask", mask)
    if mask.ndim and mask.shape[-1] not in (1, wanted[-1]):
        raise ValueError(f"mask is for {mask.shape[-1]} keys, but there are {wanted[-1]}")
    _check_broadcast("mask", mask, wanted[-mask.ndim :])
    return torch.atleast_1d(mask != 0)


def _require_tensor(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a tensor, got a {type(x).__name__}")


def _check_broadcast(name: str, x: Tensor, wanted: tuple[int, ...]) -> None:
    _require_tensor(name, x)
    if x.shape == wanted:  # the usual case, and this is done at every call
        return
    sizes = zip(reversed(x.shape), reversed(wanted), strict=False)
    if x.ndim > len(wanted) or any(size not in (1, full) for size, full in sizes):
        raise ValueError(f"{name} must broadcast to {tuple(wanted)}, got shape {tuple(x.shape)}")


def check_equal(size: str, axis: int, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raises ValueError unless all are of one size along an axis: a batch of 1 would be broadcast without a word."""
    sizes = (query.shape[axis], key.shape[axis], value.shape[axis])
    if not sizes[0] == sizes[1] == sizes[2]:
        raise ValueError(f"query, key and value must have one {size}, got {sizes[0]}, {sizes[1]} and {sizes[2]}")


def _check_lengths(key: Tensor, value: Tensor) -> None:
    """The fused kernel would read past the end of the shorter one."""
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(f"there must be a value for each key, got {value.shape[-2]} values and {key.shape[-2]} keys")


def _hide_masked_keys(key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Zeroes the keys and values that would show through a mask: 0 x NaN is NaN, so a weight of 0 does not hide them.

    mask: bool, broadcasts to (..., Nq, Nk). Returns key, value, and the queries (..., Nq, 1) that must become NaN, as
    they may attend to NaN or infinity; None in their place where one row of the mask serves all queries.
    """
    if mask.ndim == 1 or mask.shape[-2] == 1:
        hidden = ~mask if mask.ndim == 1 else ~mask.squeeze(-2)
        return key.masked_fill(hidden[..., None], 0.0), value.masked_fill(hidden[..., None], 0.0), None

    bad = ~(key.isfinite().all(dim=-1) & value.isfinite().all(dim=-1))  # (..., Nk)
    spoilt = (mask & bad.unsqueeze(-2)).any(dim=-1, keepdim=True)
    # what nobody reads goes too, finite or not: its scores may overflow, and infinity less infinity is NaN
    hidden = (bad | ~mask.any(dim=-2))[..., None]
    return key.masked_fill(hidden, 0.0), value.masked_fill(hidden, 0.0), spoilt


def hide_unread_tokens(tokens: Tensor, mask: Tensor | None, query: Tensor) -> Tensor:
    """Zeroes the tokens that no query may attend to, before a projection whose weights' gradient would read them.

    tokens: (B, Nk, D); query: (B, heads, Nq, d); mask: as in multi_head_attention. Raises ValueError where it misfits.
    """
    if mask is None:
        return tokens
    read = _four_axes(mask, (*query.shape[:3], tokens.shape[1])).any(dim=2).any(dim=1)  # (B, Nk)
    return tokens.masked_fill(~read[..., None], 0.0)


def head_width(dim: int, heads: int, dim_head: int | None = None) -> int:
    """dim_head, or an equal share of dim where it is None. Raises ValueError where there is none."""
    no_heads = not heads or heads < 1
    if dim_head is None:
        if no_heads or dim < 1 or dim % heads:
            raise ValueError(f"a width of {dim} does not divide into {heads} heads")
        return dim // heads
    if no_heads or dim_head < 1:
        raise ValueError(f"heads and dim_head must be at least 1, got {heads} and {dim_head}")
    return dim_head


class AttentionHead(nn.Module):
    """One self-attention head with its own projections, as textbooks draw it."""

    def __init__(self, hidden_size: int, attention_head_size: int, bias: bool = True) -> None:
        super().__init__()
        self.query = nn.Linear(hidden_size, attention_head_size, bias=bias)
        self.key = nn.Linear(hidden_size, attention_head_size, bias=bias)
        self.value = nn.Linear(hidden_size, attention_head_size, bias=bias)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x: (B, N, hidden_size); mask: (B, Nk) or (B, Nq, Nk). Returns output (B, N, d) and weights (B, N, N)."""
        if isinstance(mask, Tensor) and mask.ndim == 2:
            mask = rearrange(mask, "b k -> b 1 k")
        return attention(self.query(x), self.key(x), self.value(x), mask)


class MultiHeadAttention(nn.Module):
    """Attention among token sequences: self-attention with forward(x, x, x), cross-attention with forward(x, c, c).

    dim: width of the queries and of the output; context_dim: width of keys and values (None = dim);
    bias: of to_q, to_k and to_v, to_out always has one; dropout: probability of dropping a weight in training.
    """

    def __init__(
        self,
        dim: int,
        heads: int = 8,
        dim_head: int | None = None,
        context_dim: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        dim_head = head_width(dim, heads, dim_head)
        context_dim = dim if context_dim is None else context_dim
        self.heads = heads
        self.dropout = dropout
        self.to_q = nn.Linear(dim, heads * dim_head, bias=bias)
        self.to_k = nn.Linear(context_dim, heads * dim_head, bias=bias)
        self.to_v = nn.Linear(context_dim, heads * dim_head, bias=bias)
        self.to_out = nn.Linear(heads * dim_head, dim)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, return_weights: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """query: (B, Nq, dim); key, value: (B, Nk, context_dim); mask: as in multi_head_attention.

        Returns (B, Nq, dim), with return_weights also the weights (B, heads, Nq, Nk).
        """
        check_equal("batch size", 0, query, key, value)
        query = split_heads(self.to_q(query), self.heads)
        key, value = (hide_unread_tokens(x, mask, query) for x in (key, value))
        key, value = split_heads(self.to_k(key), self.heads), split_heads(self.to_v(value), self.heads)
        dropout_p = self.dropout if self.training else 0.0
        if not return_weights:
            return self.to_out(merge_heads(_fused(query, key, value, mask, dropout_p=dropout_p)))
        output, weights = _weighed(query, key, value, mask, dropout_p)
        return self.to_out(merge_heads(output)), weights


class PixelProjection(nn.Conv2d):
    """A 1x1 convolution without bias from a map in any layout to one in channels_last.

    Each pixel's channels lie side by side there, so that a head's view of it has the stride fast kernels want. The
    weight carries the layout, not a copy of the map: torch would keep that copy for the backward pass.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, in_channels, H, W). Returns (B, out_channels, H, W)."""
        return F.conv2d(x, rearrange(self.weight.flatten(1)[:, None, None], "o h w i -> o i h w"))


class SelfAttention2d(nn.Module):
    """Every pixel of a feature map attends to every pixel; 1x1 convolutions make query, key and value."""

    def __init__(self, dim: int, heads: int = 4, dim_head: int | None = 32) -> None:
        super().__init__()
        dim_head = head_width(dim, heads, dim_head)
        self.heads = heads
        self.to_qkv = PixelProjection(dim, 3 * heads * dim_head)
        self.to_out = nn.Conv2d(heads * dim_head, dim, 1)

    def forward(self, x: Tensor, return_weights: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """x: (B, C, H, W). Returns (B, C, H, W) in x's memory layout, with return_weights also (B, heads, HW, HW)."""
        # cut in three before the heads are split: its backward pass then joins the gradients in one copy, not three
        qkv = self.to_qkv(x).chunk(3, dim=1)
        query, key, value = (rearrange(each, "b (heads d) h w -> b heads (h w) d", heads=self.heads) for each in qkv)
        output, weights = _weighed(query, key, value) if return_weights else (_fused(query, key, value), None)
        output = self.to_out(_heads_to_map(output, x.shape[-2]))  # frees the mix before the layout is copied
        output = output.contiguous(memory_format=_layout(x))
        return (output, weights) if return_weights else output


class CrossAttention2d(nn.Module):
    """Every pixel of a feature map attends to the tokens of a text."""

    def __init__(self, dim: int, context_dim: int, heads: int = 4, dim_head: int | None = 32) -> None:
        super().__init__()
        dim_head = head_width(dim, heads, dim_head)
        self.heads = heads
        self.to_q = PixelProjection(dim, heads * dim_head)
        self.to_kv = nn.Linear(context_dim, 2 * heads * dim_head, bias=False)
        self.to_out = nn.Conv2d(heads * dim_head, dim, 1)

    def forward(
        self, x: Tensor, context: Tensor, context_mask: Tensor | None = None, return_weights: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """x: (B, C, H, W); context: (B, N, context_dim); context_mask: (B, N), non-zero = a real token.

        Returns (B, C, H, W) in x's memory layout, with return_weights also the weights (B, heads, HW, N).
        Raises ValueError if the map's batch, or the mask's length or batch, is not the context's.
        """
        if x.shape[0] != context.shape[0]:
            raise ValueError(f"map and context must have one batch size, got {x.shape[0]} and {context.shape[0]}")
        query = rearrange(self.to_q(x), "b (heads d) h w -> b heads (h w) d", heads=self.heads)
        context = hide_unread_tokens(context, context_mask, query)
        key, value = (split_heads(each, self.heads) for each in self.to_kv(context).chunk(2, dim=-1))
        attended = (query, key, value, context_mask)
        output, weights = _weighed(*attended) if return_weights else (_fused(*attended), None)
        output = self.to_out(_heads_to_map(output, x.shape[-2]))  # frees the mix before the layout is copied
        output = output.contiguous(memory_format=_layout(x))
        return (output, weights) if return_weights else output


def _weighed(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, dropout_p: float = 0.0
) -> tuple[Tensor, Tensor]:
    """`attention` over split heads, with the masks and the dropout of multi_head_attention."""
    mask = None if mask is None else _four_axes(mask, _shape_of_scores(query, key))
    return attention(query, key, value, mask, lambda weights: F.dropout(weights, dropout_p))


def _heads_to_map(x: Tensor, height: int) -> Tensor:
    """(B, heads, HW, d) -> (B, heads*d, H, W) in channels_last.

    By way of one flat axis: at a batch of 1 the fused kernel's strides hide the layout, and the convolution would copy.
    """
    batch, heads, pixels, width = x.shape
    flat = rearrange(x, "b heads n d -> (b n heads d)")
    # every size is given: of a batch of 0 none could be told from the others
    return rearrange(flat, "(b h w c) -> b c h w", b=batch, h=height, w=pixels // height, c=heads * width)


def _layout(x: Tensor) -> torch.memory_format:
    """The memory format that x is in; contiguous for one that is in neither."""
    channels_last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if channels_last else torch.contiguous_format

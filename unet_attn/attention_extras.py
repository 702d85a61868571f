"""What people add to attention: memory, grouped heads, normed queries and keys, positions, linear cost, chunks.

Each is off until asked for, and none of them weighs on `attention.py`, whose functions do the work here too.

Letters: B batch, N tokens (Nq queries, Nk keys), D width, d width of one head, C channels, H W the map.
Masks are bool or 0/1 numbers, non-zero (NaN too) = may be attended.
"""

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unet_attn.attention import attention, check_equal, head_width, hide_unread_tokens, multi_head_attention


def attention_in_chunks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *, chunk: int = 1024
) -> Tensor:
    """The output of `attention` in memory linear in Nq, without any fused kernel: some queries at a time.

    Shapes and masks as in `attention`; chunk: queries at a time. In training each chunk's weights are computed again
    in the backward pass instead of kept. Returns (..., Nq, dv). Raises ValueError if chunk or the mask does not fit.
    """
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 query, got {chunk}")
    queries = query.shape[-2]
    per_query = isinstance(mask, Tensor) and mask.ndim > 1 and mask.shape[-2] != 1
    if per_query and mask.shape[-2] != queries:
        raise ValueError(f"mask is for {mask.shape[-2]} queries, but there are {queries}")

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return attention(query, key, value, mask)[0]

    outputs = []
    for start in range(0, max(1, queries), chunk):  # of no queries one chunk of none
        rows = slice(start, start + chunk)
        inputs = (query[..., rows, :], key, value, mask[..., rows, :] if per_query else mask)
        outputs.append(checkpoint(attend, *inputs, use_reentrant=False) if torch.is_grad_enabled() else attend(*inputs))
    return torch.cat(outputs, dim=-2)


class ExtendedMultiHeadAttention(nn.Module):
    """attention.MultiHeadAttention with what large models add to it.

    dim, heads, dim_head, context_dim, bias, dropout: as there.
    kv_heads: heads of key and value, each shared by heads / kv_heads of the query; None = heads
        (Ainslie et al. 2023, https://arxiv.org/abs/2305.13245).
    qk_norm: scales every query and key to a learned length, so that scores cannot grow without bound
        (Henry et al. 2020, https://arxiv.org/abs/2010.04245; root mean square: Zhang & Sennrich 2019).
    memory_tokens: learned keys and values that every query may attend to, beside the given ones
        (Sukhbaatar et al. 2019, https://arxiv.org/abs/1907.01470).
    """

    def __init__(
        self,
        dim: int,
        heads: int = 8,
        dim_head: int | None = None,
        context_dim: int | None = None,
        *,
        kv_heads: int | None = None,
        qk_norm: bool = False,
        memory_tokens: int = 0,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        dim_head = head_width(dim, heads, dim_head)
        context_dim = dim if context_dim is None else context_dim
        self.heads = heads
        self.kv_heads = heads if kv_heads is None else kv_heads
        self.dropout = dropout
        if self.kv_heads < 1 or heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide heads, got {self.kv_heads} and {heads}")
        if memory_tokens < 0:
            raise ValueError(f"memory_tokens must be at least 0, got {memory_tokens}")

        self.to_q = nn.Linear(dim, heads * dim_head, bias=bias)
        self.to_k = nn.Linear(context_dim, self.kv_heads * dim_head, bias=bias)
        self.to_v = nn.Linear(context_dim, self.kv_heads * dim_head, bias=bias)
        self.norm_q = nn.RMSNorm(dim_head) if qk_norm else nn.Identity()
        self.norm_k = nn.RMSNorm(dim_head) if qk_norm else nn.Identity()
        self.memory = None
        if memory_tokens:
            self.memory = nn.Parameter(torch.randn(2, memory_tokens, self.kv_heads, dim_head))
        self.to_out = nn.Linear(heads * dim_head, dim)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        *,
        bias: Tensor | None = None,
        rotation: Tensor | None = None,
    ) -> Tensor:
        """query: (B, Nq, dim); key, value: (B, Nk, context_dim); mask: as in multi_head_attention, over the given keys.

        bias: added to the scores, broadcasts to (B, heads, Nq, Nk), as from RelativePositionBias2d;
        rotation: (N, d, 2) for self-attention, as from rotation_2d. Returns (B, Nq, dim).
        """
        check_equal("batch size", 0, query, key, value)
        query = self.norm_q(rearrange(self.to_q(query), "b n (heads d) -> b n heads d", heads=self.heads))
        key, value = (hide_unread_tokens(x, mask, query.transpose(1, 2)) for x in (key, value))
        key = self.norm_k(rearrange(self.to_k(key), "b n (heads d) -> b n heads d", heads=self.kv_heads))
        value = rearrange(self.to_v(value), "b n (heads d) -> b n heads d", heads=self.kv_heads)

        if rotation is not None:
            query, key = rotate(query, rotation), rotate(key, rotation)

        if self.memory is not None:
            extra, keys = self.memory.shape[1], key.shape[1]
            memory = repeat(self.memory, "kv n heads d -> kv b n heads d", b=key.shape[0]).to(key.dtype)
            key, value = torch.cat([memory[0], key], dim=1), torch.cat([memory[1], value], dim=1)
            # what is no tensor goes on as it is, to be refused
            mask = _in_front(mask != 0, extra, keys, True) if isinstance(mask, Tensor) else mask
            bias = _in_front(bias, extra, keys, 0.0) if isinstance(bias, Tensor) else bias

        shared = self.heads // self.kv_heads
        key, value = (repeat(x, "b n heads d -> b n (heads shared) d", shared=shared) for x in (key, value))
        output = multi_head_attention(
            *(rearrange(x, "b n heads d -> b n (heads d)") for x in (query, key, value)),
            heads=self.heads,
            mask=mask,
            bias=bias,
            dropout_p=self.dropout if self.training else 0.0,
        )
        return self.to_out(output)


def _in_front(x: Tensor, extra: int, keys: int, content: bool | float) -> Tensor:
    """(..., Nk), or 1 for all of the `keys`, -> (..., extra + Nk), the new places filled with `content`."""
    if x.shape[-1:] == (1,):
        x = x.expand(*x.shape[:-1], keys)
    return torch.cat([x.new_full((*x.shape[:-1], extra), content), x], dim=-1)


class OverPixels(nn.Module):
    """A self-attention over tokens, run over the pixels of a map: OverPixels(MultiHeadAttention(64, 4)).

    It brings to maps what only the token modules have: biases, and all of ExtendedMultiHeadAttention.
    """

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, C, H, W). Returns (B, C, H, W)."""
        tokens = _pixels_to_tokens(x)
        return _tokens_to_pixels(self.attention(tokens, tokens, tokens), x)


class RotaryOverPixels(nn.Module):
    """OverPixels with rotary positions: a score depends on where two pixels stand to each other."""

    def __init__(self, attention: ExtendedMultiHeadAttention) -> None:
        super().__init__()
        self.attention = attention
        self.dim_head = attention.to_q.out_features // attention.heads
        if self.dim_head % 4:
            raise ValueError(f"rotary positions in two directions need a dim_head divisible by 4, got {self.dim_head}")

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, C, H, W). Returns (B, C, H, W)."""
        tokens = _pixels_to_tokens(x)
        rotation = rotation_2d(x.shape[-2], x.shape[-1], self.dim_head, device=x.device)
        return _tokens_to_pixels(self.attention(tokens, tokens, tokens, rotation=rotation), x)


class RelativeOverPixels(nn.Module):
    """OverPixels with a learned bias for each offset between two pixels. reach: as in RelativePositionBias2d."""

    def __init__(self, attention: ExtendedMultiHeadAttention, reach: int) -> None:
        super().__init__()
        self.attention = attention
        self.position_bias = RelativePositionBias2d(attention.heads, reach)

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, C, H, W). Returns (B, C, H, W)."""
        tokens = _pixels_to_tokens(x)
        bias = self.position_bias(x.shape[-2], x.shape[-1])
        return _tokens_to_pixels(self.attention(tokens, tokens, tokens, bias=bias), x)


class RelativePositionBias2d(nn.Module):
    """A learned number per head and offset (Liu et al. 2021, https://arxiv.org/abs/2103.14030, eq. 4), 0 at the start.

    reach: the furthest offset in rows and columns that has a number of its own; all that lie further share its.
    """

    def __init__(self, heads: int, reach: int) -> None:
        super().__init__()
        if not heads or heads < 1:
            raise ValueError(f"heads must be at least 1, got {heads}")
        if reach < 1:
            raise ValueError(f"reach must be at least 1 pixel, got {reach}")
        self.reach = reach
        self.table = nn.Parameter(torch.zeros(heads, 2 * reach + 1, 2 * reach + 1))

    def forward(self, height: int, width: int) -> Tensor:
        """Returns (1, heads, HW, HW), for `bias` of multi_head_attention."""
        rows, columns = (self._offsets(size) for size in (height, width))
        bias = self.table[:, rows[:, None, :, None], columns[None, :, None, :]]
        return rearrange(bias, "heads hq wq hk wk -> 1 heads (hq wq) (hk wk)")

    def _offsets(self, size: int) -> Tensor:
        """(size, size): where in the table the offset from one row (or column) to another stands."""
        places = torch.arange(size, device=self.table.device)
        return (places - places[:, None]).clamp(-self.reach, self.reach) + self.reach


def rotation_2d(height: int, width: int, dim_head: int, *, device: torch.device | None = None) -> Tensor:
    """The angles of rotary positions on a map, as cosine and sine: (HW, dim_head, 2) float32.

    The first half of a head turns with the row, the second with the column, each at dim_head / 4 frequencies from 1
    down to 1/100 (Su et al. 2021, https://arxiv.org/abs/2104.09864, section 3.2; a base of 100 suits sides of tens).
    """
    frequencies = 100.0 ** -torch.linspace(0, 1, dim_head // 4, device=device)
    rows, columns = (torch.arange(size, device=device)[:, None] * frequencies for size in (height, width))
    angles = torch.cat([repeat(rows, "h f -> h w f", w=width), repeat(columns, "w f -> h w f", h=height)], dim=-1)
    angles = repeat(angles, "h w f -> (h w) (f two)", two=2)  # both members of a pair turn by one angle
    return torch.stack([angles.cos(), angles.sin()], dim=-1)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turns each pair of neighbouring features. x: (B, N, heads, d); rotation: (N, d, 2). Returns (B, N, heads, d)."""
    cosine, sine = rotation.to(x.dtype)[:, None].unbind(dim=-1)
    first, second = rearrange(x, "... (f two) -> two ... f", two=2)
    turned = rearrange([-second, first], "two ... f -> ... (f two)")
    return x * cosine + turned * sine


class LinearAttention2d(nn.Module):
    """Attention in time and memory linear in the pixels, for maps on which the exact one is too dear.

    softmax over features (Q) times softmax over pixels (K)^T V: the keys first make a d x d summary, which the queries
    then read (Shen et al. 2021, https://arxiv.org/abs/1812.01243, eq. 4 and section 3.3). It is no approximation of
    the exact attention: weights trained for one do not serve the other.
    """

    def __init__(self, dim: int, heads: int = 4, dim_head: int | None = 32) -> None:
        super().__init__()
        dim_head = head_width(dim, heads, dim_head)
        self.heads = heads
        self.to_qkv = nn.Conv2d(dim, 3 * heads * dim_head, 1, bias=False)
        self.to_out = nn.Conv2d(heads * dim_head, dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, C, H, W). Returns (B, C, H, W)."""
        query, key, value = rearrange(
            self.to_qkv(x), "b (qkv heads d) h w -> qkv b heads d (h w)", qkv=3, heads=self.heads
        ).unbind()
        summary = key.softmax(dim=-1) @ value.transpose(-2, -1)  # (B, heads, d, d)
        output = summary.transpose(-2, -1) @ query.softmax(dim=-2)
        return self.to_out(rearrange(output, "b heads d (h w) -> b (heads d) h w", h=x.shape[-2]))


class RMSNorm2d(nn.Module):
    """Scales each pixel's channels to a root mean square of 1, then by learned numbers (Zhang & Sennrich 2019)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, C, H, W). Returns (B, C, H, W)."""
        # in float16 the least length that it divides by would be 0, and a long pixel's square infinite
        unit = F.normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=1).to(x.dtype)
        return unit * (self.scale * x.shape[1] ** 0.5)[:, None, None]


class Residual(nn.Module):
    """x + module(x)."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        """x: whatever the module keeps the shape of."""
        return x + self.module(x)


def _pixels_to_tokens(x: Tensor) -> Tensor:
    """(B, C, H, W) -> (B, HW, C), contiguous, so that three projections do not copy it three times."""
    return rearrange(x.contiguous(memory_format=torch.channels_last), "b c h w -> b (h w) c")


def _tokens_to_pixels(tokens: Tensor, x: Tensor) -> Tensor:
    """(B, HW, C) -> (B, C, H, W) of x's size."""
    return rearrange(tokens, "b (h w) c -> b c h w", h=x.shape[-2])

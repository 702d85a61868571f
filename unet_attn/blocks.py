"""What the U-Net is built of: residual and attention blocks, the layers made of them, and the time embedding.

Every block ends in a zero-initialised layer, so it starts as the identity and adding one never hurts early training.
Letters: B batch, N tokens, D text width, C channels, H W the map, E width of the embedding of time and text.
Sources: Ho et al. 2020, https://arxiv.org/abs/2006.11239 (residual blocks, time embedding);
Dhariwal & Nichol 2021, https://arxiv.org/abs/2105.05233 (scale and shift by the embedding, width of a head).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unet_attn.attention import CrossAttention2d, SelfAttention2d

CHANNELS_PER_GROUP = 8  # of a group norm; Ho et al. 2020 have 4 at their first level and 16 at their widest


def group_norm(channels: int) -> nn.GroupNorm:
    """The one normalisation of maps. Raises ValueError unless CHANNELS_PER_GROUP divides the channels."""
    if channels < 1 or channels % CHANNELS_PER_GROUP:
        raise ValueError(f"channels must be a multiple of {CHANNELS_PER_GROUP} for the group norm, got {channels}")
    return nn.GroupNorm(channels // CHANNELS_PER_GROUP, channels)


def zero_init(layer: nn.Module) -> nn.Module:
    """Sets a layer's parameters to 0 and returns it."""
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


def sinusoidal_embedding(timestep: Tensor, dim: int) -> Tensor:
    """Cosines and sines of the timestep at dim / 2 frequencies from 1 towards 1e-4 (Vaswani et al. 2017, section 3.5).

    timestep: (B,), in 0 .. 1000. Returns (B, dim) float32.
    """
    frequencies = torch.exp(torch.arange(dim // 2, device=timestep.device) * (-math.log(1e4) / (dim // 2)))
    angles = timestep.float()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1)


class TimeEmbedding(nn.Module):
    """Sinusoids of the timestep through two linear layers."""

    def __init__(self, dim: int, embedding_dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.expand = nn.Linear(dim, embedding_dim)
        self.mix = nn.Linear(embedding_dim, embedding_dim)

    def forward(self, timestep: Tensor) -> Tensor:
        """timestep: (B,). Returns (B, E)."""
        embedding = sinusoidal_embedding(timestep, self.dim).to(self.expand.weight.dtype)
        return self.mix(F.silu(self.expand(embedding)))


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside a skip; the embedding scales and shifts the map between them."""

    def __init__(self, in_channels: int, out_channels: int, embedding_dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.in_norm = group_norm(in_channels)
        self.in_conv = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.to_scale_shift = zero_init(nn.Linear(embedding_dim, 2 * out_channels))
        self.out_norm = group_norm(out_channels)
        self.dropout = nn.Dropout(dropout)
        self.out_conv = zero_init(nn.Conv2d(out_channels, out_channels, 3, padding=1))
        self.skip = nn.Conv2d(in_channels, out_channels, 1) if in_channels != out_channels else nn.Identity()

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        """x: (B, in_channels, H, W); embedding: (B, E). Returns (B, out_channels, H, W)."""
        hidden = self.in_conv(F.silu(self.in_norm(x)))

        scale, shift = self.to_scale_shift(embedding)[:, :, None, None].chunk(2, dim=1)
        hidden = torch.addcmul(shift, self.out_norm(hidden), 1 + scale)

        hidden = self.out_conv(self.dropout(F.silu(hidden)))
        return self.skip(x) + hidden


class SelfAttentionBlock(nn.Module):
    """Norm, self-attention and residual; as many heads as dim_head goes into the channels."""

    def __init__(self, channels: int, dim_head: int) -> None:
        super().__init__()
        self.norm = group_norm(channels)
        self.attention = SelfAttention2d(channels, heads_for(channels, dim_head), dim_head)
        zero_init(self.attention.to_out)

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, C, H, W). Returns (B, C, H, W)."""
        return x + self.attention(self.norm(x))


class CrossAttentionBlock(nn.Module):
    """Norm, attention to the text and residual."""

    def __init__(self, channels: int, context_dim: int, dim_head: int) -> None:
        super().__init__()
        self.norm = group_norm(channels)
        self.attention = CrossAttention2d(channels, context_dim, heads_for(channels, dim_head), dim_head)
        zero_init(self.attention.to_out)

    def forward(self, x: Tensor, context: Tensor, context_mask: Tensor | None) -> Tensor:
        """x: (B, C, H, W); context: (B, N, D); context_mask: (B, N). Returns (B, C, H, W)."""
        return x + self.attention(self.norm(x), context, context_mask)


class UNetLayer(nn.Module):
    """A residual block, then, at an attention level, self-attention and attention to the text.

    dim_head: width of a head, None = no attention here; context_dim: width of the text, None = no text.
    """

    def __init__(
        self, in_channels: int, out_channels: int, embedding_dim: int, dim_head: int | None, context_dim: int | None
    ) -> None:
        super().__init__()
        self.residual = ResidualBlock(in_channels, out_channels, embedding_dim)
        self.self_attention = self.cross_attention = None
        if dim_head is not None:
            self.self_attention = SelfAttentionBlock(out_channels, dim_head)
            if context_dim is not None:
                self.cross_attention = CrossAttentionBlock(out_channels, context_dim, dim_head)

    def forward(self, x: Tensor, embedding: Tensor, context: Tensor | None, context_mask: Tensor | None) -> Tensor:
        """x: (B, in_channels, H, W); embedding: (B, E); context: (B, N, D). Returns (B, out_channels, H, W)."""
        x = self.residual(x, embedding)
        if self.self_attention is not None:
            x = self.self_attention(x)
        if self.cross_attention is not None:
            x = self.cross_attention(x, context, context_mask)
        return x


def heads_for(channels: int, dim_head: int) -> int:
    """Number of heads of width dim_head in `channels`. Raises ValueError if they do not divide."""
    if dim_head < 1 or channels % dim_head:
        raise ValueError(f"dim_head must divide the channels of every attention level, got {dim_head} and {channels}")
    return channels // dim_head

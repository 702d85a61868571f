"""A picture as a sequence of patches through the layers of `transformer`: the eye of judge and captioner.

The smallest size is the textbook's, 48 numbers wide with four heads of 12: a patch of 4 x 4 pixels in three colours is
48 numbers. Letters: B batch, C channels, N patches in reading order, D width.
Source: Dosovitskiy et al. 2021, https://arxiv.org/abs/2010.11929; a mean over the patches in the place of a class token
as in Beyer et al. 2022, https://arxiv.org/abs/2205.01580.
"""

import torch
from einops import rearrange
from torch import Tensor, nn

from unet_attn.transformer import EncoderLayer


class ImageTransformer(nn.Module):
    """Patches, learned positions, encoder layers, norm.

    image_size: side of the square pictures in pixels, a multiple of patch_size; channels: 1 or 3.
    Raises ValueError if the sides do not divide.
    """

    def __init__(
        self,
        image_size: int = 32,
        channels: int = 3,
        *,
        patch_size: int = 4,
        dim: int = 48,
        depth: int = 4,
        heads: int = 4,
    ) -> None:
        super().__init__()
        if image_size % patch_size:
            raise ValueError(f"patches of {patch_size} pixels do not divide a picture of {image_size}")
        self.image_size, self.channels, self.patch_size, self.dim = image_size, channels, patch_size, dim
        self.grid = image_size // patch_size  # patches in a row, and rows

        self.to_tokens = nn.Linear(channels * patch_size**2, dim)
        self.position = nn.Parameter(torch.randn(self.grid**2, dim) * dim**-0.5)
        self.layers = nn.ModuleList(EncoderLayer(dim, heads, 4 * dim) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)

    def forward(self, pictures: Tensor) -> Tensor:
        """pictures: (B, C, H, W) in [-1, 1]. Returns (B, N, D). Raises ValueError for another size or channel count."""
        x = self._embed(pictures)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    @torch.no_grad()
    def attention_weights(self, pictures: Tensor, *, layer: int = -1) -> Tensor:
        """What each patch looks at in a layer, counted as in a list. pictures: (B, C, H, W). Returns (B, heads, N, N).

        Row q of a head, reshaped to (grid, grid), is the map of what patch q takes from where; it sums to 1.
        """
        chosen = range(len(self.layers))[layer]
        x = self._embed(pictures)
        for before in self.layers[:chosen]:
            x = before(x)
        normed = self.layers[chosen].attention_norm(x)
        return self.layers[chosen].attention(normed, normed, normed, return_weights=True)[1]

    def _embed(self, pictures: Tensor) -> Tensor:
        expected = (self.channels, self.image_size, self.image_size)
        if pictures.shape[1:] != expected:
            raise ValueError(f"pictures must be {expected} (C, H, W), got {tuple(pictures.shape[1:])}")
        p = self.patch_size
        patches = rearrange(pictures, "b c (rows p1) (columns p2) -> b (rows columns) (c p1 p2)", p1=p, p2=p)
        return self.to_tokens(patches) + self.position

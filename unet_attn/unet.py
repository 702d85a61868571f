"""AttnUNet2D: a U-Net for diffusion, with query/key/value attention at the levels that the config names.

    sample -> patches -> conv_in -> down: level 0, 1, 2, ... -> mid -> up: ..., 2, 1, 0 -> conv_out -> pixels
                                       |________________ skips ___________|

A level is residual blocks and, where `attention_levels` names it, self-attention and attention to the text after each.
From one level to the next the map's sides halve.
Letters: B batch, C channels, H W sides in pixels, N tokens, D width of the text, E width of the embedding.
Sources: Ho et al. 2020, https://arxiv.org/abs/2006.11239; Rombach et al. 2022, https://arxiv.org/abs/2112.10752 (text).
"""

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.models.unets.unet_2d import UNet2DOutput
from torch import Tensor, nn

from unet_attn.blocks import CHANNELS_PER_GROUP, TimeEmbedding, UNetLayer, group_norm, zero_init
from unet_attn.flow import velocity_from_clean
from unet_attn.strict_loading import StrictLoading, is_whole
from unet_attn.transformer import masked_mean

FORMAT_VERSION = 1
_NUMBERS = ("sample_size", "in_channels", "out_channels", "layers_per_block", "dim_head", "patch_size", "context_dim")
_LISTS = ("block_channels", "attention_levels")


class AttnUNet2D(StrictLoading, ModelMixin, ConfigMixin):
    """Predicts noise, velocity or the clean picture from a noisy one, a time and a text.

    sample_size: side in pixels that the pipeline samples by default (any that downsample_factor divides can be asked
    for); block_channels: channels of each level; layers_per_block: layers of a level going down, one more going up;
    attention_levels: which levels attend, 0 = the highest resolution; dim_head: width of an attention head;
    context_dim: width of the text, None = no text; patch_size: side of the squares of pixels folded into channels,
    which makes the whole network cheaper by its square; x_prediction: the last layer gives the clean picture, and the
    answer is the flow's velocity that it stands for (Li & He 2025, https://arxiv.org/abs/2511.13720).
    """

    _supports_gradient_checkpointing = True
    # it casts the times to the dtype of its weights, which layerwise casting changes behind its back
    _skip_layerwise_casting_patterns = ("time_embedding", "norm")

    @register_to_config
    def __init__(
        self,
        sample_size: int = 32,
        in_channels: int = 3,
        out_channels: int = 3,
        block_channels: tuple[int, ...] = (32, 64, 128),
        layers_per_block: int = 1,
        attention_levels: tuple[int, ...] = (2,),
        dim_head: int = 32,
        context_dim: int | None = None,
        patch_size: int = 1,
        x_prediction: bool = False,
        format_version: int = FORMAT_VERSION,
    ) -> None:
        super().__init__()
        self._check_config()
        self.gradient_checkpointing = False  # set by enable_gradient_checkpointing()
        embedding_dim = 4 * block_channels[0]
        self.time_embedding = TimeEmbedding(block_channels[0], embedding_dim)
        self.text_embedding = None if context_dim is None else nn.Linear(context_dim, embedding_dim)

        def layer(in_channels: int, level: int) -> UNetLayer:
            head = dim_head if level in attention_levels else None
            return UNetLayer(in_channels, block_channels[level], embedding_dim, head, context_dim)

        channels = block_channels[0]
        self.conv_in = nn.Conv2d(in_channels * patch_size**2, channels, 3, padding=1)

        skips = []
        self.down = nn.ModuleDict()
        for level in range(len(block_channels)):
            skips.append(channels)
            self.down[self._key(level)] = layers = nn.ModuleList()
            for _ in range(layers_per_block):
                layers.append(layer(channels, level))
                channels = block_channels[level]
                skips.append(channels)

        self.mid = layer(channels, len(block_channels) - 1)

        self.up = nn.ModuleDict()
        for level in reversed(range(len(block_channels))):
            self.up[self._key(level)] = layers = nn.ModuleList()
            for _ in range(layers_per_block + 1):
                layers.append(layer(channels + skips.pop(), level))
                channels = block_channels[level]

        self.norm_out = group_norm(channels)
        self.conv_out = zero_init(nn.Conv2d(channels, out_channels * patch_size**2, 3, padding=1))

    @property
    def downsample_factor(self) -> int:
        """Height and width of a sample must be multiples of it."""
        return self.config.patch_size * 2 ** (len(self.config.block_channels) - 1)

    def forward(
        self,
        sample: Tensor,
        timestep: Tensor | float,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        return_dict: bool = True,
    ) -> UNet2DOutput | tuple[Tensor]:
        """sample: (B, C, H, W); timestep: one number or (B,), in 0 .. 1000; encoder_hidden_states: (B, N, D);
        encoder_attention_mask: (B, N) or (B, 1, N), non-zero = a real token.

        Returns the prediction (B, out_channels, H, W) as `.sample`, or in a tuple without return_dict.
        Raises ValueError, before any compute, if a size does not fit, or text is missing or not expected.
        """
        context, context_mask = encoder_hidden_states, _token_mask(encoder_attention_mask)
        timestep = torch.as_tensor(timestep, device=sample.device).reshape(-1)
        self._check_inputs(sample, timestep, context, context_mask)

        x = self.conv_in(F.pixel_unshuffle(sample, self.config.patch_size))

        timestep = timestep.expand(sample.shape[0])
        # to the map's dtype: another than the weights' where layerwise casting leaves the time embedding out
        embedding = self.time_embedding(timestep).to(x.dtype)
        if context is not None:
            embedding = embedding + self.text_embedding(masked_mean(context, context_mask))
        embedding = F.silu(embedding)

        skips = []
        for level, layers in enumerate(self.down.values()):
            x = F.avg_pool2d(x, 2) if level else x
            skips.append(x)
            for layer in layers:
                x = self._run(layer, x, embedding, context, context_mask)
                skips.append(x)

        x = self._run(self.mid, x, embedding, context, context_mask)

        for level, layers in enumerate(self.up.values()):
            x = F.interpolate(x, scale_factor=2.0, mode="nearest") if level else x
            for layer in layers:
                x = self._run(layer, torch.cat([x, skips.pop()], dim=1), embedding, context, context_mask)

        x = F.pixel_shuffle(self.conv_out(F.silu(self.norm_out(x))), self.config.patch_size)
        if self.config.x_prediction:
            x = velocity_from_clean(sample, x, timestep)
        return UNet2DOutput(sample=x) if return_dict else (x,)

    def _run(
        self, layer: UNetLayer, x: Tensor, embedding: Tensor, context: Tensor | None, context_mask: Tensor | None
    ) -> Tensor:
        """A layer's output; with gradient checkpointing its inside is computed again in the backward pass."""
        if self.gradient_checkpointing and torch.is_grad_enabled():
            return self._gradient_checkpointing_func(layer, x, embedding, context, context_mask)
        return layer(x, embedding, context, context_mask)

    def _key(self, level: int) -> str:
        """A level's name in the state dict: the side of its map at sample_size."""
        side = self.config.sample_size // (self.config.patch_size * 2**level)
        return f"{side}x{side}"

    def _check_config(self) -> None:
        if self.config.format_version != FORMAT_VERSION:
            raise ValueError(
                f"this U-Net has format_version {self.config.format_version}, this release of unet-attn reads "
                f"{FORMAT_VERSION}: install a release that reads {self.config.format_version}"
            )
        for key in _NUMBERS:
            if not is_whole(self.config[key]) and (key, self.config[key]) != ("context_dim", None):
                raise ValueError(f"unet.{key} must be a whole number, got {self.config[key]!r}")
        for key in _LISTS:
            if not isinstance(self.config[key], list | tuple) or not all(map(is_whole, self.config[key])):
                raise ValueError(f"unet.{key} must be a list of whole numbers, got {self.config[key]!r}")
        levels = len(self.config.block_channels)
        if not levels or self.config.layers_per_block < 1 or self.config.patch_size < 1:
            raise ValueError("unet needs at least one level in block_channels, one layer per block and patch_size 1")
        for key in ("in_channels", "out_channels", "dim_head", "context_dim"):
            value = self.config[key]
            if value is not None and value < 1:
                raise ValueError(f"unet.{key} must be at least 1, got {value}")
        if self.config.x_prediction and self.config.in_channels != self.config.out_channels:
            raise ValueError(
                f"unet.x_prediction needs as many out_channels as in_channels, got {self.config.out_channels} "
                f"and {self.config.in_channels}"
            )
        if any(width < 1 or width % CHANNELS_PER_GROUP for width in self.config.block_channels):
            raise ValueError(
                f"unet.block_channels must be multiples of {CHANNELS_PER_GROUP}, the channels of a group of the norm, "
                f"got {list(self.config.block_channels)}"
            )
        unknown = [level for level in self.config.attention_levels if level not in range(levels)]
        if unknown:
            raise ValueError(
                f"unet.attention_levels must lie in 0..{levels - 1}, as block_channels has {levels}, got {unknown}"
            )
        for width in (self.config.block_channels[level] for level in self.config.attention_levels):
            if width % self.config.dim_head:
                raise ValueError(
                    f"unet.dim_head must divide the block_channels of every attention level, got "
                    f"{self.config.dim_head} and {width}"
                )
        if self.config.sample_size % self.downsample_factor or self.config.sample_size < 1:
            raise ValueError(
                f"unet.sample_size (a configuration's data.resolution) must be a multiple of {self.downsample_factor}, "
                f"patch_size times 2 for each level after the first, got {self.config.sample_size}"
            )

    def _check_inputs(
        self, sample: Tensor, timestep: Tensor, context: Tensor | None, context_mask: Tensor | None
    ) -> None:
        if sample.ndim != 4 or sample.shape[1] != self.config.in_channels:
            raise ValueError(f"sample must be (B, {self.config.in_channels}, H, W), got {tuple(sample.shape)}")
        for name, side in (("height", sample.shape[2]), ("width", sample.shape[3])):
            if side < 1 or side % self.downsample_factor:
                raise ValueError(f"{name} must be a positive multiple of {self.downsample_factor}, got {side}")
        batch = sample.shape[0]
        if timestep.shape[0] not in (batch, 1):
            raise ValueError(
                f"timestep must be one number, or one for each sample, ({batch},), got {tuple(timestep.shape)}"
            )
        if (context is None) != (self.config.context_dim is None):
            wanted = "no text" if self.config.context_dim is None else "encoder_hidden_states"
            raise ValueError(f"this U-Net was made with context_dim={self.config.context_dim}: give it {wanted}")
        if context is None:
            return
        if context.ndim != 3 or context.shape[2] != self.config.context_dim:
            raise ValueError(
                f"encoder_hidden_states must be (B, N, {self.config.context_dim}), got {tuple(context.shape)}"
            )
        if context.shape[0] != batch:
            raise ValueError(
                f"encoder_hidden_states must be of the sample's batch, ({batch}, N, {self.config.context_dim}), "
                f"got {tuple(context.shape)}"
            )
        if context_mask is not None and context_mask.ndim != 2:
            raise ValueError(f"encoder_attention_mask must be (B, N) or (B, 1, N), got {tuple(context_mask.shape)}")
        if context_mask is not None and context_mask.shape[1] != context.shape[1]:
            raise ValueError(
                f"encoder_attention_mask is for {context_mask.shape[1]} tokens, but there are {context.shape[1]}"
            )
        if context_mask is not None and context_mask.shape[0] not in (batch, 1):
            raise ValueError(
                f"encoder_attention_mask must have a row for each sample, ({batch}, N), or one for all, "
                f"got {tuple(context_mask.shape)}"
            )


def _token_mask(mask: Tensor | None) -> Tensor | None:
    """A mask (B, 1, N), one row for all queries, as (B, N); any other as it is.

    Raises ValueError for a float one, or of the form (B, N) one with negative numbers: that is a bias of 0 and -10000
    or -inf, as in diffusers, which as a mask says the opposite.
    """
    # what is compiled cannot ask for numbers
    if mask is not None and mask.is_floating_point() and mask.ndim == 2 and not torch.compiler.is_compiling():
        if bool((mask < 0).any()):
            raise ValueError(
                "encoder_attention_mask must be non-zero for a real token, else 0, got a bias: give bias == 0"
            )
    if mask is None or mask.ndim != 3 or mask.shape[1] != 1:
        return mask
    if mask.is_floating_point():
        raise ValueError("encoder_attention_mask (B, 1, N) must be bool or whole numbers, non-zero = a real token")
    return mask.squeeze(1)

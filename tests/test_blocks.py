"""Blocks start as the identity, refuse widths that do not divide, and use the embedding and the text."""

import math

import pytest
import torch
from torch.testing import assert_close

from unet_attn.blocks import (
    CrossAttentionBlock,
    ResidualBlock,
    SelfAttentionBlock,
    TimeEmbedding,
    UNetLayer,
    group_norm,
    sinusoidal_embedding,
    zero_init,
)


def test_sinusoids_are_those_of_the_paper() -> None:
    embedding = sinusoidal_embedding(torch.tensor([0, 3]), 6)
    angles = [3 * 1e4 ** (-i / 3) for i in range(3)]
    expected = [[1.0] * 3 + [0.0] * 3, [*map(math.cos, angles), *map(math.sin, angles)]]
    assert_close(embedding, torch.tensor(expected))


def test_the_time_embedding_tells_times_apart() -> None:
    embedding = TimeEmbedding(8, 16)(torch.tensor([0.0, 1.0, 500.0, 999.0]))
    assert embedding.shape == (4, 16)
    assert (torch.pdist(embedding) > 1e-3).all()


@pytest.mark.parametrize("block", ["residual", "self", "cross"])
def test_a_block_starts_as_the_identity_and_learns(block: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 16, 5, 7)
    module, inputs = {
        "residual": (ResidualBlock(16, 16, 11), (torch.randn(2, 11),)),
        "self": (SelfAttentionBlock(16, 8), ()),
        "cross": (CrossAttentionBlock(16, 13, 8), (torch.randn(2, 4, 13), torch.tensor([[1, 1, 0, 0], [1] * 4]))),
    }[block]
    assert_close(module(x, *inputs), x)

    last = module.out_conv if block == "residual" else module.attention.to_out
    torch.nn.init.normal_(last.weight)
    output = module(x, *inputs)
    assert not torch.allclose(output, x)
    output.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


def test_the_embedding_scales_and_shifts_the_normed_map() -> None:
    block = ResidualBlock(8, 8, 3)
    torch.nn.init.normal_(block.to_scale_shift.weight)
    torch.nn.init.normal_(block.out_conv.weight)
    x, embedding = torch.randn(1, 8, 4, 4), torch.randn(1, 3)
    scale, shift = block.to_scale_shift(embedding).reshape(2, 8, 1, 1)

    hidden = block.in_conv(torch.nn.functional.silu(block.in_norm(x)))
    hidden = block.out_norm(hidden) * (1 + scale) + shift
    assert_close(block(x, embedding), x + block.out_conv(torch.nn.functional.silu(hidden)))


def test_a_layer_has_attention_only_where_it_is_told() -> None:
    assert UNetLayer(8, 16, 4, None, 5).self_attention is None
    assert UNetLayer(8, 16, 4, None, 5).cross_attention is None
    assert UNetLayer(8, 16, 4, 8, None).cross_attention is None
    full = UNetLayer(8, 16, 4, 8, 5)
    assert full.self_attention.attention.heads == full.cross_attention.attention.heads == 2


@pytest.mark.parametrize(
    ("build", "message"),
    [(lambda: SelfAttentionBlock(32, 5), "5 and 32"), (lambda: group_norm(20), "multiple of 8.*20")],
)
def test_widths_that_do_not_divide_are_refused_naming_both(build, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_zero_init_zeroes_weight_and_bias() -> None:
    assert all((p == 0).all() for p in zero_init(torch.nn.Linear(3, 5)).parameters())

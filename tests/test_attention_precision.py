"""Half precision: scores far beyond what float16 can hold, in every form of the attention, and under autocast."""

import pytest
import torch
from einops import rearrange
from torch import Tensor, nn
from torch.testing import assert_close

from unet_attn.attention import (
    AttentionHead,
    CrossAttention2d,
    MultiHeadAttention,
    SelfAttention2d,
    attention,
    multi_head_attention,
)
from unet_attn.attention_extras import attention_in_chunks


def explicit(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    return attention(query, key, value, mask)[0]


def fused(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    merged = (rearrange(x, "b heads n d -> b n (heads d)") for x in (query, key, value))
    output = multi_head_attention(*merged, heads=query.shape[1], mask=mask)
    return rearrange(output, "b n (heads d) -> b heads n d", heads=query.shape[1])


def chunked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    return attention_in_chunks(query, key, value, mask, chunk=2)


FORMS = pytest.mark.parametrize("form", [explicit, fused, chunked])
HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def forward_and_backward(form, inputs: tuple[Tensor, ...], mask: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    output = form(*inputs, mask)
    output.backward(randn(*output.shape, seed=3).to(output.dtype))
    return output.detach(), [x.grad for x in inputs]


@FORMS
@HALVES
@pytest.mark.parametrize("masked", [False, True])
def test_scores_of_hundreds_of_thousands_are_as_good_as_small_ones(form, dtype: torch.dtype, masked: bool) -> None:
    # scores of 300 x 300 x 64 / 8 = 720,000, which differ by a few units: float16 ends at 65,504
    query = (300 * torch.ones(1, 2, 5, 64)).to(dtype)
    key = (300 + 0.03 * randn(1, 2, 7, 64, seed=1)).to(dtype)
    value = randn(1, 2, 7, 64, seed=2).to(dtype)
    mask = torch.tensor([[[[1, 1, 1, 1, 1, 0, 0]] * 4 + [[0] * 7]]]) if masked else None
    output, gradients = forward_and_backward(form, (query, key, value), mask)
    assert output.dtype == dtype and all(x.dtype == dtype for x in gradients)

    small = [x.float() for x in (query, key - 300, value)]  # the same weights, from small scores in float32
    expected, expected_gradients = forward_and_backward(explicit, small, mask)
    tolerance = 4e-3 if dtype == torch.float16 else 3e-2
    assert_close(output.float(), expected, atol=tolerance, rtol=tolerance)
    assert_close(gradients[2].float(), expected_gradients[2], atol=5 * tolerance, rtol=5 * tolerance)
    assert_close(gradients[1].float(), expected_gradients[1], atol=300 * tolerance, rtol=5 * tolerance)
    assert gradients[0].isfinite().all()


@FORMS
@HALVES
def test_values_near_the_end_of_the_range_have_finite_gradients(form, dtype: torch.dtype) -> None:
    query, key = (1e-3 * randn(1, 1, n, 64, seed=n) for n in (5, 7))
    value = 60_000 * torch.ones(1, 1, 7, 64)  # a gradient of the weights is a sum of 64 such
    output, gradients = forward_and_backward(form, tuple(x.to(dtype) for x in (query, key, value)), None)
    assert_close(output.float(), torch.full(output.shape, 60_000.0), atol=0, rtol=1e-2)
    assert all(x.isfinite().all() for x in gradients)


@FORMS
@HALVES
def test_equal_scores_beyond_the_range_share_the_weight(form, dtype: torch.dtype) -> None:
    q = k = torch.full((1, 1, 3, 64), 60.0, dtype=dtype)
    v = torch.arange(3 * 64).reshape(1, 1, 3, 64).to(dtype) / 100
    output = form(q, k, v, torch.ones(1, 1, 1, 3))
    assert_close(output.float(), v.float().mean(-2, keepdim=True).expand(-1, -1, 3, -1), atol=1e-2, rtol=1e-2)


def modules() -> dict[str, tuple[nn.Module, tuple[Tensor, ...]]]:
    torch.manual_seed(0)
    tokens, text, image = randn(2, 5, 12, seed=1), randn(2, 4, 7, seed=2), randn(2, 12, 3, 5, seed=3)
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0]])
    return {
        "head": (AttentionHead(12, 4), (tokens,)),
        "tokens": (MultiHeadAttention(12, 3, context_dim=7), (tokens, text, text, mask)),
        "map": (CrossAttention2d(12, 7, 3, 4), (image, text, mask)),
    }


@pytest.mark.parametrize("kind", ["head", "tokens", "map"])
@HALVES
def test_under_autocast_the_weights_are_those_of_large_scores_too(kind: str, dtype: torch.dtype) -> None:
    module, inputs = modules()[kind]
    inputs = [1000 * x if x.is_floating_point() else x for x in inputs]
    asked = {} if kind == "head" else {"return_weights": True}
    _, expected = module(*inputs, **asked)
    with torch.autocast("cpu", dtype=dtype):
        output, weights = module(*inputs, **asked)
        if kind != "head":
            assert_close(output, module(*inputs), atol=2.0, rtol=3e-2)  # of some hundreds
    assert output.isfinite().all() and output.dtype == dtype
    # with scores this large nearly every query heeds one key; that one is the same but for near ties
    assert (weights.argmax(-1) == expected.argmax(-1)).float().mean() > 0.9
    sums = weights.float().sum(-1)
    assert ((sums - 1).abs() < 1e-2).logical_or(sums == 0).all()


@pytest.mark.parametrize("kind", ["self", "map", "tokens"])
def test_autocast_to_bfloat16_stays_close_to_float32(kind: str) -> None:
    module, inputs = modules()[kind] if kind != "self" else (SelfAttention2d(11, 3, 5), (randn(2, 11, 5, 7, seed=4),))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = module(*inputs)
    output.float().sum().backward()
    assert_close(output.float(), module(*inputs), atol=3e-2, rtol=3e-2)
    assert all(parameter.grad.isfinite().all() for parameter in module.parameters())


@pytest.mark.parametrize("lowest", [-1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_bias_that_is_far_below_for_every_key_of_a_query_changes_nothing(dtype: torch.dtype, lowest: float) -> None:
    heads, width = 2, 8
    query, key, value = (randn(1, 4, heads * width, seed=seed).to(dtype).requires_grad_() for seed in range(3))
    bias = torch.zeros(1, 1, 4, 4)
    bias[..., 2, :] = lowest
    bias[..., 3, 0] = lowest  # for one key alone it hides it

    def mixed(bias: Tensor) -> Tensor:
        return multi_head_attention(query, key, value, heads=heads, bias=bias)

    def weighed(bias: Tensor) -> Tensor:
        split = (rearrange(x, "b n (heads d) -> b heads n d", heads=heads) for x in (query, key, value))
        return rearrange(attention(*split, bias=bias)[0], "b heads n d -> b n (heads d)")

    near = {"rtol": 0.0, "atol": 2e-2 if dtype == torch.bfloat16 else 2e-3}
    for form in (mixed, weighed):
        plain, biased = form(torch.zeros_like(bias)), form(bias)
        assert_close(biased[:, :3], plain[:, :3], **near)
        assert not torch.allclose(biased[:, 3], plain[:, 3], **near)
        gradients = [torch.autograd.grad(x[:, 2].float().sum(), (query, key, value)) for x in (plain, biased)]
        for expected, found in zip(*gradients, strict=True):
            assert_close(found, expected, **near)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_bias_that_is_far_below_for_every_key_that_a_mask_leaves_changes_nothing(dtype: torch.dtype) -> None:
    query, key, value = (randn(1, 4, 8, seed=seed).to(dtype) for seed in range(3))
    mask, bias = torch.tensor([[True, True, True, False]]), torch.full((4, 4), -1e9)
    bias[:, 3] = 0.0  # the largest of its row, where nothing may look
    for form in (
        lambda **options: multi_head_attention(query, key, value, heads=1, mask=mask, **options),
        lambda **options: attention(query, key, value, mask[:, None], **options)[0],
    ):
        assert_close(form(bias=bias), form(), rtol=0.0, atol=2e-3)


def test_a_bias_of_minus_infinity_for_every_key_still_gives_nothing() -> None:
    query = randn(1, 3, 8, seed=0)
    bias = torch.zeros(3, 3)
    bias[1] = float("-inf")
    output, weights = attention(query, query, query, bias=bias)
    assert torch.equal(output[:, 1], torch.zeros(1, 8)) and torch.equal(weights[:, 1], torch.zeros(1, 3))
    assert output.isfinite().all()

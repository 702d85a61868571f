"""Masks and biases that do not fit, by the name of what would, and the explicit form under a bias."""

from collections.abc import Callable

import pytest
import torch
from einops import rearrange
from torch import Tensor
from torch.testing import assert_close

from unet_attn.attention import (
    AttentionHead,
    CrossAttention2d,
    MultiHeadAttention,
    attention,
    multi_head_attention,
)
from unet_attn.attention_extras import ExtendedMultiHeadAttention, attention_in_chunks
from unet_attn.transformer import EncoderLayer, masked_mean


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# each takes a mask for a batch of 2, 4 heads, 3 queries and 7 keys
QUERY, KEYS = randn(2, 3, 8), randn(2, 7, 8, seed=1)
SPLIT = (randn(2, 4, 3, 5), randn(2, 4, 7, 5, seed=1), randn(2, 4, 7, 5, seed=2))
CALLS: dict[str, Callable[[Tensor], object]] = {
    "attention": lambda mask: attention(*SPLIT, mask),
    "chunks": lambda mask: attention_in_chunks(*SPLIT, mask),
    "fused": lambda mask: multi_head_attention(QUERY, KEYS, KEYS, heads=4, mask=mask),
    "module": lambda mask: MultiHeadAttention(8, 4)(QUERY, KEYS, KEYS, mask),
    "module with weights": lambda mask: MultiHeadAttention(8, 4)(QUERY, KEYS, KEYS, mask, return_weights=True),
    "extended": lambda mask: ExtendedMultiHeadAttention(8, 4)(QUERY, KEYS, KEYS, mask),
    "map": lambda mask: CrossAttention2d(8, 8, 4, 2)(randn(2, 8, 3, 1), KEYS, mask),
    "map with weights": lambda mask: CrossAttention2d(8, 8, 4, 2)(randn(2, 8, 3, 1), KEYS, mask, return_weights=True),
}
ANY_AXES = ("attention", "chunks")


@pytest.mark.parametrize("call", CALLS)
def test_a_mask_of_a_wrong_length_is_refused_with_both_lengths(call: str) -> None:
    with pytest.raises(ValueError, match="mask is for 5 keys, but there are 7"):
        CALLS[call](torch.ones(2, 1, 1, 5) if call in ANY_AXES else torch.ones(2, 5))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("shape", [(3, 4, 3, 7), (2, 3, 3, 7), (3, 1, 1, 7), (2, 4, 5, 7)])
def test_a_mask_of_a_wrong_batch_heads_or_queries_is_refused_with_both_shapes(
    call: str, shape: tuple[int, ...]
) -> None:
    wanted = r"must broadcast to \(2, 4, 3, 7\), got shape " + rf"\({', '.join(map(str, shape))}\)"
    if call == "chunks" and shape[2] == 5:
        wanted = "5 queries, but there are 3"
    with pytest.raises(ValueError, match=wanted):
        CALLS[call](torch.ones(shape))


@pytest.mark.parametrize("call", [name for name in CALLS if name not in ANY_AXES])
def test_the_shorter_forms_of_a_mask_are_refused_by_the_shape_that_was_given(call: str) -> None:
    with pytest.raises(ValueError, match=r"must broadcast to \(2, 7\), got shape \(3, 7\)"):
        CALLS[call](torch.ones(3, 7))
    with pytest.raises(ValueError, match=r"must broadcast to \(2, 3, 7\), got shape \(4, 3, 7\)"):
        CALLS[call](torch.ones(4, 3, 7))
    for shape in ((7,), (1, 2, 4, 3, 7)):
        with pytest.raises(ValueError, match=r"\(B, Nk\), \(B, Nq, Nk\) or \(B, heads, Nq, Nk\), got shape"):
            CALLS[call](torch.ones(shape))


def test_more_axes_than_the_scores_have_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must broadcast to \(3, 7\), got shape \(2, 3, 7\)"):
        attention(randn(3, 5), randn(7, 5), randn(7, 5), torch.ones(2, 3, 7))
    with pytest.raises(ValueError, match=r"must broadcast to \(2, 7, 7\), got shape \(3, 1, 7\)"):
        AttentionHead(8, 4)(KEYS, torch.ones(3, 7))


@pytest.mark.parametrize("call", CALLS)
def test_a_mask_that_is_no_tensor_is_refused_by_its_type(call: str) -> None:
    mask = torch.ones((2, 1, 1, 7) if call in ANY_AXES else (2, 7))
    for given, kind in ((mask.numpy(), "ndarray"), (mask.tolist(), "list")):
        with pytest.raises(ValueError, match=f"^mask must be a tensor, got a {kind}$"):
            CALLS[call](given)


def test_so_is_a_bias_and_a_mask_where_axes_are_put_before_it() -> None:
    head, memory = AttentionHead(8, 4), ExtendedMultiHeadAttention(8, 4, memory_tokens=2)
    for given, kind in ((torch.ones(2, 7).numpy(), "ndarray"), ([[1] * 7] * 2, "list")):
        for call in (lambda mask: head(KEYS, mask), lambda mask: memory(KEYS, KEYS, KEYS, mask)):
            with pytest.raises(ValueError, match=f"mask must be a tensor, got a {kind}"):
                call(given)
        for call in (
            lambda bias: attention(*SPLIT, bias=bias),
            lambda bias: multi_head_attention(QUERY, KEYS, KEYS, heads=4, bias=bias),
            lambda bias: memory(KEYS, KEYS, KEYS, bias=bias),
        ):
            with pytest.raises(ValueError, match=f"bias must be a tensor, got a {kind}"):
                call(given)


@pytest.mark.parametrize("call", CALLS)
def test_nan_in_a_mask_is_not_zero_and_so_may_be_attended(call: str) -> None:
    mask = torch.ones(2, 1, 1, 7)
    mask[..., 0] = 0
    torch.manual_seed(0)
    expected = CALLS[call](mask)
    torch.manual_seed(0)
    assert_close(CALLS[call](mask.masked_fill(mask == 1, torch.nan)), expected)


@pytest.mark.parametrize("batches", [(1, 2, 2), (2, 1, 1), (4, 2, 2), (2, 2, 1), (2, 1, 2)])
@pytest.mark.parametrize("masked", [False, True])
def test_two_batch_sizes_are_refused_and_none_is_broadcast(batches: tuple[int, int, int], masked: bool) -> None:
    query, key, value = (randn(batch, n, 8) for batch, n in zip(batches, (3, 7, 7), strict=True))
    mask = torch.ones(max(batches), 7) if masked else None
    said = "query, key and value must have one batch size, got {}, {} and {}".format(*batches)
    for call in (
        lambda: multi_head_attention(query, key, value, heads=4, mask=mask),
        lambda: MultiHeadAttention(8, 4)(query, key, value, mask),
        lambda: MultiHeadAttention(8, 4)(query, key, value, mask, return_weights=True),
        lambda: ExtendedMultiHeadAttention(8, 4, memory_tokens=2)(query, key, value, mask),
    ):
        with pytest.raises(ValueError, match=said):
            call()
    if batches[1] == batches[2]:
        feature_map = rearrange(query, "b n c -> b c n 1")
        said = f"map and context must have one batch size, got {batches[0]} and {batches[1]}"
        for weights in (False, True):
            with pytest.raises(ValueError, match=said):
                CrossAttention2d(8, 8, 4, 2)(feature_map, key, mask, return_weights=weights)


def test_the_textbook_form_broadcasts_its_leading_axes() -> None:
    query, key, value = SPLIT
    output, weights = attention(query[:1], key, value[:, :1])
    expected = attention(query[:1].expand_as(query), key, value[:, :1].expand_as(value))
    assert_close((output, weights), expected)
    assert output.shape == (2, 4, 3, 5)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("shape", [(1, 1, 1, 7), (2, 1, 1, 1), (1, 4, 3, 7), (2, 4, 3, 7)])
def test_a_size_of_one_serves_all(call: str, shape: tuple[int, ...]) -> None:
    mask = torch.ones(shape)
    mask[..., 0] = 0
    torch.manual_seed(0)
    found = CALLS[call](mask)
    torch.manual_seed(0)
    expected = CALLS[call](mask.expand(2, 4, 3, 7))
    assert_close(found, expected)


def test_a_layer_and_the_mean_over_tokens_refuse_it_too() -> None:
    with pytest.raises(ValueError, match=r"\(2, 7\), got shape \(3, 7\)"):
        EncoderLayer(8, 4, 16)(KEYS, torch.ones(3, 7))
    for shape in ((3, 7), (2, 5), (2, 1), (2, 7, 1)):
        with pytest.raises(ValueError, match=r"mask must be \(2, 7\), as there are tokens, got shape"):
            masked_mean(KEYS, torch.ones(shape))
    assert_close(masked_mean(KEYS, torch.ones(1, 7)), KEYS.mean(1))
    for mask in (None, torch.ones(2, 0)):
        assert torch.equal(masked_mean(KEYS[:, :0], mask), torch.zeros(2, 8))


@pytest.mark.parametrize("memory_tokens", [0, 2])
def test_nan_in_a_token_that_no_query_may_read_reaches_no_gradient_of_the_extended_module(memory_tokens: int) -> None:
    module = ExtendedMultiHeadAttention(8, 4, kv_heads=2, qk_norm=True, memory_tokens=memory_tokens)
    mask = torch.tensor([[1, 1, 0, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1, 1]])
    for given in (mask, mask[:, None].expand(2, 3, 7), mask[:, None, None].expand(2, 4, 3, 7)):
        found = []
        for hidden in (0.0, torch.nan):
            keys = KEYS.masked_fill(mask[..., None] == 0, hidden)
            output = module(QUERY, keys, keys, given)
            found.append((output, *torch.autograd.grad(output.square().sum(), list(module.parameters()))))
        for clean, spoilt in zip(*found, strict=True):
            assert clean.isfinite().all() and torch.equal(clean, spoilt)


def test_a_bias_that_does_not_fit_is_refused_with_both_shapes() -> None:
    for shape in ((3, 5), (2, 3, 7), (1, 2, 4, 3, 7)):
        said = r"bias must broadcast to \(2, 4, 3, 7\), got shape " + rf"\({', '.join(map(str, shape))}\)"
        with pytest.raises(ValueError, match=said):
            attention(*SPLIT, bias=torch.zeros(shape))
        with pytest.raises(ValueError, match=said):
            multi_head_attention(QUERY, KEYS, KEYS, heads=4, bias=torch.zeros(shape))


@pytest.mark.parametrize("weights", [False, True])
def test_keys_and_values_of_two_lengths_are_refused(weights: bool) -> None:
    for query, key, value in ((QUERY, KEYS, KEYS[:, :5]), (QUERY, KEYS[:, :5], KEYS)):
        with pytest.raises(ValueError, match=f"got {value.shape[1]} values and {key.shape[1]} keys"):
            MultiHeadAttention(8, 4)(query, key, value, return_weights=weights)


@pytest.mark.parametrize("shape", [(2, 4, 3, 7), (1, 4, 3, 7), (3, 7)])
@pytest.mark.parametrize("masked", [False, True])
def test_under_a_bias_the_explicit_form_is_the_fused_one(shape: tuple[int, ...], masked: bool) -> None:
    inputs = [x.clone().requires_grad_() for x in SPLIT]
    bias = randn(*shape, seed=3)
    bias[..., 1, :], bias[..., 0, 2:] = -torch.inf, -torch.inf  # a query without any key, and one with two
    mask = torch.tensor([[[[1, 0, 1, 1, 1, 1, 1]]], [[[0] * 7]]]) if masked else None
    output, weights = attention(*inputs, mask, bias=bias)
    output.square().sum().backward()

    merged = [rearrange(x.detach(), "b heads n d -> b n (heads d)").requires_grad_() for x in inputs]
    fused = multi_head_attention(*merged, heads=4, mask=mask, bias=bias)
    fused.square().sum().backward()
    assert_close(rearrange(output, "b heads n d -> b n (heads d)"), fused, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(inputs, merged, strict=True):
        assert_close(rearrange(ours.grad, "b heads n d -> b n (heads d)"), theirs.grad, atol=1e-5, rtol=1e-5)
    assert (weights[:, :, 1] == 0).all() and (weights[:, :, 0, 2:] == 0).all()
    assert_close(weights[0].sum(-1), torch.tensor([1.0, 0.0, 1.0]).expand(4, 3))


@pytest.mark.parametrize("keys", [1, 7, 15, 16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_nan_in_a_query_or_key_is_not_lost_without_a_mask(keys: int, is_causal: bool) -> None:
    spoilt = KEYS[:, :1].expand(-1, keys, -1).masked_fill(torch.arange(keys)[:, None] == 0, torch.nan)
    clean = KEYS[:, :1].expand(-1, keys, -1)

    for query, key in ((spoilt, clean), (clean, spoilt)):
        output = multi_head_attention(query, key, clean, heads=4, is_causal=is_causal)

        assert output[:, 0].isnan().all()
        assert output[:, 1:].isnan().all() if key is spoilt else output[:, 1:].isfinite().all()


def test_a_bias_or_mask_without_axes_holds_for_all_and_a_bias_of_truths_is_refused() -> None:
    expected = multi_head_attention(QUERY, KEYS, KEYS, heads=4)

    assert_close(multi_head_attention(QUERY, KEYS, KEYS, heads=4, bias=torch.tensor(3.0)), expected)
    assert_close(attention(*SPLIT, torch.tensor(1), bias=torch.tensor(3.0))[0], attention(*SPLIT)[0])
    assert (attention(*SPLIT, torch.tensor(0))[0] == 0).all()
    with pytest.raises(ValueError, match="bias is added to the scores, so it must be numbers"):
        multi_head_attention(QUERY, KEYS, KEYS, heads=4, bias=torch.ones(3, 7) > 0)

"""What can be added to attention: each off by default, each against a plain computation."""

import pytest
import torch
from einops import rearrange
from torch import Tensor, nn
from torch.testing import assert_close

from unet_attn.attention import MultiHeadAttention, SelfAttention2d, attention
from unet_attn.attention_extras import (
    ExtendedMultiHeadAttention,
    LinearAttention2d,
    OverPixels,
    RelativeOverPixels,
    RelativePositionBias2d,
    Residual,
    RMSNorm2d,
    RotaryOverPixels,
    attention_in_chunks,
    rotate,
    rotation_2d,
)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def heads_of(x: Tensor, heads: int) -> Tensor:
    return rearrange(x, "b n (h d) -> b h n d", h=heads)


# --------------------------------------------------------------------------------------------------------------- tokens


def test_without_any_extra_it_is_multi_head_attention() -> None:
    extended, plain = ExtendedMultiHeadAttention(15, 3, context_dim=7), MultiHeadAttention(15, 3, context_dim=7)
    plain.load_state_dict(extended.state_dict())
    x, context, mask = torch.randn(2, 5, 15), torch.randn(2, 11, 7), torch.rand(2, 11) > 0.5
    assert_close(extended(x, context, context, mask), plain(x, context, context, mask), atol=1e-6, rtol=1e-5)


def test_grouped_heads_share_keys_and_values() -> None:
    module = ExtendedMultiHeadAttention(24, 6, kv_heads=2)
    x = torch.randn(2, 5, 24)
    query, key, value = heads_of(module.to_q(x), 6), heads_of(module.to_k(x), 2), heads_of(module.to_v(x), 2)
    outputs = [attention(query[:, h], key[:, h // 3], value[:, h // 3])[0] for h in range(6)]
    assert_close(module(x, x, x), module.to_out(torch.cat(outputs, -1)), atol=1e-5, rtol=1e-5)
    assert module.to_k.weight.shape == (8, 24)


@pytest.mark.parametrize("kv_heads", [0, 4, 12])
def test_heads_that_cannot_share_are_refused(kv_heads: int) -> None:
    with pytest.raises(ValueError, match=f"kv_heads must divide heads, got {kv_heads} and 6"):
        ExtendedMultiHeadAttention(24, 6, kv_heads=kv_heads)
    with pytest.raises(ValueError, match="25 does not divide into 6 heads"):
        ExtendedMultiHeadAttention(25, 6)


@pytest.mark.parametrize("heads", [0, None])
def test_no_heads_and_heads_of_no_width_are_refused(heads: int | None) -> None:
    with pytest.raises(ValueError, match=f"32 does not divide into {heads} heads"):
        ExtendedMultiHeadAttention(32, heads)
    with pytest.raises(ValueError, match=f"must be at least 1, got {heads} and 32"):
        LinearAttention2d(32, heads)
    with pytest.raises(ValueError, match=f"heads must be at least 1, got {heads}"):
        RelativePositionBias2d(heads, reach=2)
    for module in (ExtendedMultiHeadAttention, LinearAttention2d):
        with pytest.raises(ValueError, match="must be at least 1, got 4 and 0"):
            module(32, 4, 0)
    assert LinearAttention2d(32, 4, None).to_qkv.out_channels == 96


def test_qk_norm_bounds_the_scores_whatever_the_size_of_the_input() -> None:
    module = ExtendedMultiHeadAttention(12, 3, qk_norm=True, bias=False)
    x = torch.randn(2, 5, 12)
    # the value is not normed, so the output grows with the input, and with it alone
    assert_close(module(1000 * x, 1000 * x, x), module(x, x, x), atol=1e-4, rtol=1e-4)

    module.norm_q.weight.data.fill_(0.5)
    query, key = (F_rms(heads_of(linear(x), 3)) for linear in (module.to_q, module.to_k))
    output = attention(0.5 * query, key, heads_of(module.to_v(x), 3))[0]
    assert_close(module(x, x, x), module.to_out(rearrange(output, "b h n d -> b n (h d)")), atol=1e-5, rtol=1e-5)


def F_rms(x: Tensor) -> Tensor:
    return x / x.square().mean(-1, keepdim=True).sqrt()


def test_memory_tokens_are_read_even_where_every_given_token_is_masked() -> None:
    module = ExtendedMultiHeadAttention(12, 3, context_dim=7, memory_tokens=2)
    x, context = torch.randn(2, 5, 12), torch.randn(2, 4, 7)
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0]])
    memory = rearrange(module.memory, "kv n h d -> kv h n d")
    query, key, value = (
        heads_of(module.to_q(x), 3),
        heads_of(module.to_k(context), 3),
        heads_of(module.to_v(context), 3),
    )

    only_memory = attention(query[1], memory[0], memory[1])[0]
    both = attention(query[0], torch.cat([memory[0], key[0, :, :2]], 1), torch.cat([memory[1], value[0, :, :2]], 1))[0]
    expected = module.to_out(rearrange(torch.stack([both, only_memory]), "b h n d -> b n (h d)"))
    assert_close(module(x, context, context, mask), expected, atol=1e-5, rtol=1e-5)


def test_one_number_for_all_keys_leaves_memory_tokens_as_they_are() -> None:
    torch.manual_seed(0)
    layer = ExtendedMultiHeadAttention(12, heads=3, memory_tokens=2)
    x = torch.randn(2, 5, 12)
    mask, bias = torch.tensor([[1], [0]]), torch.randn(2, 1, 5, 1)
    assert torch.equal(layer(x, x, x, mask), layer(x, x, x, mask.expand(2, 5)))
    assert_close(layer(x, x, x, bias=bias), layer(x, x, x, bias=bias.expand(2, 3, 5, 5)))
    assert not torch.allclose(layer(x, x, x, bias=bias), layer(x, x, x))  # the memory has no bias
    with pytest.raises(ValueError, match="memory_tokens must be at least 0, got -1"):
        ExtendedMultiHeadAttention(12, heads=3, memory_tokens=-1)


def test_dropout_is_off_in_evaluation() -> None:
    x = torch.randn(2, 11, 12)
    for module in (ExtendedMultiHeadAttention(12, 3, dropout=0.5), MultiHeadAttention(12, 3, dropout=0.5)):
        assert not torch.equal(module(x, x, x), module(x, x, x))
        module.eval()
        assert torch.equal(module(x, x, x), module(x, x, x))


# ------------------------------------------------------------------------------------------------------------ positions


def test_rotary_scores_depend_on_the_offset_alone() -> None:
    rotation = rearrange(rotation_2d(5, 7, 8), "(h w) d two -> h w d two", h=5)
    query, key = torch.randn(8), torch.randn(8)

    def score(at: tuple[int, int], to: tuple[int, int]) -> Tensor:
        turned = [rotate(x[None, None, None], rotation[place][None])[0, 0, 0] for x, place in ((query, at), (key, to))]
        return turned[0] @ turned[1]

    assert_close(score((0, 1), (2, 4)), score((2, 3), (4, 6)), atol=1e-5, rtol=1e-5)
    assert (score((0, 1), (2, 4)) - score((0, 1), (3, 4))).abs() > 1e-3
    assert (score((0, 1), (2, 4)) - score((0, 1), (2, 5))).abs() > 1e-3
    assert_close(score((0, 0), (0, 0)), query @ key)


def test_rotary_positions_tell_pixels_apart_and_work_at_any_size() -> None:
    plain = OverPixels(ExtendedMultiHeadAttention(16, 2))
    rotary = RotaryOverPixels(plain.attention)
    for size in ((3, 5), (7, 2)):
        x = torch.randn(2, 16, *size)
        assert_close(plain(x.flip(-1)), plain(x).flip(-1), atol=1e-5, rtol=1e-5)
        assert (rotary(x.flip(-1)) - rotary(x).flip(-1)).abs().max() > 1e-4
    with pytest.raises(ValueError, match="divisible by 4, got 6"):
        RotaryOverPixels(ExtendedMultiHeadAttention(12, 2))


def test_the_relative_bias_has_a_number_per_offset_and_one_for_all_beyond_its_reach() -> None:
    module = RelativePositionBias2d(heads=2, reach=2)
    assert (module(3, 5) == 0).all()
    module.table.data.normal_()
    bias = rearrange(module(3, 5)[0], "n (hq wq) (hk wk) -> n hq wq hk wk", hq=3, hk=3)
    assert_close(bias[:, 0, 1, 1, 3], module.table[:, 2 + 1, 2 + 2])
    assert_close(bias[:, 0, 1, 1, 3], bias[:, 1, 0, 2, 2])
    assert_close(bias[:, 2, 4, 0, 0], module.table[:, 0, 0])
    with pytest.raises(ValueError, match="at least 1 pixel, got 0"):
        RelativePositionBias2d(2, 0)


def test_a_map_with_relative_bias_learns_to_look_to_its_left() -> None:
    attention_ = ExtendedMultiHeadAttention(8, 2, memory_tokens=1)
    module = RelativeOverPixels(attention_, reach=1)
    x = torch.randn(3, 8, 1, 6)
    assert_close(module(x), OverPixels(attention_)(x), atol=1e-6, rtol=1e-5)

    attention_.memory.data[0] *= 0  # so that the bias decides
    attention_.memory.data[1] *= 0
    module.position_bias.table.data[:, 1, 0] = 50.0
    output = module(x)[..., 3:]  # of the pixels at an offset of -1 and beyond, all share the number: their mean
    tokens = rearrange(x, "b c 1 w -> b w c")
    values = attention_.to_v(tokens)
    assert output.shape == (3, 8, 1, 3)
    lone = attention_.to_out(values[:, 0])  # pixel 1 has one to its left
    assert_close(module(x)[..., 0, 1], lone, atol=1e-4, rtol=1e-4)


# ----------------------------------------------------------------------------------------------------------------- maps


def test_over_pixels_equals_the_map_module_and_has_biases_besides() -> None:
    ours, module = SelfAttention2d(12, 3, 4), OverPixels(MultiHeadAttention(12, 3, bias=False))
    for number, linear in enumerate((module.attention.to_q, module.attention.to_k, module.attention.to_v)):
        linear.weight.data = ours.to_qkv.weight.flatten(1).chunk(3)[number].clone()
    module.attention.to_out.weight.data = ours.to_out.weight.flatten(1).clone()
    module.attention.to_out.bias.data = ours.to_out.bias.clone()
    x = torch.randn(2, 12, 3, 5)
    for layout in (x, x.contiguous(memory_format=torch.channels_last), x.mT.contiguous().mT):
        assert_close(module(layout), ours(x), atol=1e-5, rtol=1e-5)


def test_linear_attention_equals_its_quadratic_form_and_serves_any_layout() -> None:
    module = LinearAttention2d(12, heads=3, dim_head=5)
    x = torch.randn(2, 12, 3, 7)
    query, key, value = rearrange(module.to_qkv(x), "b (qkv h d) y x -> qkv b h (y x) d", qkv=3, h=3)
    output = (query.softmax(-1) @ key.softmax(-2).mT) @ value
    expected = module.to_out(rearrange(output, "b h (y x) d -> b (h d) y x", y=3))
    assert_close(module(x), expected, atol=1e-5, rtol=1e-5)
    assert_close(module(x.contiguous(memory_format=torch.channels_last)), expected, atol=1e-5, rtol=1e-5)


def test_the_norm_gives_every_pixel_a_root_mean_square_of_its_scale() -> None:
    norm = RMSNorm2d(7)
    assert_close(norm(torch.randn(2, 7, 3, 5)).square().mean(1), torch.ones(2, 3, 5))
    norm.scale.data.fill_(3.0)
    assert_close(norm(torch.randn(2, 7, 3, 5)).square().mean(1), torch.full((2, 3, 5), 9.0))
    black_and_bright = torch.tensor([0.0, 3e4]).half().expand(1, 7, 1, 2)
    assert_close(norm.half()(black_and_bright), torch.tensor([0.0, 3.0]).half().expand(1, 7, 1, 2), atol=0.01, rtol=0)
    assert_close(Residual(nn.Identity())(torch.ones(3)), torch.full((3,), 2.0))


# --------------------------------------------------------------------------------------------------------------- chunks


def test_chunks_agree_with_the_whole_forward_and_backward() -> None:
    inputs = [torch.randn(2, 3, n, 5).requires_grad_() for n in (11, 7, 7)]
    mask = torch.rand(2, 1, 11, 7) > 0.3
    whole = attention(*inputs, mask)[0]
    expected = torch.autograd.grad(whole.square().sum(), inputs)
    for chunk in (1, 4, 11, 100):
        output = attention_in_chunks(*inputs, mask, chunk=chunk)
        assert_close(output, whole, atol=1e-6, rtol=1e-5)
        for ours, theirs in zip(torch.autograd.grad(output.square().sum(), inputs), expected, strict=True):
            assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="13 queries, but there are 11"):
        attention_in_chunks(*inputs, torch.ones(13, 7))
    for chunk in (0, -1):
        with pytest.raises(ValueError, match=f"chunk must be at least 1 query, got {chunk}"):
            attention_in_chunks(*inputs, mask, chunk=chunk)


def test_of_no_queries_the_chunks_are_empty() -> None:
    nothing, some = torch.zeros(2, 0, 4), torch.randn(2, 3, 4)
    assert attention_in_chunks(nothing, some, some).shape == (2, 0, 4)


def test_chunks_and_the_fused_kernel_never_hold_the_whole_matrix() -> None:
    """The largest tensor that either makes, while forward and backward run, stays far below Nq x Nk."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for x in result if isinstance(result, tuple | list) else (result,):
                self.elements = max(self.elements, x.numel() if isinstance(x, Tensor) else 0)
            return result

    inputs = [torch.randn(1, 1, 1024, 8).requires_grad_() for _ in range(3)]
    mask = torch.rand(1, 1, 1, 1024) > 0.1
    module = SelfAttention2d(8, 1, 8)
    for run in (
        lambda: attention_in_chunks(*inputs, mask, chunk=32),
        lambda: module(rearrange(inputs[0], "b 1 (h w) c -> b c h w", h=32)),
    ):
        with Largest() as largest:
            run().sum().backward()
        assert 8 * 1024 <= largest.elements <= 32 * 1024

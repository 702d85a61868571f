"""The attention core against hand computation, torch's own modules and itself in its other forms."""

import math

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


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def attention_by_hand(query: Tensor, key: Tensor, value: Tensor) -> tuple[list, list]:
    """Scalar loops in Python's float64; returns the rows of the output and of the weights."""
    queries, keys, values = (x.double().tolist() for x in (query, key, value))
    outputs, weights = [], []
    for q in queries:
        scores = [sum(a * b for a, b in zip(q, k, strict=True)) / math.sqrt(len(q)) for k in keys]
        exponentials = [math.exp(score - max(scores)) for score in scores]
        row = [e / sum(exponentials) for e in exponentials]
        weights.append(row)
        outputs.append([sum(w * v[i] for w, v in zip(row, values, strict=True)) for i in range(len(values[0]))])
    return outputs, weights


def test_attention_equals_a_computation_by_hand(generator: torch.Generator) -> None:
    query, key, value = (torch.randn(3, 4, generator=generator) for _ in range(3))
    output, weights = attention(query, key, value)

    by_hand, weights_by_hand = attention_by_hand(query, key, value)
    assert_close(output.double(), torch.tensor(by_hand, dtype=torch.float64), atol=1e-6, rtol=1e-6)
    assert_close(weights.double(), torch.tensor(weights_by_hand, dtype=torch.float64), atol=1e-6, rtol=1e-6)


def test_rows_of_weights_sum_to_one_and_masked_weights_are_exactly_zero(generator: torch.Generator) -> None:
    query, key, value = (torch.randn(2, n, 7, generator=generator) for n in (3, 5, 5))
    mask = torch.tensor([1, 0, 1, 1, 0])
    _, weights = attention(query, key, value, mask)

    assert_close(weights.sum(-1), torch.ones(2, 3))
    assert (weights[..., [1, 4]] == 0).all()
    assert (weights[..., [0, 2, 3]] > 0).all()


def test_dropout_is_applied_to_the_weights(generator: torch.Generator) -> None:
    query, key, value = (torch.randn(3, 4, generator=generator) for _ in range(3))
    output, weights = attention(query, key, value, dropout=lambda w: w * torch.eye(3))

    _, undropped = attention(query, key, value)
    assert_close(weights, undropped * torch.eye(3))
    assert_close(output, weights @ value)


def explicit(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return attention(query, key, value, mask)[0]


def fused(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    heads = query.shape[1]
    merged = (rearrange(x, "b heads n d -> b n (heads d)") for x in (query, key, value))
    mask = mask if mask.ndim == 4 else mask[None, None]
    return rearrange(multi_head_attention(*merged, heads=heads, mask=mask), "b n (heads d) -> b heads n d", heads=heads)


def chunked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return attention_in_chunks(query, key, value, mask, chunk=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", [explicit, fused, chunked])
def test_a_fully_masked_row_gives_zero_and_finite_gradients(
    form, dtype: torch.dtype, generator: torch.Generator
) -> None:
    q, k, v = (torch.randn(1, 2, 4, 8, generator=generator).to(dtype).requires_grad_() for _ in range(3))
    mask = torch.ones(1, 2, 4, 4, dtype=torch.bool)
    mask[:, :, 2] = False
    output = form(q, k, v, mask)
    output.sum().backward()

    assert (output[:, :, 2] == 0).all()
    rows = [0, 1, 3]
    unmasked = attention(q[:, :, rows], k, v)[0]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert_close(output[:, :, rows], unmasked, atol=tolerance, rtol=tolerance)
    assert all(x.grad.isfinite().all() for x in (q, k, v))
    assert (q.grad[:, :, 2] == 0).all()


@pytest.mark.parametrize("form", [explicit, fused, chunked])
def test_nan_in_a_key_that_nobody_may_read_reaches_nothing(form, generator: torch.Generator) -> None:
    q, k, v = (torch.randn(2, 3, n, 5, generator=generator) for n in (7, 4, 4))
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0]])[:, None, None]
    clean = form(q, k, v, mask)

    k[:, :, 2:], v[:, :, 2:] = float("nan"), float("nan")
    for x in (q, k, v):
        x.requires_grad_()
    output = form(q, k, v, mask)
    output.sum().backward()

    assert_close(output, clean)
    assert (output[1] == 0).all()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


@pytest.mark.parametrize("form", [explicit, fused, chunked])
@pytest.mark.parametrize("place", ["key", "value"])
def test_nan_reaches_the_queries_that_may_read_it_and_no_other(form, place: str, generator: torch.Generator) -> None:
    q, k, v = (torch.randn(2, 3, 6, 5, generator=generator).requires_grad_() for _ in range(3))
    mask = torch.ones(6, 6).tril()
    clean = form(q, k, v, mask).detach()

    ahead = torch.zeros(6, 1).index_fill(0, torch.tensor([3]), float("nan"))
    spoilt = {"key": (q, k + ahead, v), "value": (q, k, v + ahead)}[place]
    output = form(*spoilt, mask)
    output[:, :, :3].sum().backward()

    assert_close(output[:, :, :3], clean[:, :, :3])
    assert output[:, :, 3:].isnan().all()
    assert all(x.grad.isfinite().all() for x in (q, k, v))
    assert (k.grad[:, :, 3] == 0).all()


@pytest.mark.parametrize("kind", ["tokens", "map"])
def test_nan_in_padding_reaches_no_weight_gradient(kind: str, generator: torch.Generator) -> None:
    module = MultiHeadAttention(8, 2, context_dim=7) if kind == "tokens" else CrossAttention2d(8, 7, 2, 4)
    x = torch.randn(*((2, 5, 8) if kind == "tokens" else (2, 8, 5, 1)), generator=generator)
    context, mask = torch.randn(2, 3, 7, generator=generator), torch.tensor([[1, 1, 0], [1, 0, 0]])
    context[0, 2], context[1, 1:] = float("nan"), float("inf")
    output = module(x, context, context, mask) if kind == "tokens" else module(x, context, mask)
    output.sum().backward()
    assert output.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in module.parameters())


MASKS = {
    "keys": lambda m: m[:, 0, 0],
    "queries and keys": lambda m: m[:, 0],
    "one row for all queries": lambda m: m[:, 0, :1],
    "heads, queries and keys": lambda m: m,
    "one for all heads": lambda m: m[:, :1],
    "one for the batch": lambda m: m[:1, 0],
    "numbers": lambda m: m.long(),
    "floats": lambda m: m[:, 0].float(),
}


@pytest.mark.parametrize("form", MASKS)
def test_fused_explicit_and_chunked_agree_on_every_form_of_mask(form: str, generator: torch.Generator) -> None:
    q, k, v = (torch.randn(2, n, 15, generator=generator) for n in (7, 5, 5))
    mask = MASKS[form](torch.rand(2, 3, 7, 5, generator=generator) > 0.4)
    output = multi_head_attention(q, k, v, heads=3, mask=mask)

    full = {2: lambda m: m[:, None, None], 3: lambda m: m[:, None], 4: lambda m: m}[mask.ndim](mask)
    split = [rearrange(x, "b n (h d) -> b h n d", h=3) for x in (q, k, v)]
    expected = attention(*split, full)[0]
    assert_close(output, rearrange(expected, "b h n d -> b n (h d)"), atol=1e-5, rtol=1e-5)
    assert_close(attention_in_chunks(*split, full, chunk=3), expected, atol=1e-6, rtol=1e-6)


def test_padding_on_the_key_axis_equals_the_shorter_sequence(generator: torch.Generator) -> None:
    q, k, v = (torch.randn(2, n, 6, generator=generator) for n in (9, 4, 4))
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    output = multi_head_attention(q, k, v, heads=2, mask=mask)

    alone = multi_head_attention(q[1:], k[1:, :2], v[1:, :2], heads=2)
    assert_close(output[1:], alone, atol=1e-6, rtol=1e-6)
    k[1, 2:], v[1, 2:] = 100.0, -100.0
    assert_close(multi_head_attention(q, k, v, heads=2, mask=mask), output)


def test_causal_bias_and_padding_combine(generator: torch.Generator) -> None:
    q, k, v = (torch.randn(2, 5, 6, generator=generator) for _ in range(3))
    bias = torch.randn(2, 5, 5, generator=generator)
    padding = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 0, 0]])
    causal = torch.ones(5, 5).tril().bool()

    for mask in (None, padding):
        output = multi_head_attention(q, k, v, heads=2, mask=mask, bias=bias, is_causal=True)
        allowed = causal if mask is None else causal & mask[:, None, None].bool()
        qs, ks, vs = (rearrange(x, "b n (h d) -> b h n d", h=2) for x in (q, k, v))
        scores = (qs @ ks.mT / math.sqrt(3) + bias).masked_fill(~allowed, -math.inf)
        expected = rearrange(scores.softmax(-1).nan_to_num() @ vs, "b h n d -> b n (h d)")
        assert_close(output, expected, atol=1e-5, rtol=1e-5)
    assert (output[1, 0] == 0).all()


def test_is_causal_alone_hides_the_future(generator: torch.Generator) -> None:
    q, k, v = (torch.randn(1, 6, 4, generator=generator) for _ in range(3))
    output = multi_head_attention(q, k, v, heads=1, is_causal=True)
    assert_close(output[:, :3], multi_head_attention(q[:, :3], k[:, :3], v[:, :3], heads=1, is_causal=True))
    assert_close(output[:, 0], v[:, 0])


def test_a_head_is_scaled_by_its_own_width_and_returns_its_weights(generator: torch.Generator) -> None:
    head = AttentionHead(48, 12)
    x = torch.randn(2, 5, 48, generator=generator)
    output, weights = head(x)
    assert output.shape == (2, 5, 12) and weights.shape == (2, 5, 5)
    assert_close(weights, (head.query(x) @ head.key(x).mT / math.sqrt(12)).softmax(-1))

    assert AttentionHead(48, 12, bias=False).query.bias is None
    _, masked = head(x, torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]))
    assert (masked[0, :, 3:] == 0).all()


@pytest.mark.parametrize(("dim", "heads"), [(48, 4), (256, 8)])
def test_heads_side_by_side_equal_one_multi_head_module(dim: int, heads: int, generator: torch.Generator) -> None:
    module = MultiHeadAttention(dim, heads)
    module.to_out.weight.data.copy_(torch.eye(dim))
    module.to_out.bias.data.zero_()
    x = torch.randn(2, 7, dim, generator=generator)

    width = dim // heads
    outputs, weights = [], []
    for i in range(heads):
        head = AttentionHead(dim, width)
        rows = slice(i * width, (i + 1) * width)
        for ours, theirs in ((head.query, module.to_q), (head.key, module.to_k), (head.value, module.to_v)):
            ours.weight.data.copy_(theirs.weight[rows])
            ours.bias.data.copy_(theirs.bias[rows])
        output, weight = head(x)
        outputs.append(output)
        weights.append(weight)

    output, weight = module(x, x, x, return_weights=True)
    assert_close(torch.cat(outputs, -1), output, atol=1e-5, rtol=1e-5)
    assert_close(torch.stack(weights, 1), weight, atol=1e-5, rtol=1e-5)
    assert_close(module(x, x, x), output, atol=1e-5, rtol=1e-5)


def test_multi_head_attention_equals_torchs_on_copied_weights(generator: torch.Generator) -> None:
    ours, torchs = MultiHeadAttention(24, 3), nn.MultiheadAttention(24, 3, batch_first=True)
    q, k, v = torchs.in_proj_weight.chunk(3)
    torchs.in_proj_bias.data.normal_(generator=generator)  # torch starts it at 0, which would hide a mix-up
    bq, bk, bv = torchs.in_proj_bias.chunk(3)
    ours.load_state_dict(
        {
            "to_q.weight": q, "to_q.bias": bq, "to_k.weight": k, "to_k.bias": bk, "to_v.weight": v, "to_v.bias": bv,
            "to_out.weight": torchs.out_proj.weight, "to_out.bias": torchs.out_proj.bias,
        }
    )  # fmt: skip
    x, memory = torch.randn(2, 5, 24, generator=generator), torch.randn(2, 7, 24, generator=generator)
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])

    expected, weights = torchs(x, memory, memory, key_padding_mask=mask == 0, average_attn_weights=False)
    assert_close(ours(x, memory, memory, mask), expected, atol=1e-5, rtol=1e-5)
    output, our_weights = ours(x, memory, memory, mask, return_weights=True)
    assert_close(output, expected, atol=1e-5, rtol=1e-5)
    assert_close(our_weights, weights, atol=1e-5, rtol=1e-5)


def test_dropout_acts_in_training_only(generator: torch.Generator) -> None:
    module = MultiHeadAttention(12, 3, dropout=0.5)
    x = torch.randn(1, 6, 12, generator=generator)
    assert not torch.equal(module(x, x, x), module(x, x, x))
    module.eval()
    assert_close(module(x, x, x), module(x, x, x, return_weights=True)[0], atol=1e-5, rtol=1e-5)


def layouts(x: Tensor) -> dict[str, Tensor]:
    return {
        "contiguous": x.contiguous(),
        "channels last": x.contiguous(memory_format=torch.channels_last),
        "transposed": x.transpose(2, 3).contiguous().transpose(2, 3),
        "strided": torch.stack([x, x], -1)[..., 0],
    }


def conv_modules() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {"self": SelfAttention2d(11, 3, 5), "cross": CrossAttention2d(11, 13, 3, 5)}


@pytest.mark.parametrize("kind", ["self", "cross"])
def test_every_memory_layout_gives_the_same_result_and_gradients(kind: str, generator: torch.Generator) -> None:
    module = conv_modules()[kind]
    x = torch.randn(2, 11, 5, 7, generator=generator)
    text = () if kind == "self" else (torch.randn(2, 4, 13, generator=generator), torch.tensor([[1, 1, 0, 0], [1] * 4]))

    results = {}
    for name, laid_out in layouts(x).items():
        laid_out = laid_out.detach().requires_grad_()
        output = module(laid_out, *text)
        (gradient,) = torch.autograd.grad(output.square().sum(), laid_out)
        results[name] = (output, gradient)
        if name == "channels last":
            assert output.is_contiguous(memory_format=torch.channels_last)
        else:
            assert output.is_contiguous()
    for output, gradient in results.values():
        assert_close(output, results["contiguous"][0], atol=1e-6, rtol=1e-5)
        assert_close(gradient, results["contiguous"][1], atol=1e-5, rtol=1e-4)

    expanded = x[:1].expand(3, -1, -1, -1)
    context = [t[:1].expand(3, *t.shape[1:]) for t in text]
    assert_close(module(expanded, *context)[2:], module(x, *text)[:1], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", ["self", "cross"])
def test_no_copy_of_a_contiguous_map_is_kept_for_the_backward_pass(kind: str, generator: torch.Generator) -> None:
    x = torch.randn(2, 11, 5, 7, generator=generator).requires_grad_()
    text = () if kind == "self" else (torch.randn(2, 4, 13, generator=generator),)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: kept.append(saved) or saved, lambda saved: saved):
        output = conv_modules()[kind](x, *text)
    maps = [saved for saved in kept if saved.shape == x.shape]
    assert maps and all(saved.data_ptr() == x.data_ptr() for saved in maps)
    assert output.is_contiguous()


def test_the_convolutional_form_equals_the_token_form_on_the_flattened_map(generator: torch.Generator) -> None:
    module = conv_modules()["self"]
    x = torch.randn(2, 11, 5, 7, generator=generator)
    tokens = rearrange(x, "b c h w -> b (h w) c")
    query, key, value = (tokens @ module.to_qkv.weight.flatten(1).T).chunk(3, -1)
    attended = multi_head_attention(query, key, value, heads=3)
    expected = attended @ module.to_out.weight.flatten(1).T + module.to_out.bias
    assert_close(module(x), rearrange(expected, "b (h w) c -> b c h w", h=5), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sizes", [(0, 5, 7), (3, 1, 1), (1, 1, 7), (1, 5, 1)])
@pytest.mark.parametrize("kind", ["self", "cross"])
def test_an_empty_batch_and_the_smallest_maps_train(kind: str, sizes: tuple[int, int, int]) -> None:
    module, (batch, height, width) = conv_modules()[kind], sizes
    x = torch.randn(batch, 11, height, width).requires_grad_()
    inputs = (x,) if kind == "self" else (x, torch.randn(batch, 1, 13), torch.ones(batch, 1))
    output, weights = module(*inputs, return_weights=True)
    assert output.shape == x.shape and weights.shape[:3] == (batch, 3, height * width)
    assert_close(module(*inputs), output, atol=1e-6, rtol=1e-5)
    module(*inputs).sum().backward()
    assert x.grad.shape == x.shape and all(parameter.grad.isfinite().all() for parameter in module.parameters())


@pytest.mark.parametrize("kind", ["self", "cross"])
def test_weights_of_the_map_agree_with_the_fused_output(kind: str, generator: torch.Generator) -> None:
    module = conv_modules()[kind]
    x, context = torch.randn(2, 11, 5, 7, generator=generator), torch.randn(2, 4, 13, generator=generator)
    mask = torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0]])
    inputs = (x,) if kind == "self" else (x, context, mask)
    output, weights = module(*inputs, return_weights=True)

    assert weights.shape == (2, 3, 35, 35 if kind == "self" else 4)
    assert_close(module(*inputs), output, atol=1e-5, rtol=1e-5)
    if kind == "cross":
        assert (weights[1] == 0).all() and (weights[0, ..., 3] == 0).all()
        assert_close(output[1], module.to_out.bias[:, None, None].expand(11, 5, 7))


def test_the_checkpoint_format_is_what_the_design_says() -> None:
    shapes = {k: {n: tuple(p.shape) for n, p in m.state_dict().items()} for k, m in conv_modules().items()}
    assert shapes["self"] == {"to_qkv.weight": (45, 11, 1, 1), "to_out.weight": (11, 15, 1, 1), "to_out.bias": (11,)}
    assert shapes["cross"] == {
        "to_q.weight": (15, 11, 1, 1), "to_kv.weight": (30, 13),
        "to_out.weight": (11, 15, 1, 1), "to_out.bias": (11,),
    }  # fmt: skip


@pytest.mark.parametrize(
    "build",
    [
        lambda: MultiHeadAttention(32, 5),
        lambda: SelfAttention2d(32, 5, None),
        lambda: CrossAttention2d(32, 7, 5, None),
        lambda: MultiHeadAttention(32, 0),
        lambda: MultiHeadAttention(32, None),
    ],
)
def test_heads_that_do_not_divide_the_width_are_refused(build) -> None:
    with pytest.raises(ValueError, match=r"32.*(5|0|None) heads"):
        build()


def test_dim_head_defaults_to_an_equal_share() -> None:
    assert SelfAttention2d(32, 4, None).to_qkv.out_channels == 96
    assert MultiHeadAttention(32, 4).to_q.out_features == 32
    with pytest.raises(ValueError, match="must be at least 1, got 0 and 32"):
        SelfAttention2d(32, 0)

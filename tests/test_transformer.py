"""Transformer layers against torch's own on copied weights, what each position may see, and a small translation."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from unet_attn.attention import MultiHeadAttention
from unet_attn.transformer import (
    DecoderLayer,
    EncoderLayer,
    FeedForward,
    TokenEmbedding,
    Transformer,
    causal_mask,
    masked_mean,
)

PHRASES = {
    "guten Morgen": "good morning",
    "guten Abend": "good evening",
    "gute Nacht": "good night",
    "Wie geht es dir": "how are you",
    "Wie geht es Ihnen": "how are you",
    "mir geht es gut": "I am fine",
    "ich bin müde": "I am tired",
    "wo ist der Bahnhof": "where is the station",
    "wo ist die Katze": "where is the cat",
    "die Katze schläft": "the cat is sleeping",
    "ich liebe dich": "I love you",
    "danke": "thank you",
}


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def copy_attention(ours: MultiHeadAttention, torchs: nn.MultiheadAttention) -> None:
    torchs.in_proj_bias.data.normal_()
    weights, biases = torchs.in_proj_weight.chunk(3), torchs.in_proj_bias.chunk(3)
    for layer, weight, bias in zip((ours.to_q, ours.to_k, ours.to_v), weights, biases, strict=True):
        layer.load_state_dict({"weight": weight, "bias": bias})
    ours.to_out.load_state_dict(torchs.out_proj.state_dict())


def copy_feed_forward(ours: FeedForward, layer: nn.Module) -> None:
    ours.expand.load_state_dict(layer.linear1.state_dict())
    ours.contract.load_state_dict(layer.linear2.state_dict())


def randomise(norm: nn.LayerNorm) -> None:
    norm.weight.data.normal_()
    norm.bias.data.normal_()


def test_encoder_layer_equals_torchs_on_copied_weights(generator: torch.Generator) -> None:
    torchs = nn.TransformerEncoderLayer(24, 3, 40, activation="gelu", norm_first=True, batch_first=True).eval()
    ours = EncoderLayer(24, 3, 40, dropout=0.1).eval()
    copy_attention(ours.attention, torchs.self_attn)
    copy_feed_forward(ours.feed_forward, torchs)
    for our_norm, norm in ((ours.attention_norm, torchs.norm1), (ours.feed_forward_norm, torchs.norm2)):
        randomise(norm)
        our_norm.load_state_dict(norm.state_dict())

    x = torch.randn(2, 7, 24, generator=generator)
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    with torch.enable_grad():  # keeps torch off its fused inference path, which reorders the padding
        expected = torchs(x, src_key_padding_mask=mask == 0)
    real = mask.bool()
    assert_close(ours(x, mask)[real], expected[real], atol=1e-5, rtol=1e-5)


def test_decoder_layer_equals_torchs_on_copied_weights(generator: torch.Generator) -> None:
    torchs = nn.TransformerDecoderLayer(24, 3, 40, activation="gelu", norm_first=True, batch_first=True).eval()
    ours = DecoderLayer(24, 3, 40, dropout=0.1).eval()
    copy_attention(ours.self_attention, torchs.self_attn)
    copy_attention(ours.cross_attention, torchs.multihead_attn)
    copy_feed_forward(ours.feed_forward, torchs)
    norms = (ours.self_attention_norm, ours.cross_attention_norm, ours.feed_forward_norm)
    for our_norm, norm in zip(norms, (torchs.norm1, torchs.norm2, torchs.norm3), strict=True):
        randomise(norm)
        our_norm.load_state_dict(norm.state_dict())

    x, memory = torch.randn(2, 5, 24, generator=generator), torch.randn(2, 7, 24, generator=generator)
    src_mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    tgt_mask = causal_mask(5)
    expected = torchs(x, memory, tgt_mask=~tgt_mask[0], memory_key_padding_mask=src_mask == 0)
    assert_close(ours(x, memory, src_mask, tgt_mask), expected, atol=1e-5, rtol=1e-5)


def test_causal_mask_is_a_lower_triangle_with_a_batch_axis() -> None:
    assert causal_mask(3).tolist() == [[[True, False, False], [True, True, False], [True, True, True]]]
    assert causal_mask(3).dtype == torch.bool


def test_a_position_of_the_decoder_does_not_depend_on_later_ones(generator: torch.Generator) -> None:
    layer = DecoderLayer(12, 3, 20)
    x, memory = torch.randn(2, 7, 12, generator=generator), torch.randn(2, 5, 12, generator=generator)
    output = layer(x, memory, tgt_mask=causal_mask(7))
    for i in range(7):
        changed = x.clone()
        changed[:, i + 1 :] = 9.0
        assert_close(layer(changed, memory, tgt_mask=causal_mask(7))[:, : i + 1], output[:, : i + 1])
    assert not torch.allclose(layer(changed * 2, memory)[:, :1], output[:, :1])


def test_the_decoder_reads_only_the_source_tokens_that_its_mask_allows(generator: torch.Generator) -> None:
    layer = DecoderLayer(12, 3, 20)
    x, memory = torch.randn(2, 7, 12, generator=generator), torch.randn(2, 5, 12, generator=generator)
    src_mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    output = layer(x, memory, src_mask)

    assert_close(output[1:], layer(x[1:], memory[1:, :2]), atol=1e-5, rtol=1e-5)
    memory[1, 2:] = 7.0
    assert_close(layer(x, memory, src_mask), output)
    memory[1, 1] = 7.0
    assert not torch.allclose(layer(x, memory, src_mask)[1], output[1])


def test_the_decoder_attends_to_itself_then_to_the_source_then_feeds_forward(generator: torch.Generator) -> None:
    layer = DecoderLayer(12, 3, 20)
    order = []
    for name in ("self_attention", "cross_attention", "feed_forward"):
        getattr(layer, name).register_forward_hook(lambda *_, name=name: order.append(name))
    x, memory = torch.randn(1, 4, 12, generator=generator), torch.randn(1, 5, 12, generator=generator)
    output = layer(x, memory, tgt_mask=causal_mask(4))
    assert order == ["self_attention", "cross_attention", "feed_forward"]

    normed = layer.self_attention_norm(x)
    x = x + layer.self_attention(normed, normed, normed, causal_mask(4))
    x = x + layer.cross_attention(layer.cross_attention_norm(x), memory, memory)
    x = x + layer.feed_forward(layer.feed_forward_norm(x))
    assert_close(output, x)


def test_masked_mean_counts_real_tokens_only() -> None:
    tokens = torch.tensor([[[1.0], [3.0], [float("nan")]], [[5.0], [6.0], [7.0]]])
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    assert masked_mean(tokens, mask).tolist() == [[2.0], [0.0]]
    assert masked_mean(tokens[1:], None).tolist() == [[6.0]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_masked_mean_of_large_tokens_is_as_exact_in_half_precision(dtype: torch.dtype) -> None:
    tokens, mask = torch.full((1, 77, 4), 1000.0, dtype=dtype, requires_grad=True), torch.ones(1, 77)
    mean = masked_mean(tokens, mask)
    assert mean.dtype == dtype and torch.equal(mean, tokens.mean(dim=1))
    assert torch.equal(mean, torch.full((1, 4), 1000.0, dtype=dtype))


def test_a_sequence_longer_than_the_positions_is_refused_naming_both() -> None:
    with pytest.raises(ValueError, match=r"9 tokens.*max_length 8"):
        TokenEmbedding(5, 4, 8)(torch.zeros(1, 9, dtype=torch.long))


def encode(sentences: list[str], vocabulary: dict[str, int]) -> torch.Tensor:
    """Word ids between <start> = 1 and <end> = 2, filled up with 0."""
    rows = [[1, *(vocabulary[word] for word in sentence.split()), 2] for sentence in sentences]
    length = max(map(len, rows))
    return torch.tensor([row + [0] * (length - len(row)) for row in rows])


def vocabulary_of(sentences: list[str]) -> dict[str, int]:
    words = sorted({word for sentence in sentences for word in sentence.split()})
    return {word: i + 3 for i, word in enumerate(words)}


def test_a_transformer_learns_to_translate_a_dozen_german_phrases() -> None:
    torch.manual_seed(0)
    german, english = list(PHRASES), list(PHRASES.values())
    source_words, target_words = vocabulary_of(german), vocabulary_of(english)
    source, target = encode(german, source_words), encode(english, target_words)
    model = Transformer(len(source_words) + 3, len(target_words) + 3, dim=32, depth=1, heads=4, max_length=8)

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(150):
        logits = model(source, target[:, :-1], source != 0)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    generated = model.generate(source, start_id=1, end_id=2, max_length=8, src_mask=source != 0)
    words = {i: word for word, i in target_words.items()}
    translations = [" ".join(words[i] for i in row if i in words) for row in generated.tolist()]
    assert dict(zip(german, translations, strict=True)) == PHRASES
    assert translations[german.index("Wie geht es dir")] == "how are you"


def test_a_finished_row_is_filled_with_the_end_token_while_others_go_on() -> None:
    torch.manual_seed(3)
    model = Transformer(7, 7, dim=8, depth=1, heads=2, max_length=8)
    source = torch.randint(3, 7, (5, 4))
    generated = model.generate(source, start_id=1, end_id=2, max_length=8)
    assert generated.shape[0] == 5 and generated.shape[1] <= 8
    assert (generated[:, 0] == 1).all()
    for row in generated.tolist():
        if 2 in row:
            assert set(row[row.index(2) :]) == {2}

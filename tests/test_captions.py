"""How many tokens of a caption are read: what both the tokenizer and the text model hold."""

import logging
from pathlib import Path

import pytest
import torch
from diffusers import ModelMixin
from pipeline_parts import scheduler_for, text_parts, tiny_unet
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoConfig, PreTrainedTokenizerFast

from unet_attn.inspection import describe_captions
from unet_attn.model import TextConditionalUNet
from unet_attn.pipelines.captions import (
    POSITIONS_AFTER_PADDING,
    caption_limit,
    caption_words,
    encode_captions,
    tokenize,
    warn_of_cuts,
)
from unet_attn.pipelines.text_to_image import TextToImagePipeline
from unet_attn.text_encoder import PretrainedText, TextEncoder

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
ROWS = 20  # of the table of positions
SIZES = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": ROWS,
}
OTHER_SIZES = {
    "bart": {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": ROWS}
    | {f"{part}_{key}": 2 for part in ("encoder", "decoder") for key in ("attention_heads", "ffn_dim")},
    "gpt2": {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": ROWS},
    "esm": SIZES | {"mask_token_id": 2},
    "longformer": SIZES | {"attention_window": [4]},
    "xmod": SIZES | {"default_language": "en_XX"},
}


def text_model(kind: str) -> tuple[PretrainedText, PreTrainedTokenizerFast]:
    """A tiny text model with ROWS positions, and a tokenizer that has no limit of its own."""
    _, tokenizer = text_parts()
    tokenizer.model_max_length = 10**30  # what transformers writes where the limit is not known
    ids = {"vocab_size": len(tokenizer), "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    config = AutoConfig.for_model(kind, **OTHER_SIZES.get(kind, SIZES), **ids)
    return PretrainedText("", config.to_dict()), tokenizer


@pytest.mark.parametrize("kind", [*POSITIONS_AFTER_PADDING, "bart", "bert", "distilbert", "gpt2"])
def test_a_long_caption_fills_the_positions_of_a_text_model_and_no_more(kind: str) -> None:
    encoder, tokenizer = text_model(kind)
    limit = ROWS - 2 if kind in POSITIONS_AFTER_PADDING else ROWS

    states, mask = encode_captions(["w " * 50], tokenizer, encoder)

    assert states.shape == (1, limit, 8) and mask.all()
    for count, fits in ((limit, True), (limit + 1, False)):
        ids, ones = torch.full((1, count), 5), torch.ones(1, count, dtype=torch.long)
        if fits:
            assert encoder(ids, ones).last_hidden_state.isfinite().all()
            continue
        with pytest.raises((IndexError, RuntimeError)):
            encoder(ids, ones)


def test_the_tokenizers_limit_holds_where_it_is_the_smaller() -> None:
    encoder, tokenizer = text_model("roberta")
    for own, limit in ((1000, ROWS - 2), (7, 7)):
        tokenizer.model_max_length = own
        assert caption_limit(tokenizer, encoder) == limit
        assert encode_captions(["w " * 50], tokenizer, encoder)[0].shape == (1, limit, 8)


def test_what_is_counted_as_cut_and_what_is_exported_follow_the_same_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from export import settings_of

    encoder, tokenizer = text_model("roberta")
    tokenizer.model_max_length = 1000
    limit = caption_limit(tokenizer, encoder)
    texts = ["w " * count for count in (8, 9, 50)]  # two tokens each, a start and an end
    assert describe_captions([texts], tokenizer, limit=limit).cut == 2

    pipe = TextToImagePipeline(tiny_unet(context_dim=8), scheduler_for("flow"), encoder, tokenizer)
    assert settings_of(pipe)["text"]["max_length"] == limit == ROWS - 2


def words_only(**special: str) -> PreTrainedTokenizerFast:
    """A tokenizer of words that adds no special tokens, as GPT-2's."""
    words = {word: number for number, word in enumerate(("<|end|>", "a", "red", "heart"))}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<|end|>")), model_max_length=8, **special
    )


def text_of(tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> PretrainedText:
    torch.manual_seed(0)
    config = AutoConfig.for_model("gpt2", **OTHER_SIZES["gpt2"], vocab_size=vocab_size)
    return PretrainedText("", config.to_dict())


def test_an_empty_caption_of_a_tokenizer_without_special_tokens_is_a_masked_place() -> None:
    tokenizer = words_only(pad_token="<|end|>")
    tokenizer.backend_tokenizer.pre_tokenizer = Whitespace()
    encoder = text_of(tokenizer, 4)
    states, mask = encode_captions(["", ""], tokenizer, encoder)
    assert states.shape == (2, 1, 8) and not mask.any()

    pipe = TextToImagePipeline(tiny_unet(context_dim=8), scheduler_for("flow"), encoder, tokenizer)
    pipe.set_progress_bar_config(disable=True)
    options = {"num_inference_steps": 2, "guidance_scale": 1.0, "output_type": "pt"}
    alone = pipe("", generator=torch.Generator().manual_seed(0), **options).images
    generators = [torch.Generator().manual_seed(seed) for seed in (0, 1)]
    beside = pipe(["", "a red heart"], generator=generators, **options).images
    assert alone.isfinite().all()
    torch.testing.assert_close(beside[:1], alone, rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("kind", ["own", "gpt2"])
def test_a_caption_means_the_same_beside_longer_ones_whatever_side_its_tokenizer_pads(kind: str) -> None:
    if kind == "own":
        encoder, tokenizer = text_parts()
    else:
        tokenizer = words_only(pad_token="<|end|>")
        tokenizer.backend_tokenizer.pre_tokenizer = Whitespace()
        encoder = text_of(tokenizer, 4)
    tokenizer.padding_side = "left"
    alone, _ = encode_captions(["a"], tokenizer, encoder)
    beside, mask = encode_captions(["a", "a red heart a"], tokenizer, encoder)
    torch.testing.assert_close(beside[0, mask[0]], alone[0], rtol=0.0, atol=1e-5)


def test_control_tokens_in_a_caption_are_the_text_that_they_are(caplog: pytest.LogCaptureFixture) -> None:
    encoder, tokenizer = text_parts()
    written, plain = "x <pad>", ["a red heart", "", " two  spaces \n naïve 雲 < pad >"]
    ids, mask = (tokenize([written], tokenizer, encoder)[key][0] for key in ("input_ids", "attention_mask"))
    assert mask.all() and [each in tokenizer.all_special_ids for each in ids] == [True, *[False] * (len(ids) - 2), True]
    assert tokenizer.decode(ids, skip_special_tokens=True).strip() == written
    assert caption_words([written], tokenizer, encoder)[0].names == ("x", "<pad>")
    found = tokenize(plain, tokenizer, encoder).input_ids.tolist()
    assert found == tokenizer(plain, padding=True, truncation=True, max_length=11).input_ids
    with caplog.at_level(logging.WARNING):
        warn_of_cuts(["w " * 9 + written], tokenizer, encoder)
    assert "x <pad>'" in caplog.text


def test_tokenizers_that_do_not_go_with_the_text_encoder_are_refused_when_put_together() -> None:
    def refused(tokenizer: PreTrainedTokenizerFast, encoder: ModelMixin, message: str) -> None:
        unet = tiny_unet(context_dim=encoder.output_dim)
        with pytest.raises(ValueError, match=message):
            TextToImagePipeline(unet, scheduler_for("flow"), encoder, tokenizer)
        with pytest.raises(ValueError, match=message):
            TextConditionalUNet(unet, encoder, tokenizer)

    encoder = text_of(words_only(), 4)
    refused(words_only(), encoder, "no pad_token to fill a batch up with")
    refused(words_only(pad_token="[PAD]"), encoder, "has 5 tokens, the text encoder vectors for 4")
    refused(words_only(pad_token="<|end|>", truncation_side="left"), encoder, "truncation_side must be 'right'")
    own, tokenizer = text_parts()
    small = TextEncoder(len(tokenizer) - 1, dim=12, heads=3, max_length=own.config.max_length)
    refused(tokenizer, small, f"has {len(tokenizer)} tokens, the text encoder vectors for {len(tokenizer) - 1}")

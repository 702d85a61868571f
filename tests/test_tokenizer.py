"""The tokenizer learns words from captions, never meets an unknown character, and never loses <eos>."""

import pytest
from transformers import PreTrainedTokenizerFast

from unet_attn.tokenizer import train_tokenizer

CAPTIONS = ["cloud upload", "a heart", "Cloud off", "heart off outline"] * 3


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(CAPTIONS, vocab_size=320, max_length=7)


def test_frequent_words_become_one_token_whatever_their_case_and_place(tokenizer: PreTrainedTokenizerFast) -> None:
    first, second = tokenizer("cloud heart").input_ids, tokenizer("HEART Cloud").input_ids
    assert len(first) == len(second) == 4
    assert first[1:3] == second[1:3][::-1]


def test_a_caption_stands_between_bos_and_eos(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer("cloud").input_ids
    assert (ids[0], ids[-1]) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert tokenizer("").input_ids == [tokenizer.bos_token_id, tokenizer.eos_token_id]


def test_a_long_caption_is_cut_to_exactly_max_length_and_keeps_eos(tokenizer: PreTrainedTokenizerFast) -> None:
    short, long = (tokenizer("w " * n, truncation=True).input_ids for n in (77, 500))
    assert len(short) == 7 and short == long and short[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize("caption", ["naïve 猫", "🎈 balloon", "tab\tand\nline", "ＦＵＬＬ"])
def test_no_character_of_any_language_is_unknown(tokenizer: PreTrainedTokenizerFast, caption: str) -> None:
    ids = tokenizer(caption).input_ids
    assert tokenizer.unk_token is None and None not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True).strip() == {"ＦＵＬＬ": "full"}.get(caption, caption)


def test_padding_is_masked_and_on_the_right(tokenizer: PreTrainedTokenizerFast) -> None:
    batch = tokenizer(["cloud", "cloud upload off"], padding=True)
    assert batch.attention_mask == [[1, 1, 1, 0, 0], [1] * 5]
    assert batch.input_ids[0][3:] == [tokenizer.pad_token_id] * 2


def test_saving_and_loading_keep_tokens_and_limit(tokenizer: PreTrainedTokenizerFast, tmp_path) -> None:
    tokenizer.save_pretrained(tmp_path)
    loaded = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert loaded.model_max_length == 7
    assert loaded("Cloud 猫 off", truncation=True).input_ids == tokenizer("Cloud 猫 off", truncation=True).input_ids


def test_the_same_captions_give_the_same_vocabulary(tokenizer: PreTrainedTokenizerFast) -> None:
    assert train_tokenizer(CAPTIONS, vocab_size=320, max_length=7).get_vocab() == tokenizer.get_vocab()


@pytest.mark.parametrize(("options", "message"), [({"vocab_size": 100}, "259.*100"), ({"max_length": 2}, "3.*2")])
def test_limits_that_hold_nothing_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train_tokenizer(CAPTIONS, **options)

"""A small tokenizer of one's own: byte-pair encoding trained on the captions of a data set.

Byte-level, so that no character of any language is unknown; lower-case; `<bos> caption <eos>`, and a caption that is
too long loses words, never its `<eos>`.
Source: Sennrich et al. 2016, https://arxiv.org/abs/1508.07909, as implemented by the tokenizers library.
"""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
SMALLEST_VOCABULARY = 256 + 3  # every byte and the three special tokens


def train_tokenizer(captions: Iterable[str], vocab_size: int = 2048, max_length: int = 32) -> PreTrainedTokenizerFast:
    """Learns a vocabulary of at most vocab_size tokens; fewer where the captions do not hold as many pairs.

    max_length: tokens kept of a caption, `<bos>` and `<eos>` included.
    Raises ValueError if vocab_size or max_length is too small to hold anything.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise ValueError(f"tokenizer.vocab_size must be at least {SMALLEST_VOCABULARY}, got {vocab_size}")
    if max_length < 3:
        raise ValueError(f"tokenizer.max_length must be at least 3, got {max_length}")

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip()])
    # the space before the first word makes "cloud" one token wherever it stands
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(captions, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A {EOS}", special_tokens=[(token, tokenizer.token_to_id(token)) for token in (BOS, EOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS, model_max_length=max_length
    )

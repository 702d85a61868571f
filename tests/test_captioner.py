"""The captioner: that it sees no future, that it learns, its confidence, its scores, and that it is saved whole."""

from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from unet_attn.captioner import (
    Captioner,
    CaptionerSize,
    constant_token_accuracy,
    exact_match,
    propose,
    token_accuracy,
    train_captioner,
)
from unet_attn.tokenizer import train_tokenizer

SIZE = CaptionerSize(image_size=12, channels=1, patch_size=4, dim=16, depth=1, heads=2, writer_depth=1)
SPOTS = list(product(range(0, 12, 4), range(0, 12, 4)))
ROWS, COLUMNS = ("top", "middle", "bottom"), ("left", "centre", "right")
# of different lengths, so that some end while others go on
CAPTIONS = [f"{ROWS[r // 4]} {COLUMNS[c // 4]}" if c else ROWS[r // 4] for r, c in SPOTS]


def spots(count: int, seed: int = 0) -> tuple[Tensor, list[str]]:
    """Pictures (count, 1, 12, 12) with a white patch at one of nine places, some noise, and what they are called."""
    generator = torch.Generator().manual_seed(seed)
    pictures = -1 + 0.2 * torch.rand(count, 1, 12, 12, generator=generator)
    which = torch.randint(len(SPOTS), (count,), generator=generator).tolist()
    for picture, number in zip(pictures, which, strict=True):
        row, column = SPOTS[number]
        picture[0, row : row + 4, column : column + 4] += 1.7
    return pictures, [CAPTIONS[number] for number in which]


def new_captioner(seed: int = 0, *, max_length: int = 11) -> Captioner:
    torch.manual_seed(seed)
    return Captioner(SIZE, train_tokenizer(CAPTIONS, vocab_size=300, max_length=max_length))


@pytest.fixture(scope="module")
def trained() -> Captioner:
    captioner = new_captioner()
    train_captioner(captioner, *spots(300), steps=250, batch_size=50)
    return captioner


def test_a_token_depends_on_those_before_it_and_on_the_whole_picture() -> None:
    captioner = new_captioner().eval()
    pictures = spots(2)[0]
    ids = torch.randint(3, 259, (2, 7), generator=torch.Generator().manual_seed(0))
    later, other = ids.clone(), pictures.clone()
    later[:, 4] += 1
    other[:, :, -1, -1] *= -1

    before = captioner(pictures, ids)

    assert before.shape == (2, 7, len(captioner.tokenizer))
    assert_close(captioner(pictures, later)[:, :4], before[:, :4])
    assert (captioner(pictures, later)[:, 4:] != before[:, 4:]).any(dim=-1).all()
    assert (captioner(other, ids) != before).any(dim=-1).all()


def test_the_fillings_of_a_batch_change_no_score(trained: Captioner) -> None:
    pictures, captions = spots(23, seed=4)
    assert len({len(trained.tokens([caption]).input_ids[0]) for caption in captions}) > 1

    one_by_one = sum(token_accuracy(trained, pictures[n : n + 1], captions[n : n + 1]).value for n in range(23)) / 23

    assert token_accuracy(trained, pictures, captions, batch_size=7).value == pytest.approx(one_by_one)


def test_a_caption_that_has_ended_is_left_alone_while_others_go_on() -> None:
    captioner = new_captioner().eval()
    with torch.no_grad():
        captioner.writer[0].cross_attention.to_out.weight.mul_(20)  # pictures are told apart
        captioner.to_logits.bias[captioner.tokenizer.eos_token_id] = 1.2
    pictures = torch.rand(23, 1, 12, 12, generator=torch.Generator().manual_seed(0)) * 2 - 1

    alone = [captioner.generate(picture[None])[0] for picture in pictures]
    together = propose(captioner, pictures, batch_size=13)

    assert len({len(each.caption) for each in alone}) > 3
    assert [each.caption for each in together] == [each.caption for each in alone]
    for one, other in zip(together, alone, strict=True):
        assert one.confidence == pytest.approx(other.confidence, rel=1e-4)


def test_it_names_pictures_that_it_has_not_seen(trained: Captioner) -> None:
    pictures, captions = spots(100, seed=1)

    written = [each.caption for each in propose(trained, pictures)]

    assert exact_match(written, captions).value > 0.9
    assert token_accuracy(trained, pictures, captions).value > 0.9
    assert token_accuracy(new_captioner().eval(), pictures, captions).value < 0.3
    assert constant_token_accuracy(trained.tokenizer, CAPTIONS[4], captions).value < 0.6
    large = torch.nn.functional.interpolate(pictures, scale_factor=3).expand(-1, 3, -1, -1)
    assert exact_match([each.caption for each in propose(trained, large)], captions).value > 0.9


def test_the_confidence_is_the_probability_of_the_whole_caption(trained: Captioner) -> None:
    pictures, _ = spots(13, seed=2)

    for picture, (caption, confidence) in zip(pictures, propose(trained, pictures), strict=True):
        ids = trained.tokens([caption]).input_ids
        logits = trained(picture[None], ids[:, :-1])[0]
        # start and filling are never written, and the first token is never the end
        logits[:, [trained.tokenizer.bos_token_id, trained.tokenizer.pad_token_id]] = -torch.inf
        logits[0, trained.tokenizer.eos_token_id] = -torch.inf
        probabilities = logits.softmax(dim=-1).gather(1, ids[0, 1:, None])[:, 0]
        assert 0 < confidence < 1
        assert confidence == pytest.approx(probabilities.prod().item(), rel=1e-4)


def test_it_is_less_sure_where_there_is_nothing_to_see(trained: Captioner) -> None:
    pictures, _ = spots(50, seed=3)

    known, noise = (
        sum(each.confidence for each in propose(trained, some)) / len(some)
        for some in (pictures, torch.rand(50, 1, 12, 12, generator=torch.Generator().manual_seed(0)) * 2 - 1)
    )

    assert known > noise + 0.1


def test_a_caption_has_a_word_and_ends_at_the_longest_length() -> None:
    captioner = new_captioner(max_length=5).eval()
    tokenizer = captioner.tokenizer
    with torch.no_grad():
        captioner.to_logits.weight.zero_()
        captioner.to_logits.bias.zero_()
        captioner.to_logits.bias[tokenizer.pad_token_id] = 9.0
        captioner.to_logits.bias[tokenizer.eos_token_id] = 8.0
        captioner.to_logits.bias[tokenizer.convert_tokens_to_ids("t")] = 7.0

    ends = captioner.generate(spots(2)[0])
    with torch.no_grad():
        captioner.to_logits.bias[tokenizer.eos_token_id] = 0.0
    goes_on = captioner.generate(spots(2)[0])

    assert [each.caption for each in ends] == ["t", "t"]
    assert [each.caption for each in goes_on] == ["tttt", "tttt"]
    assert propose(captioner, torch.zeros(0, 1, 12, 12)) == []


def test_token_accuracy_counts_the_end_and_no_filling() -> None:
    tokenizer = train_tokenizer(["aa bb", "cc"], vocab_size=300, max_length=7)
    tokens = [tokenizer.tokenize(caption) for caption in ("aa bb", "aa cc", "cc")]
    assert [len(each) for each in tokens] == [2, 2, 1]

    # of "aa bb <eos>" all is right, of "aa cc <eos>" two thirds, of "cc <eos>" nothing
    accuracy = constant_token_accuracy(tokenizer, "AA bb", ["aa bb", "aa cc", "cc"])

    assert accuracy.value == pytest.approx((1 + 2 / 3 + 0) / 3)
    assert 0 < accuracy.error < 0.5


def test_captions_match_whatever_case_and_spacing() -> None:
    assert exact_match(["a  cat", "dog", "bird"], ["A cat", "cat", "Bird "]).value == pytest.approx(2 / 3)


def test_training_repeats_with_its_seed() -> None:
    losses: list[list[float]] = [[], [], []]
    for run, seed in enumerate((3, 3, 4)):
        train_captioner(
            new_captioner(),
            *spots(31),
            steps=5,
            batch_size=11,
            seed=seed,
            on_step=lambda _, loss, record=losses[run]: record.append(loss),
        )

    assert losses[0] == losses[1] != losses[2]
    assert len(losses[0]) == 5


def test_a_saved_captioner_writes_the_same(trained: Captioner, tmp_path: Path) -> None:
    trained.record = {"steps": 150}
    trained.save(tmp_path / "captioner")

    loaded = Captioner.load(tmp_path / "captioner")

    pictures, _ = spots(17)
    assert propose(loaded, pictures) == propose(trained, pictures)
    assert loaded.record == {"steps": 150} and not loaded.training
    with pytest.raises(
        FileNotFoundError, match=r"holds no captioner \(no captioner.json\): train one with scripts/cap"
    ):
        Captioner.load(tmp_path)

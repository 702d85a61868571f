"""The loss under true, exchanged and empty captions: fixed draws, paired differences, models that must show a gap."""

import pytest
import torch
from pipeline_parts import CAPTIONS, oracle, scheduler_for, stub_pipeline, tiny_pipeline, tiny_unconditional
from torch import Tensor

from unet_attn.conditioning import TIMES, conditioning_gap, exchanged_captions, validation_losses
from unet_attn.pipelines.text_to_image import TextToImagePipeline

TEXTS = [CAPTIONS[n % 3] for n in range(7)]


def pictures(count: int = 7) -> Tensor:
    return torch.rand(count, 3, 12, 12, generator=torch.Generator().manual_seed(0)) * 2 - 1


def test_the_losses_repeat_whatever_the_batch_and_change_with_the_seed() -> None:
    pipeline = tiny_pipeline()

    losses = validation_losses(pipeline, pictures(), TEXTS, seed=3)

    assert losses.shape == (len(TIMES), 7)
    torch.testing.assert_close(losses, validation_losses(pipeline, pictures(), TEXTS, seed=3, batch_size=2))
    assert (losses != validation_losses(pipeline, pictures(), TEXTS, seed=4)).all()


def test_a_text_encoder_of_another_dtype_than_the_unets_is_no_obstacle() -> None:
    pipeline = tiny_pipeline()
    expected = validation_losses(pipeline, pictures(), TEXTS, seed=3)

    pipeline.text_encoder.to(torch.bfloat16)

    torch.testing.assert_close(validation_losses(pipeline, pictures(), TEXTS, seed=3), expected, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("prediction_type", ["flow", "epsilon", "v_prediction", "sample"])
def test_a_network_that_knows_the_picture_has_no_loss(prediction_type: str) -> None:
    scheduler = scheduler_for(prediction_type)
    clean = pictures(1)
    perfect = oracle(clean, prediction_type, getattr(scheduler, "alphas_cumprod", None))
    answer = perfect.answer
    perfect.answer = lambda sample, timestep, context: answer(sample, timestep[0], context)

    losses = validation_losses(TextToImagePipeline(perfect, scheduler), clean, [""])

    assert losses.max() < 1e-6


def test_a_network_that_answers_zero_has_the_known_loss_of_its_target() -> None:
    pipeline = stub_pipeline("flow")
    clean = torch.full((200, 3, 12, 12), 0.5)

    losses = validation_losses(pipeline, clean, [""] * 200)

    # the target is n - x with n ~ N(0, 1): 1 + 0.25 at every time
    torch.testing.assert_close(losses.mean(dim=1), torch.full((5,), 1.25), atol=0.02, rtol=0)
    torch.testing.assert_close(losses[0], losses[4])  # each picture keeps its noise over the times


def test_a_network_that_ignores_its_text_has_a_gap_of_exactly_zero() -> None:
    gap = conditioning_gap(stub_pipeline(with_text=True), pictures(), TEXTS)

    assert gap.gap_exchanged == gap.gap_empty == (0, 0)
    assert gap.true == gap.exchanged == gap.empty and gap.pictures == 7


def test_a_network_that_follows_its_text_has_a_gap_beyond_its_error() -> None:
    """The network answers the grey value that it reads out of the caption; pictures are as grey as theirs."""
    pipeline = stub_pipeline("sample", with_text=True)
    with torch.no_grad():
        greys = {text: _first_number(pipeline, text) for text in [*CAPTIONS, ""]}
    pipeline.unet.answer = lambda sample, timestep, context: context[:, 1, 0][:, None, None, None].expand_as(sample)
    grey = torch.stack([torch.full((3, 12, 12), greys[text]) for text in 5 * TEXTS])

    gap = conditioning_gap(pipeline, grey, 5 * TEXTS)

    assert gap.true.value == pytest.approx(0, abs=1e-9)
    assert gap.gap_exchanged.value > 3 * gap.gap_exchanged.error > 0
    assert gap.gap_empty.value > 0
    assert gap.by_time["exchanged"] == pytest.approx([gap.exchanged.value] * 5)


def _first_number(pipeline: TextToImagePipeline, text: str) -> float:
    tokens = pipeline.tokenizer([text], return_tensors="pt")
    return pipeline.text_encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state[0, 1, 0].item()


def test_a_model_without_text_has_the_loss_alone() -> None:
    gap = conditioning_gap(tiny_unconditional(), pictures(), ["", "a"])

    assert gap.empty.value > 0 and list(gap.by_time) == ["empty"]
    assert gap.true is gap.exchanged is gap.gap_exchanged is gap.gap_empty is None


def test_an_exchanged_caption_is_another_pictures_and_never_says_the_same() -> None:
    exchanged = exchanged_captions(TEXTS, seed=5)

    assert all(other in TEXTS and other != own for own, other in zip(TEXTS, exchanged, strict=True))
    assert exchanged == exchanged_captions(TEXTS, seed=5) != exchanged_captions(TEXTS, seed=6)
    with pytest.raises(ValueError, match="needs captions that differ: all of them are the same"):
        exchanged_captions(["x", "x"])

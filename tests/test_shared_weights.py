"""A weight that stands in two places is refused when the networks are put together, not when they are saved."""

import copy

import pytest
import torch
from pipeline_parts import scheduler_for, text_parts, tiny_pipeline, tiny_unet

from unet_attn.model import TextConditionalUNet
from unet_attn.pipelines.text_to_image import TextToImagePipeline


def test_within_a_network_both_places_are_named_in_training_and_in_a_pipeline() -> None:
    unet, (text_encoder, tokenizer) = tiny_unet(), text_parts()
    lowest = unet.down["3x3"][0]
    lowest.self_attention = unet.mid.self_attention
    message = r"unet\.down\.3x3\.0\.self_attention\.\S+ and unet\.mid\.self_attention\.\S+ are one and the same weight"
    with pytest.raises(ValueError, match=message):
        TextConditionalUNet(unet, text_encoder, tokenizer)
    with pytest.raises(ValueError, match=message):
        TextToImagePipeline(unet, scheduler_for("flow"), text_encoder, tokenizer)
    with pytest.raises(ValueError, match=message.replace("unet", "guide_unet")):
        TextToImagePipeline.from_pipe(tiny_pipeline(), guide_unet=unet)

    lowest.self_attention = copy.deepcopy(unet.mid.self_attention)
    TextConditionalUNet(unet, text_encoder, tokenizer)


def test_two_parameters_at_one_address_are_one_weight() -> None:
    unet, (text_encoder, tokenizer) = tiny_unet(), text_parts()
    first, second = (unet.down["3x3"][0].self_attention, unet.mid.self_attention)
    second.load_state_dict(first.state_dict())
    for ours, others in zip(second.parameters(), first.parameters(), strict=True):
        ours.data = others.data
    for make in (
        lambda: TextConditionalUNet(unet, text_encoder, tokenizer),
        lambda: TextToImagePipeline(unet, scheduler_for("flow"), text_encoder, tokenizer),
    ):
        with pytest.raises(ValueError, match=r"unet\.down\.3x3\.0\.self_attention\.\S+ and unet\.mid\.self_attention"):
            make()


def test_between_the_networks_it_is_refused_at_the_call_and_at_saving_too(tmp_path) -> None:
    pipe = tiny_pipeline()
    pipe.text_encoder.extra = pipe.unet.text_embedding
    message = r"unet\.text_embedding\.weight and text_encoder\.extra\.weight are one and the same weight"
    for action in (
        lambda: TextConditionalUNet(pipe.unet, pipe.text_encoder, pipe.tokenizer),
        lambda: pipe("a"),
        lambda: pipe.save_pretrained(tmp_path / "pipe"),
    ):
        with pytest.raises(ValueError, match=message):
            action()
    assert not (tmp_path / "pipe").exists()


def test_a_pipeline_may_be_guided_by_its_own_unet(tmp_path) -> None:
    pipe = tiny_pipeline()
    TextToImagePipeline.from_pipe(pipe, guide_unet=pipe.unet).save_pretrained(tmp_path)
    loaded = TextToImagePipeline.from_pretrained(tmp_path)
    assert torch.equal(loaded.guide_unet.conv_in.weight, pipe.unet.conv_in.weight)


def test_a_text_encoder_of_another_dtype_conditions_the_unet() -> None:
    unet, (text_encoder, tokenizer) = tiny_unet(), text_parts()
    sample, time, captions = torch.randn(2, 3, 12, 12), torch.full((2,), 500.0), ["a red heart", "cloud"]
    expected, _ = TextConditionalUNet(unet, text_encoder, tokenizer)(sample, time, captions)
    found, _ = TextConditionalUNet(unet, text_encoder.to(torch.bfloat16), tokenizer)(sample, time, captions)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=0.05, rtol=0.05)

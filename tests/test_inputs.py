"""What a pipeline takes and refuses, and the pictures it gives."""

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, UNet2DModel
from pipeline_parts import (
    CAPTIONS,
    DIM,
    quiet,
    scheduler_for,
    seeds,
    stub_pipeline,
    text_parts,
    tiny_pipeline,
    tiny_unconditional,
    tiny_unet,
)
from torch import nn

from unet_attn.pipelines.text_to_image import TextToImagePipeline
from unet_attn.unet import AttnUNet2D

FOREIGN_LEVELS = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}


@pytest.fixture(scope="module")
def pipeline():
    return tiny_pipeline()


@pytest.mark.parametrize("prompt", [3, b"a heart", {"a", "b"}, [], (), ["a", None], {"a": 1}])
def test_a_prompt_of_the_wrong_type_is_refused_in_one_line(pipeline, prompt):
    with pytest.raises(ValueError, match="prompt must be a string or a") as caught:
        pipeline(prompt)
    assert "\n" not in str(caught.value)


def test_halves_of_characters_are_no_prompt(pipeline):
    for options in ({"prompt": "a\udcff"}, {"prompt": ["a", "\ud83d"]}, {"prompt": "a", "negative_prompt": "\udcff"}):
        with pytest.raises(ValueError, match="prompt has half a character") as caught:
            pipeline(**options)
        assert str(caught.value).encode("utf-8")
    assert len(pipeline("\U0001f600", num_inference_steps=1).images) == 1


def test_tuples_and_numpys_numbers_do_as_lists_and_numbers_do(pipeline):
    plain = {"num_images_per_prompt": 2, "num_inference_steps": 3, "guidance_scale": 2.5, "height": 8, "width": 16}
    generators = [torch.Generator().manual_seed(seed) for seed in range(4)]
    expected = pipeline(["a", "b"], negative_prompt=["x", "y"], generator=generators, output_type="np", **plain).images
    kinds = (np.int64, np.uint8, np.float32, np.int32, np.int16)
    numpys = {name: kind(value) for (name, value), kind in zip(plain.items(), kinds, strict=True)}
    generators = [torch.Generator().manual_seed(seed) for seed in range(4)]
    images = pipeline(
        ("a", "b"), negative_prompt=("x", "y"), generator=generators, output_type="np", eta=np.float64(0), **numpys
    ).images
    assert images.shape == (4, 8, 16, 3) and np.array_equal(images, expected)


@pytest.mark.parametrize("value", [np.bool_(True), np.float32(2), np.array([2, 3]), torch.tensor(2)])
def test_what_is_no_whole_number_is_refused_whoever_made_it(pipeline, value):
    with pytest.raises(ValueError, match="num_inference_steps must be a whole number"):
        pipeline("a", num_inference_steps=value)


def test_a_prompt_is_needed_with_text_and_refused_without(pipeline):
    with pytest.raises(ValueError, match="needs a prompt"):
        pipeline()
    with pytest.raises(ValueError, match="trained without text"):
        tiny_unconditional()("a heart")
    with pytest.raises(ValueError, match="takes no negative_prompt"):
        tiny_unconditional()(negative_prompt="a heart")


def test_an_unconditional_model_makes_the_number_of_pictures_asked_for():
    images = tiny_unconditional()(num_images_per_prompt=3, num_inference_steps=2).images
    assert [image.size for image in images] == [(12, 12)] * 3


@pytest.mark.parametrize(("height", "width"), [(33, 40), (0, 8), (-8, 8), (8, 8.0), (8, True)])
def test_a_size_that_does_not_fit_is_refused_naming_the_multiple(pipeline, height, width):
    with pytest.raises(
        ValueError, match=r"(height|width) must be a positive multiple of 4 \(the U-Net's downsample_factor"
    ):
        pipeline("a", height=height, width=width)


@pytest.mark.parametrize(("height", "width"), [(4, 4), (8, 20), (44, 4)])
def test_a_size_that_fits_comes_out_exactly(pipeline, height, width):
    image = pipeline("a", height=height, width=width, num_inference_steps=1).images[0]
    assert image.size == (width, height)


def test_more_steps_than_were_trained_are_refused_before_any_compute():
    pipe = stub_pipeline("epsilon")
    pipe.scheduler = DDIMScheduler(num_train_timesteps=10)
    with pytest.raises(ValueError, match="num_inference_steps must be at most 10, the number trained with, got 25"):
        pipe()
    assert pipe.unet.calls == []
    assert len(pipe(num_inference_steps=10).images) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_inference_steps": 0}, "num_inference_steps must be a whole number of at least 1, got 0"),
        ({"num_inference_steps": 2.5}, "num_inference_steps"),
        ({"num_images_per_prompt": 0}, "num_images_per_prompt"),
        ({"guidance_scale": float("nan")}, "guidance_scale must be a finite number, got nan"),
        ({"guidance_scale": "3"}, "guidance_scale"),
        ({"eta": float("inf")}, "eta must be a finite number, got inf"),
        ({"eta": 2.0}, r"eta must lie in 0\.\.1, got 2\.0"),
        ({"eta": -1}, r"eta must lie in 0\.\.1, got -1"),
        ({"output_type": "jpg"}, "output_type must be one of pil, np, pt, latent, got 'jpg'"),
        ({"negative_prompt": ["a", "b", "c"]}, "3 negative prompts for 2 prompts"),
        ({"negative_prompt": 4}, "negative_prompt must be a string"),
        ({"latents": torch.zeros(1, 3, 12, 12)}, r"latents must have shape \(2, 3, 12, 12\), got \(1, 3, 12, 12\)"),
        ({"latents": [1]}, "latents must be a tensor"),
        ({"callback_on_step_end_tensor_inputs": ["noise"]}, "may name latents, got noise"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(pipeline, options, message):
    with pytest.raises(ValueError, match=message):
        pipeline(["a", "b"], **options)


def test_parts_that_do_not_fit_each_other_are_refused_at_construction():
    text_encoder, tokenizer = text_parts()
    with pytest.raises(ValueError, match="go together"):
        TextToImagePipeline(tiny_unet(), scheduler_for("flow"), text_encoder)
    with pytest.raises(ValueError, match=f"context_dim 7, but the text encoder's output_dim is {DIM}"):
        TextToImagePipeline(tiny_unet(context_dim=7), scheduler_for("flow"), text_encoder, tokenizer)
    with pytest.raises(ValueError, match=r"trained with text \(context_dim 12\): it needs a text_encoder"):
        TextToImagePipeline(tiny_unet(), scheduler_for("flow"))


def test_what_is_no_part_of_ours_is_refused_at_construction_and_where_it_is_put_in(tmp_path):
    unet, scheduler = tiny_unet(context_dim=None), scheduler_for("flow")
    wrapped, foreign = nn.DataParallel(unet), UNet2DModel(block_out_channels=(32, 32), **FOREIGN_LEVELS)
    unequal = AttnUNet2D(12, 3, 1, (8, 16), attention_levels=())
    given = r"must be an AttnUNet2D, got a DataParallel: give accelerator\.unwrap_model"
    for parts, message in (
        ({"unet": wrapped}, rf"^unet {given}\(unet\)$"),
        ({"unet": unet, "guide_unet": wrapped}, rf"^guide_unet {given}\(guide_unet\)$"),
        ({"unet": foreign}, "^unet must be an AttnUNet2D, got a UNet2DModel$"),
        ({"unet": scheduler}, "^unet must be an AttnUNet2D, got a FlowMatchEulerDiscreteScheduler$"),
        ({"unet": unet, "scheduler": unet}, "^scheduler must be one of diffusers, got a AttnUNet2D$"),
        ({"unet": unequal}, "as many out_channels as in_channels, got 1 and 3$"),
    ):
        with pytest.raises(ValueError, match=message):
            TextToImagePipeline(**{"scheduler": scheduler, **parts})
        pipe = TextToImagePipeline(unet, scheduler)
        for name, part in parts.items():
            setattr(pipe, name, part)
        for use in (pipe, lambda pipe=pipe: pipe.save_pretrained(tmp_path / "p")):
            with pytest.raises(ValueError, match=message):
                use()
    text_encoder, tokenizer = text_parts()
    with pytest.raises(
        ValueError, match=r"^text_encoder must be a TextEncoder or PretrainedText, got a DataParallel: give"
    ):
        TextToImagePipeline(tiny_unet(), scheduler, nn.DataParallel(text_encoder), tokenizer)
    assert not (tmp_path / "p").exists()
    TextToImagePipeline(torch.compile(unet), scheduler)


@pytest.mark.parametrize(
    ("generator", "message"),
    [
        (seeds(1, 2), "got 2 generators for 3 pictures"),
        (7, r"must be a torch.Generator or a list of them, got 7 \(int\)"),
        ([1, 2, 3], r"got 1 \(int\)"),
    ],
)
def test_generators_that_do_not_fit_are_refused(pipeline, generator, message):
    with pytest.raises(ValueError, match=message):
        pipeline(CAPTIONS, generator=generator)


# --- what comes out


def test_output_types_hold_the_same_pictures(pipeline):
    pil, array, tensor = (
        pipeline(CAPTIONS[:2], num_inference_steps=2, generator=seeds(1, 2), output_type=kind, height=8).images
        for kind in ("pil", "np", "pt")
    )
    assert array.shape == (2, 8, 12, 3) and array.dtype == np.float32
    assert tensor.shape == (2, 3, 8, 12) and tensor.dtype == torch.float32
    np.testing.assert_array_equal(tensor.permute(0, 2, 3, 1).numpy(), array)
    assert [image.mode for image in pil] == ["RGB", "RGB"]
    np.testing.assert_array_equal(np.stack([np.asarray(image) for image in pil]), np.round(array * 255))
    assert pipeline("a", num_inference_steps=1, return_dict=False)[0][0].size == (12, 12)


def test_grey_pictures_are_of_mode_l():
    assert tiny_pipeline(channels=1)("a", num_inference_steps=1).images[0].mode == "L"


def test_pictures_of_two_channels_come_as_arrays_only():
    pipe = quiet(TextToImagePipeline(tiny_unet(context_dim=None, channels=2), scheduler_for("flow")))
    with pytest.raises(ValueError, match="1 or 3 channels, these have 2"):
        pipe()
    assert pipe(num_inference_steps=1, output_type="np").images.shape == (1, 12, 12, 2)


def test_values_out_of_range_are_clamped():
    pipe = stub_pipeline()
    values = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.4])
    latents = values.repeat(3)[:12].expand(1, 3, 12, 12)
    row = np.asarray(pipe(latents=latents, num_inference_steps=1).images[0])[0, :5, 0]
    assert row.tolist() == [0, 0, 128, 255, 255]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("prediction_type", ["flow", "sample"])
def test_a_picture_that_is_not_finite_is_refused_and_named(value, prediction_type):
    # with `sample` DDIM clips the predicted picture, which would make infinity an ordinary white
    pipe = stub_pipeline(prediction_type)

    def answer(sample, timestep, context):
        broken = torch.zeros_like(sample)
        broken[1, 2, 3, 4] = value
        return broken

    pipe.unet.answer = answer
    with pytest.raises(ValueError, match=r"picture 1 of 3 .* NaN or infinity"):
        pipe(num_images_per_prompt=3, num_inference_steps=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_follows_float32_from_the_same_noise(dtype):
    full = tiny_pipeline()
    options = {"num_inference_steps": 3, "generator": seeds(1), "output_type": "np"}
    expected = full("a", **options).images
    half = full.to(dtype)
    assert half.text_encoder.dtype == half.unet.dtype == dtype
    found = half("a", **{**options, "generator": seeds(1)}).images
    np.testing.assert_allclose(found, expected, atol=0.1)
    assert found.dtype == np.float32

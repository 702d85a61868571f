"""Arguments and parts that do not fit: refused in one line before any compute, or told of."""

import logging
import warnings

import diffusers
import pytest
import torch
from diffusers import DDIMInverseScheduler, DDIMScheduler, DPMSolverMultistepScheduler
from pipeline_parts import (
    CAPTIONS,
    quiet,
    scheduler_for,
    seeds,
    stub_pipeline,
    text_parts,
    tiny_pipeline,
    tiny_unconditional,
    tiny_unet,
)
from torch.testing import assert_close

from unet_attn.pipelines.attention_maps import AttentionChoice
from unet_attn.pipelines.image_to_image import ImageToImagePipeline
from unet_attn.pipelines.interpolate import InterpolationPipeline
from unet_attn.pipelines.text_to_image import TextToImagePipeline
from unet_attn.schedulers import set_timesteps

OPTIONS = {"num_inference_steps": 2, "output_type": "pt"}


@pytest.fixture(scope="module")
def stub():
    return stub_pipeline(with_text=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"guidance": None}, r"guidance must be a Guidance, got None \(NoneType\)"),
        ({"guidance": {"rescale": 0.5}}, "guidance must be a Guidance"),
        ({"guidance_scale": 1e30}, r"guidance_scale must lie within 1e\+06 of 0, got 1e\+30"),
        ({"return_attention": 5}, r"return_attention must be True, False or an AttentionChoice, got 5 \(int\)"),
        ({"callback_on_step_end": 3}, r"callback_on_step_end must be a function, got 3 \(int\)"),
        ({"callback_on_step_end_tensor_inputs": "latents"}, "must be a list, got the string 'latents'"),
        ({"latents": torch.full((1, 3, 12, 12), torch.nan)}, "latents hold NaN or infinity"),
        ({"latents": torch.zeros(1, 3, 11, 12)}, r"latents must have a height .* multiples of 4 .*\(1, 3, 11, 12\)"),
    ],
)
def test_an_argument_that_does_not_fit_is_named_before_any_compute(stub, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        stub("a", **options)
    assert "\n" not in str(caught.value) and stub.unet.calls == []


@pytest.mark.parametrize(("name", "value"), [("levels", 2), ("heads", "0"), ("steps", (0.5,))])
def test_a_choice_of_attention_is_a_list_of_whole_numbers(name, value):
    with pytest.raises(ValueError, match=f"attention {name} must be a tuple of whole numbers"):
        AttentionChoice(**{name: value})
    assert AttentionChoice(steps=range(3)).steps == range(3)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda latents: 5, r"must return None or a dict with latents, got 5 \(int\)"),
        (lambda latents: {"noise": latents}, "must return None or a dict with latents"),
        (lambda latents: {"latents": latents[:, :, :8]}, r"latents of shape \(1, 3, 12, 12\), got \(1, 3, 8, 12\)"),
        (lambda latents: {"latents": None}, r"latents of shape .* got None \(NoneType\)"),
    ],
)
def test_a_callback_that_answers_wrongly_is_named(answer, message):
    with pytest.raises(ValueError, match=message):
        stub_pipeline()(callback_on_step_end=lambda caller, step, time, values: answer(values["latents"]), **OPTIONS)


def test_latents_that_a_callback_gives_back_in_another_dtype_are_taken():
    pipe = stub_pipeline()
    images = pipe(callback_on_step_end=lambda *given: {"latents": given[3]["latents"].double() * 0}, **OPTIONS).images
    assert images.dtype == torch.float32 and torch.equal(images, torch.full((1, 3, 12, 12), 0.5))


def test_a_tuple_of_generators_is_a_list_of_them():
    pipe = tiny_pipeline()
    found, expected = (pipe(CAPTIONS[:2], generator=kind(seeds(1, 2)), **OPTIONS).images for kind in (tuple, list))
    assert torch.equal(found, expected)


# --- schedules that do not fit the number of steps


@pytest.mark.parametrize("name", ["DDIM", "DDPM", "EulerDiscrete", "DDIMInverse"])
def test_an_offset_that_leads_past_the_last_trained_step_is_refused_before_any_compute(name):
    settings = {"num_train_timesteps": 20, "steps_offset": 1, "timestep_spacing": "leading"}
    pipe = stub_pipeline("epsilon")
    pipe.scheduler = getattr(diffusers, f"{name}Scheduler").from_config(pipe.scheduler.config, **settings)
    with pytest.raises(
        ValueError,
        match=f"^{name}Scheduler with steps_offset=1 comes to timestep 20 in 20 steps, and 19 is .* set steps_off",
    ):
        pipe(num_inference_steps=20)
    assert pipe.unet.calls == []
    pipe(num_inference_steps=10)
    assert [int(call[1]) for call in pipe.unet.calls] == list(
        range(1, 20, 2) if "Inverse" in name else range(19, 0, -2)
    )


def test_the_offset_of_a_flow_is_none_of_its_times():
    scheduler = DPMSolverMultistepScheduler.from_config(scheduler_for("flow").config, steps_offset=1)
    set_timesteps(scheduler, 1000)
    assert float(scheduler.timesteps.max()) >= 999


def test_a_start_at_which_half_of_the_picture_should_be_there_is_told_of():
    pipe, cosine = stub_pipeline("epsilon"), {"beta_schedule": "squaredcos_cap_v2"}
    pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config, num_train_timesteps=40, **cosine)
    said = (
        "^DDIMScheduler begins at timestep 24 of 40, where 55% of a picture is there and not noise alone: set timestep"
    )
    with pytest.warns(UserWarning, match=said):
        pipe(num_inference_steps=25)
    change, image = ImageToImagePipeline.from_pipe(pipe), torch.zeros(3, 12, 12)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        change(None, image, strength=0.5, num_inference_steps=25)  # which begins at the picture
        pipe(num_inference_steps=20)
        pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config, timestep_spacing="trailing")
        pipe(num_inference_steps=25)
        pipe.scheduler = DDIMInverseScheduler.from_config(pipe.scheduler.config)
        pipe(num_inference_steps=25)


# --- prompts that are too long


def cuts(caplog):
    return [record.getMessage() for record in caplog.records if "cut off" in record.getMessage()]


def test_what_is_cut_off_a_prompt_is_told_once_a_call(caplog):
    pipe = stub_pipeline(with_text=True)
    with caplog.at_level(logging.WARNING):
        pipe(["a red heart", "a" * 9], negative_prompt="", **OPTIONS)
        assert cuts(caplog) == []
        long = "q w " * 5  # two tokens a word and more, of which 11 - 2 fit
        pipe([long + "zebra", "a", long + "zebra"], negative_prompt="n " * 20 + "yak", **OPTIONS)
    (told,) = cuts(caplog)
    tokens = pipe.tokenizer(long + "zebra", add_special_tokens=False).input_ids
    assert told.startswith("only the first 9 tokens of a prompt are read, this is cut off: '")
    assert f"'{pipe.tokenizer.decode(tokens[9:]).strip()}'" in told and told.count("zebra") == 1 and "yak'" in told


def test_the_last_prompt_of_an_interpolation_is_told_of_too(caplog):
    pipe = InterpolationPipeline.from_pipe(stub_pipeline(with_text=True))
    with caplog.at_level(logging.WARNING):
        pipe(["a", "w " * 20 + "zebra"], num_frames=3, **OPTIONS)
    (told,) = cuts(caplog)
    assert "zebra'" in told


# --- parts that are put in, taken away, or of another dtype


def test_a_guide_or_scheduler_put_in_later_is_saved_and_loaded(tmp_path):
    pipe = tiny_pipeline()
    pipe.guide_unet = tiny_unet(seed=3)
    scheduler, pipe.scheduler = pipe.scheduler, None
    pipe.scheduler = scheduler
    pipe.save_pretrained(tmp_path)
    loaded = quiet(TextToImagePipeline.from_pretrained(tmp_path))
    found, expected = (each("a", generator=seeds(1), **OPTIONS).images for each in (loaded, pipe))
    assert loaded.guide_unet is not None
    assert_close(found, expected, rtol=0, atol=1e-5)
    pipe.guide_unet = None
    assert not torch.equal(pipe("a", generator=seeds(1), **OPTIONS).images, expected)  # it does matter


@pytest.mark.parametrize("name", ["unet", "scheduler", "tokenizer", "text_encoder"])
def test_a_part_that_is_missing_is_named_at_the_call_and_at_saving(name, tmp_path):
    pipe = tiny_pipeline()
    setattr(pipe, name, None)
    message = f"needs a {name}" if name in ("unet", "scheduler") else "text_encoder and tokenizer go together"
    interpolation = InterpolationPipeline.__call__
    for use in (
        lambda: pipe("a"),
        lambda: interpolation(pipe, ["a", "b"]),
        lambda: pipe.save_pretrained(tmp_path / "p"),
    ):
        with pytest.raises(ValueError, match=message):
            use()
    assert not (tmp_path / "p").exists()


def test_a_model_whose_text_was_taken_away_is_not_called_one_without_text(tmp_path):
    pipe = tiny_pipeline()
    pipe.save_pretrained(tmp_path)
    pipe.text_encoder = pipe.tokenizer = None
    for use in (
        lambda: pipe(),
        lambda: TextToImagePipeline.from_pretrained(tmp_path, text_encoder=None, tokenizer=None),
    ):
        with pytest.raises(ValueError, match=r"trained with text \(context_dim 12\): it needs a text_encoder"):
            use()
    with pytest.raises(ValueError, match="a pipeline needs a scheduler, got None"):
        TextToImagePipeline.from_pretrained(tmp_path, scheduler=None)


def test_none_given_for_a_part_means_none(tmp_path):
    text_encoder, tokenizer = text_parts()
    guided = TextToImagePipeline(tiny_unet(), scheduler_for("flow"), text_encoder, tokenizer, tiny_unet(seed=3))
    guided.save_pretrained(tmp_path)
    assert TextToImagePipeline.from_pipe(guided).guide_unet is guided.guide_unet
    assert TextToImagePipeline.from_pipe(guided, guide_unet=None).guide_unet is None
    assert TextToImagePipeline.from_pretrained(tmp_path, guide_unet=None).guide_unet is None
    plain = TextToImagePipeline.from_pretrained(
        tmp_path, unet=tiny_unet(context_dim=None), text_encoder=None, tokenizer=None, guide_unet=None
    )
    assert plain.text_encoder is None and len(quiet(plain)(num_inference_steps=1).images) == 1


def test_a_guide_may_have_another_dtype():
    pipe = tiny_pipeline()
    full, half = (
        TextToImagePipeline.from_pipe(pipe, guide_unet=tiny_unet(seed=3).to(dtype))("a", generator=seeds(1), **OPTIONS)
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert not torch.equal(full.images, half.images)
    assert_close(half.images, full.images, rtol=0, atol=0.1)


def test_pickled_weights_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="safe_serialization=False writes pickled weights"):
        tiny_unconditional().save_pretrained(tmp_path / "p", safe_serialization=False)
    assert not (tmp_path / "p").exists()

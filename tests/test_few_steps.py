"""Pipelines of few steps: the scheduler that begins each step anew, and the numbers that are saved with a pipeline."""

import json

import diffusers
import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler, FlowMatchLCMScheduler
from pipeline_parts import (
    oracle,
    quiet,
    scheduler_for,
    seeds,
    tiny_pipeline,
    tiny_unconditional,
    tiny_unet,
)
from scheduler_cases import CASES
from torch.testing import assert_close

from unet_attn.objective import Objective
from unet_attn.pipelines.image_to_image import ImageToImagePipeline
from unet_attn.pipelines.inpaint import InpaintPipeline
from unet_attn.pipelines.interpolate import InterpolationPipeline
from unet_attn.pipelines.text_to_image import TextToImagePipeline
from unet_attn.schedulers import check_sampling_scheduler, set_timesteps

# diffusers' schedulers call numpy in ways that it has deprecated
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

DEFAULTS = {"default_steps": 2, "default_guidance_scale": 1.5}
CALL = {"num_inference_steps": 2, "guidance_scale": 1.5}

LEVELS = {1: [1.0], 2: [1.0, 0.5], 4: [1.0, 0.75, 0.5, 0.25]}


@pytest.mark.parametrize("steps", LEVELS)
def test_renoising_has_evenly_spaced_levels_each_of_which_is_a_step(steps):
    for shift in (1.0, 3.0):
        scheduler = FlowMatchLCMScheduler(shift=shift)
        set_timesteps(scheduler, steps)
        sigmas = torch.tensor([shift * level / (1 + (shift - 1) * level) for level in LEVELS[steps]])
        assert_close(scheduler.timesteps, 1000 * sigmas)
        assert_close(scheduler.sigmas, torch.cat([sigmas, torch.zeros(1)]))
    clean = torch.rand(1, 3, 12, 12, generator=torch.Generator().manual_seed(5)) * 1.8 - 0.9
    scheduler = Objective(FlowMatchLCMScheduler()).sampling_scheduler()
    pipe = quiet(TextToImagePipeline(oracle(clean, "flow"), scheduler))
    images = pipe(num_inference_steps=steps, generator=seeds(3), output_type="pt").images
    assert_close(images * 2 - 1, clean, rtol=0, atol=1e-6)
    draws = torch.Generator().manual_seed(3)
    for (sample, time, _), sigma in zip(pipe.unet.calls, LEVELS[steps], strict=True):
        noise = torch.randn(1, 3, 12, 12, generator=draws)
        assert_close((sample, time), ((1 - sigma) * clean + sigma * noise, torch.tensor(1000 * sigma)))


def test_the_steps_of_every_other_scheduler_are_its_own_to_the_bit():
    for kind, case in [("flow", case) for case in CASES if "flow" in case.types()] + [("epsilon", CASES[1])]:
        made = getattr(diffusers, case.name)
        ours, own = (made.from_config(scheduler_for(kind).config, **case.settings) for _ in range(2))
        set_timesteps(ours, 7)
        own.set_timesteps(7)
        assert torch.equal(ours.timesteps, own.timesteps) == (case.name != "FlowMatchLCMScheduler")


def test_one_step_cannot_be_stretched_to_another_end():
    pipe = tiny_unconditional()
    for scheduler_class in (FlowMatchEulerDiscreteScheduler, FlowMatchLCMScheduler):
        pipe.scheduler = scheduler_class.from_config(pipe.scheduler.config, shift_terminal=0.1)
        with pytest.raises(ValueError, match=r"shift_terminal=0\.1 has no schedule of 1 step: take more"):
            pipe(num_inference_steps=1)
        assert len(pipe(num_inference_steps=2).images) == 1


def test_renoising_that_resizes_is_refused_for_training_and_wherever_it_was_set():
    with pytest.raises(ValueError, match="scale_factors changes the pictures' size"):
        Objective(FlowMatchLCMScheduler(scale_factors=[0.5]))
    scheduler = Objective(FlowMatchLCMScheduler(shift=2.0)).sampling_scheduler()
    assert type(scheduler) is FlowMatchLCMScheduler and scheduler.config.flow_shift == 2.0
    check_sampling_scheduler(scheduler, "flow")
    scheduler.set_scale_factors([0.5], "nearest")
    with pytest.raises(ValueError, match="scale_factors changes the pictures' size between its steps: set them to"):
        check_sampling_scheduler(scheduler, "flow")


# --- numbers that are saved with a pipeline


def few_steps(prediction_type="flow"):
    """A pipeline with numbers of its own."""
    made = tiny_pipeline(prediction_type)
    return quiet(TextToImagePipeline(**made.components, **DEFAULTS))


def own_numbers(pipe):
    return {name: pipe.config[name] for name in DEFAULTS}


def picture(pipe, **options):
    return pipe("a red heart", generator=seeds(1), output_type="pt", **options).images


def test_a_call_without_numbers_is_the_call_with_those_saved_to_the_bit(tmp_path):
    few_steps().save_pretrained(tmp_path)
    pipe = quiet(TextToImagePipeline.from_pretrained(tmp_path))
    assert own_numbers(pipe) == DEFAULTS
    assert torch.equal(picture(pipe), picture(pipe, **CALL))
    assert pipe.num_timesteps == 2 and pipe.guidance_scale == 1.5
    assert not torch.equal(picture(pipe), picture(pipe, guidance_scale=3.0))  # what is given takes their place
    assert not torch.equal(picture(pipe), picture(pipe, num_inference_steps=3))


@pytest.mark.parametrize("kind", [ImageToImagePipeline, InpaintPipeline, InterpolationPipeline])
def test_every_kind_of_pipeline_takes_the_numbers_of_the_one_it_was_made_from(kind):
    pipe = kind.from_pipe(few_steps())
    grey, half = torch.full((3, 12, 12), 0.5), torch.zeros(12, 12)
    half[:6] = 1
    given = {
        ImageToImagePipeline: ("a", grey),
        InpaintPipeline: ("a", grey, half),
        InterpolationPipeline: (["a", "b"],),
    }
    generators = seeds(1, 2) if kind is InterpolationPipeline else seeds(1)
    states = [each.get_state() for each in generators]

    def made(**options):
        for each, state in zip(generators, states, strict=True):
            each.set_state(state)
        return pipe(*given[kind], generator=generators, output_type="pt", **options).images

    assert own_numbers(pipe) == own_numbers(TextToImagePipeline.from_pipe(pipe)) == DEFAULTS
    assert torch.equal(made(), made(**CALL)) and not torch.equal(made(), made(guidance_scale=3.0))


def test_a_folder_without_the_numbers_has_25_steps_and_guidance_3(tmp_path):
    few_steps().save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert {name: index.pop(name) for name in DEFAULTS} == DEFAULTS
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    pipe = quiet(TextToImagePipeline.from_pretrained(tmp_path))
    assert own_numbers(pipe) == own_numbers(tiny_pipeline()) == {"default_steps": 25, "default_guidance_scale": 3.0}
    assert torch.equal(picture(pipe), picture(pipe, num_inference_steps=25, guidance_scale=3.0))
    # a class that came with such a folder knows none
    pipe.register_to_config(**DEFAULTS)
    pipe._internal_dict = type(pipe.config)({key: pipe.config[key] for key in pipe.config if key not in DEFAULTS})
    assert own_numbers(ImageToImagePipeline.from_pipe(pipe)) == own_numbers(tiny_pipeline())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"default_steps": 0}, "default_steps must be a whole number of at least 1, got 0"),
        ({"default_steps": 2.5}, "default_steps must be a whole number of at least 1, got 2.5"),
        ({"default_steps": True}, "default_steps must be a whole number"),
        ({"default_guidance_scale": float("nan")}, "default_guidance_scale must be a finite number, got nan"),
        ({"default_guidance_scale": "3"}, "default_guidance_scale must be a finite number, got '3'"),
        ({"default_guidance_scale": -1e7}, "default_guidance_scale must lie within 1e[+]06 of 0"),
    ],
)
def test_numbers_that_no_call_would_take_are_refused_when_made_loaded_and_saved(wrong, message, tmp_path):
    pipe = tiny_unconditional()
    pipe.save_pretrained(tmp_path / "old")
    index = tmp_path / "old" / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | wrong))
    pipe.register_to_config(**wrong)
    for use in (
        lambda: TextToImagePipeline(pipe.unet, pipe.scheduler, **wrong),
        lambda: TextToImagePipeline.from_pretrained(tmp_path / "old"),
        lambda: pipe.save_pretrained(tmp_path / "new"),
    ):
        with pytest.raises(ValueError, match=message):
            use()
    assert not (tmp_path / "new").exists()


def test_numbers_registered_later_hold_and_are_saved_plainly(tmp_path):
    pipe = tiny_pipeline()
    pipe.register_to_config(default_steps=np.int64(2), default_guidance_scale=np.float32(1.5))
    assert torch.equal(picture(pipe), picture(pipe, **CALL))
    pipe.save_pretrained(tmp_path)
    assert own_numbers(TextToImagePipeline.from_pretrained(tmp_path)) == DEFAULTS


def test_more_steps_than_the_model_was_trained_with_are_refused_at_the_call(tmp_path):
    TextToImagePipeline(tiny_unet(context_dim=None), DDIMScheduler(num_train_timesteps=10)).save_pretrained(tmp_path)
    pipe = quiet(TextToImagePipeline.from_pretrained(tmp_path))
    with pytest.raises(ValueError, match="num_inference_steps must be at most 10, the number trained with, got 25"):
        pipe()
    assert len(pipe(num_inference_steps=10).images) == 1

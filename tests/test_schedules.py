"""Numbers of steps of which a scheduler has no schedule: what is refused, what is not, and what is said of it."""

import diffusers
import pytest
import torch
from pipeline_parts import oracle, quiet, scheduler_for, seeds, stub_pipeline, with_recorded_scales
from torch.testing import assert_close

from unet_attn.pipelines.image_to_image import ImageToImagePipeline
from unet_attn.pipelines.text_to_image import TextToImagePipeline
from unet_attn.schedulers import most_steps, set_timesteps

# diffusers' schedulers call numpy in ways that it has deprecated
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

MULTISTEP = ["DEISMultistep", "DPMSolverMultistep", "DPMSolverSinglestep", "UniPCMultistep"]


def made(name, trained, kind="epsilon", **settings):
    base = scheduler_for(kind, {"num_train_timesteps": trained})
    return getattr(diffusers, f"{name}Scheduler").from_config(base.config, **settings)


def sampled(name, trained, steps, kind="epsilon", **settings):
    """What an oracle's picture (1, 3, 12, 12) became, and that picture."""
    clean = torch.rand(1, 3, 12, 12, generator=torch.Generator().manual_seed(5)) * 1.8 - 0.9
    base = scheduler_for(kind, {"num_train_timesteps": trained})
    scheduler_class, scales = with_recorded_scales(getattr(diffusers, f"{name}Scheduler"))
    pipe = quiet(TextToImagePipeline(oracle(clean, kind, getattr(base, "alphas_cumprod", None), scales), base))
    pipe.scheduler = scheduler_class.from_config(base.config, **settings)
    return pipe(num_inference_steps=steps, generator=seeds(1), output_type="latent").images, clean


@pytest.mark.parametrize("spacing", ["leading", "linspace"])
@pytest.mark.parametrize("name", MULTISTEP)
@pytest.mark.parametrize("trained", [20, 25, 50])
def test_as_many_steps_as_were_trained_are_refused_where_noise_levels_repeat(name, trained, spacing):
    said = f"^{name}Scheduler has no schedule of {trained} steps, take at most {trained - 1}$"
    pipe = stub_pipeline("epsilon")
    pipe.scheduler = made(name, trained, timestep_spacing=spacing)
    with pytest.raises(ValueError, match=said):
        pipe(num_inference_steps=trained)
    assert pipe.unet.calls == []
    images, clean = sampled(name, trained, trained - 1, timestep_spacing=spacing)
    assert_close(images, clean, rtol=0, atol=0.1 if name == "DEISMultistep" else 1e-3)


def test_a_thousand_of_a_thousand_steps_are_as_empty():
    for name in MULTISTEP:
        with pytest.raises(ValueError, match=f"{name}Scheduler has no schedule of 1000 steps, take at most 999"):
            set_timesteps(made(name, 1000), 1000)


@pytest.mark.parametrize(
    ("kind", "name", "settings"),
    [
        ("epsilon", "Heun", {}),
        ("epsilon", "KDPM2", {}),
        ("epsilon", "KDPM2Ancestral", {}),
        ("flow", "FlowMatchHeun", {}),
        ("epsilon", "PNDM", {}),
        ("epsilon", "DDIM", {}),
        ("epsilon", "DDPM", {}),
        ("epsilon", "Euler", {}),
        ("epsilon", "DPMSolverMultistep", {"timestep_spacing": "trailing"}),
        ("epsilon", "DPMSolverMultistep", {"use_karras_sigmas": True}),  # of which the rounded times alone repeat
        ("epsilon", "DEISMultistep", {"use_karras_sigmas": True}),  # its last step stays where it is
        ("flow", "UniPCMultistep", {}),
        ("flow", "DPMSolverMultistep", {}),
    ],
)
def test_as_many_steps_as_were_trained_are_allowed_where_what_repeats_does_no_harm(kind, name, settings):
    full = f"{name}Discrete" if name.removesuffix("Ancestral") in ("Heun", "KDPM2", "FlowMatchHeun", "Euler") else name
    images, clean = sampled(full, 20, 20, kind, **settings)
    assert_close(images, clean, rtol=0, atol=0.1 if name == "DEISMultistep" else 1e-3)


@pytest.mark.parametrize("name", ["DDIM", "DDPM", "PNDM", "EulerDiscrete", "DPMSolverMultistep"])
def test_steps_of_which_rounding_makes_one_too_many_are_refused(name):
    scheduler = made(name, 1000, timestep_spacing="trailing")
    scheduler.set_timesteps(61)
    assert int(scheduler.timesteps[-1]) == -1  # diffusers' own: the picture would be made of its first noise again
    with pytest.raises(ValueError, match=f"^{name}Scheduler has no schedule of 61 steps, take at most 60$"):
        set_timesteps(scheduler, 61)
    for steps in (60, 62):
        set_timesteps(scheduler, steps)
        assert int(scheduler.timesteps.min()) >= 0


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_pndm_needs_the_four_steps_that_it_begins_with(steps):
    counted = "1 step" if steps == 1 else f"{steps} steps"
    with pytest.raises(ValueError, match=f"^PNDMScheduler has no schedule of {counted}, take at least 4$"):
        set_timesteps(made("PNDM", 1000), steps)
    for images, clean in (sampled("PNDM", 1000, 4), sampled("PNDM", 1000, steps, skip_prk_steps=True)):
        assert_close(images, clean, rtol=0, atol=1e-3)


def test_a_start_at_a_single_step_that_stays_where_it_is_is_refused():
    pipe = ImageToImagePipeline.from_pipe(stub_pipeline("epsilon"))
    pipe.scheduler = made("DEISMultistep", 1000, use_karras_sigmas=True)
    image, options = torch.zeros(3, 12, 12), {"num_inference_steps": 4, "output_type": "latent"}
    with pytest.raises(
        ValueError, match=r"^DEISMultistepScheduler has at strength 0\.3 of 4 steps one left that stays"
    ):
        pipe(None, image, strength=0.3, **options)
    assert pipe.unet.calls == []
    assert pipe(None, image, strength=0.5, **options).images.isfinite().all()


def test_a_schedule_with_nan_names_a_number_of_steps_and_no_setting_that_is_not_there():
    scheduler = made("KDPM2AncestralDiscrete", 1000, timestep_spacing="linspace")
    said = "^KDPM2AncestralDiscreteScheduler has no schedule of 2 steps: take more, such as 3$"
    with pytest.raises(ValueError, match=said):
        set_timesteps(scheduler, 2)
    set_timesteps(scheduler, 3)


def test_a_single_step_that_stays_where_it_is_is_refused():
    scheduler = made("DEISMultistep", 1000, use_karras_sigmas=True)
    with pytest.raises(ValueError, match=r"^DEISMultistepScheduler has no schedule of 1 step, take at least 2$"):
        set_timesteps(scheduler, 1)
    set_timesteps(scheduler, 2)


def test_the_most_steps_up_to_a_number_are_those_that_can_be_set():
    scheduler = made("DPMSolverMultistep", 20)
    assert [most_steps(scheduler, count) for count in (25, 20, 19, 7)] == [19, 19, 19, 7]
    assert scheduler.num_inference_steps is None  # it is tried on copies
    assert most_steps(made("DDIM", 20), 20) == 20
    assert most_steps(made("DDIM", 20, steps_offset=1), 20) == 19
    assert most_steps(made("PNDM", 20), 3) is None


def test_a_default_that_cannot_be_taken_is_told_as_the_pipelines_own():
    said = "; {} is this pipeline's own default: give num_inference_steps, or pipe.register_to_config(default_steps="
    pipe = stub_pipeline("epsilon")
    pipe.scheduler = made("DDIM", 20)
    with pytest.raises(ValueError) as caught:
        pipe()
    assert "at most 20, the number trained with, got 25" in str(caught.value) and said.format(25) in str(caught.value)

    pipe.register_to_config(default_steps=20)
    assert len(pipe().images) == 1
    pipe.scheduler = made("UniPCMultistep", 20)
    with pytest.raises(ValueError) as caught:
        pipe()
    assert "of 20 steps, take at most 19" in str(caught.value) and said.format(20) in str(caught.value)
    for steps in (20, 25):
        with pytest.raises(ValueError) as caught:
            pipe(num_inference_steps=steps)
        assert "default" not in str(caught.value)

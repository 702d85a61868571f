"""Every scheduler of the table: an oracle's picture, pictures made alone, and starts in the middle."""

import math

import diffusers
import numpy as np
import pytest
import torch
from diffusers import DDIMInverseScheduler, DDIMScheduler
from pipeline_parts import (
    CAPTIONS,
    StubUNet,
    oracle,
    quiet,
    scheduler_for,
    seeds,
    tiny_pipeline,
    tiny_unconditional,
    with_recorded_scales,
)
from scheduler_cases import CASES, PAGE, written
from torch.testing import assert_close

from unet_attn.objective import PREDICTION_TYPES, inversion_schedulers, sampling_schedulers
from unet_attn.pipelines.image_to_image import ImageToImagePipeline
from unet_attn.pipelines.pictures import FIRST_STEP_ONLY
from unet_attn.pipelines.text_to_image import TextToImagePipeline

# diffusers' schedulers call numpy in ways that it has deprecated
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

PAIRS = [(kind, case) for case in CASES for kind in case.types()]
NAMES = [f"{kind}-{case.title}" for kind, case in PAIRS]


def clean_picture():
    return torch.rand(1, 3, 12, 12, generator=torch.Generator().manual_seed(5)) * 1.8 - 0.9


def scheduler_of(case, base, scheduler_class=None):
    return (scheduler_class or getattr(diffusers, case.name)).from_config(base.config, **case.settings)


def test_the_page_has_the_table_of_this_list_and_the_list_has_every_scheduler():
    assert PAGE.read_text(encoding="utf-8") == written(PAGE.read_text(encoding="utf-8"))
    offered = {name for kind in PREDICTION_TYPES for name in sampling_schedulers(kind)}
    assert {case.name for case in CASES} == offered


@pytest.mark.parametrize(("prediction_type", "case"), PAIRS, ids=NAMES)
def test_an_oracle_of_every_type_gives_the_clean_picture(prediction_type, case):
    clean = clean_picture()
    base = scheduler_for(prediction_type)
    scheduler_class, scales = with_recorded_scales(getattr(diffusers, case.name))
    unet = oracle(clean, prediction_type, getattr(base, "alphas_cumprod", None), scales)
    pipe = quiet(TextToImagePipeline(unet, base))
    pipe.scheduler = scheduler_of(case, base, scheduler_class)
    images = pipe(num_images_per_prompt=2, num_inference_steps=20, generator=seeds(1, 2), output_type="pt").images
    assert_close(images * 2 - 1, clean.expand(2, -1, -1, -1), rtol=0, atol=case.error)


@pytest.mark.parametrize(("prediction_type", "case"), PAIRS, ids=NAMES)
def test_an_oracle_gives_the_clean_picture_from_the_middle_too(prediction_type, case):
    clean, other = clean_picture(), torch.zeros(3, 12, 12)
    base = scheduler_for(prediction_type)
    scheduler_class, scales = with_recorded_scales(getattr(diffusers, case.name))
    unet = oracle(clean, prediction_type, getattr(base, "alphas_cumprod", None), scales)
    pipe = quiet(ImageToImagePipeline(unet, base))
    pipe.scheduler = scheduler_of(case, base, scheduler_class)
    options = {"strength": 0.5, "num_inference_steps": 20, "generator": seeds(1), "output_type": "pt"}
    if case.name in FIRST_STEP_ONLY:
        with pytest.raises(ValueError, match=f"{case.name} must begin at its first step"):
            pipe(None, other, **options)
        return
    images = pipe(None, other, **options).images
    assert len(unet.calls) in (10, 19, 20)  # 10 steps, of two calls each in the second-order schedulers
    assert_close(images * 2 - 1, clean, rtol=0, atol=case.error)


@pytest.mark.parametrize("case", [case for case in CASES if case.draws_noise], ids=lambda case: case.title)
def test_a_picture_of_a_batch_equals_the_picture_made_alone(case):
    pipe = tiny_pipeline(case.types()[-1] if case.name.startswith("Flow") else "v_prediction")
    pipe.scheduler = scheduler_of(case, pipe.scheduler)
    options = {"num_inference_steps": 4, "output_type": "np"}
    together = pipe(CAPTIONS, generator=seeds(7, 8, 9), **options).images
    for prompt, seed, picture in zip(CAPTIONS, (7, 8, 9), together, strict=True):
        alone = pipe(prompt, generator=seeds(seed), **options).images[0]
        np.testing.assert_allclose(alone, picture, atol=1e-4)
    torch.manual_seed(1)  # nothing comes from the global generator
    np.testing.assert_array_equal(pipe(CAPTIONS, generator=seeds(7, 8, 9), **options).images, together)


@pytest.mark.parametrize("case", [case for case in CASES if case.draws_noise], ids=lambda case: case.title)
def test_the_noise_of_the_steps_comes_from_the_generator(case):
    pipe = tiny_pipeline("flow" if case.name.startswith("Flow") else "v_prediction")
    pipe.scheduler = scheduler_of(case, pipe.scheduler)
    latents = torch.randn(1, 3, 12, 12, generator=torch.Generator().manual_seed(1))
    first, second = (
        pipe("a", latents=latents, generator=seeds(seed), num_inference_steps=4, output_type="np").images
        for seed in (1, 2)
    )
    assert np.abs(first - second).max() > 1e-3


# --- DDIM backwards


def gaussian_network(spread: float, prediction_type: str, alphas_cumprod: torch.Tensor) -> StubUNet:
    """The perfect network of pictures of N(0, s^2) pixels: E[n | x_t] = sigma x_t / (alpha^2 s^2 + sigma^2)."""
    unet = StubUNet()

    def answer(sample, timestep, context):
        alpha = float(alphas_cumprod[int(timestep)]) ** 0.5
        sigma = (1 - alpha**2) ** 0.5
        total = alpha**2 * spread**2 + sigma**2
        noise, clean = sample * sigma / total, sample * alpha * spread**2 / total
        return noise if prediction_type == "epsilon" else alpha * noise - sigma * clean

    unet.answer = answer
    return unet


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction"])
def test_ddim_inverse_finds_the_noise_of_a_picture_and_ddim_the_picture_again(prediction_type):
    base = scheduler_for(prediction_type)
    unet = gaussian_network(0.3, prediction_type, base.alphas_cumprod)
    picture = 0.3 * torch.randn(1, 3, 12, 12, generator=torch.Generator().manual_seed(2)).clamp(-3, 3)
    errors = []
    for steps in (50, 200):
        pipe = quiet(TextToImagePipeline(unet, base))
        pipe.scheduler = DDIMInverseScheduler.from_config(base.config)
        options = {"num_inference_steps": steps, "output_type": "latent"}
        noise = pipe(latents=picture, **options).images
        pipe.scheduler = DDIMScheduler.from_config(base.config)
        again = pipe(latents=noise, **options).images
        errors.append(float((again - picture).abs().max()))
        # along the exact way the picture only changes its scale, from 0.3 to that of the last noise level, about 1
        assert 0.9 < float(noise.std()) < 1.1
        correlation = float((noise * picture).sum() / (noise.norm() * picture.norm()))
        assert correlation > 0.9999
    assert errors[0] < 0.15 and errors[1] < errors[0] / 2


def test_ddim_inverse_is_refused_where_it_fails_and_never_offered_for_sampling():
    assert all("DDIMInverseScheduler" not in sampling_schedulers(kind) for kind in PREDICTION_TYPES)
    assert inversion_schedulers("flow") == inversion_schedulers("sample") == ()
    pipe = tiny_unconditional("sample")
    pipe.scheduler = DDIMInverseScheduler.from_config(pipe.scheduler.config)
    with pytest.raises(ValueError, match="DDIMInverseScheduler cannot sample a sample model"):
        pipe()
    pipe = ImageToImagePipeline.from_pipe(tiny_unconditional("epsilon"))
    pipe.scheduler = DDIMInverseScheduler.from_config(pipe.scheduler.config)
    with pytest.raises(ValueError, match="does not sample, it inverts"):
        pipe(None, torch.zeros(3, 12, 12))


def test_a_latent_output_is_not_clamped():
    pipe = tiny_unconditional("epsilon")
    latents = torch.full((1, 3, 12, 12), 5.0)
    found = pipe(latents=latents, num_inference_steps=1, output_type="latent").images
    shown = pipe(latents=latents, num_inference_steps=1, output_type="pt").images
    assert_close((found / 2 + 0.5).clamp(0, 1), shown)
    assert math.isfinite(float(found.abs().max()))

import pytest
import torch
from diffusers import DDPMScheduler, FlowMatchLCMScheduler
from pipeline_parts import CAPTIONS, seeds, tiny_pipeline, tiny_unconditional, tiny_unet
from torch.testing import assert_close

from unet_attn.pipelines.interpolate import InterpolationPipeline, slerp
from unet_attn.pipelines.text_to_image import TextToImagePipeline

OPTIONS = {"num_inference_steps": 3, "output_type": "pt"}


@pytest.fixture(scope="module")
def pipeline():
    return tiny_pipeline()


def test_noise_turns_along_the_sphere():
    start, end = torch.randn(2, 2, 3, 5, 7, generator=torch.Generator().manual_seed(0)).unbind()
    end = end * (start.flatten(1).norm(dim=1) / end.flatten(1).norm(dim=1)).reshape(2, 1, 1, 1)
    weight = torch.tensor([0.0, 1.0]).reshape(2, 1, 1, 1)
    assert_close(slerp(start, end, weight), torch.stack([start[0], end[1]]), rtol=0, atol=1e-6)
    half = slerp(start, end, torch.full((2, 1, 1, 1), 0.5))
    assert_close(half.flatten(1).norm(dim=1), start.flatten(1).norm(dim=1))
    to_start, to_end = ((half * each).flatten(1).sum(dim=1) for each in (start, end))
    assert_close(to_start, to_end, rtol=1e-4, atol=1e-3)
    assert_close(slerp(start, start, weight), start)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_every_prompt_has_a_frame_that_is_its_own_picture(pipeline, scale):
    prompts = [CAPTIONS[0], CAPTIONS[2], CAPTIONS[1]]  # of different lengths
    options = {**OPTIONS, "guidance_scale": scale}
    frames = InterpolationPipeline.from_pipe(pipeline)(
        prompts, num_frames=7, generator=seeds(1, 2, 3), **options
    ).images
    assert frames.shape == (7, 3, 12, 12)
    for frame, prompt, seed in zip((0, 3, 6), prompts, (1, 2, 3), strict=True):
        alone = pipeline(prompt, generator=seeds(seed), **options).images[0]
        assert_close(frames[frame], alone, rtol=0, atol=1e-4)
    # what lies between is no jump
    steps = (frames[1:] - frames[:-1]).flatten(1).norm(dim=1)
    assert steps.max() < 0.8 * (frames[3] - frames[0]).norm()


def test_the_prompt_alone_or_the_noise_alone_can_change(pipeline):
    pipe = InterpolationPipeline.from_pipe(pipeline)
    generator = seeds(1)[0]
    same_noise = pipe(CAPTIONS[:2], num_frames=2, generator=[generator, generator.clone_state()], **OPTIONS).images
    for frame, prompt in zip(same_noise, CAPTIONS, strict=False):
        assert_close(frame, pipeline(prompt, generator=seeds(1), **OPTIONS).images[0], rtol=0, atol=1e-4)
    same_prompt = pipe(["a", "a"], num_frames=2, generator=seeds(1, 2), **OPTIONS).images
    assert_close(same_prompt[1], pipeline("a", generator=seeds(2), **OPTIONS).images[0], rtol=0, atol=1e-4)


def test_without_text_the_noise_changes():
    pipe = tiny_unconditional()
    frames = InterpolationPipeline.from_pipe(pipe)(num_frames=3, generator=seeds(1, 2), **OPTIONS).images
    for frame, seed in ((0, 1), (2, 2)):
        assert_close(frames[frame], pipe(generator=seeds(seed), **OPTIONS).images[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("scheduler_class", [DDPMScheduler, FlowMatchLCMScheduler])
def test_a_scheduler_with_noise_in_its_steps_adds_the_same_to_every_frame(scheduler_class):
    pipe = InterpolationPipeline.from_pipe(tiny_pipeline("epsilon" if scheduler_class is DDPMScheduler else "flow"))
    pipe.scheduler = scheduler_class.from_config(pipe.scheduler.config)
    generator = seeds(1)[0]
    options = {"generator": [generator, generator.clone_state()], "num_frames": 3, **OPTIONS}
    frames = pipe(["a", "a"], **options).images
    assert_close(frames[0], frames[2], rtol=0, atol=1e-5)
    before = torch.get_rng_state()
    pipe(["a", "cloud"], num_frames=2, generator=seeds(1, 2), **OPTIONS)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_weaker_network_guides_between_the_prompts_too(pipeline):
    guided = TextToImagePipeline.from_pipe(pipeline, guide_unet=tiny_unet(seed=3))
    frames = InterpolationPipeline.from_pipe(guided)(
        CAPTIONS[:2], num_frames=3, generator=seeds(1, 2), **OPTIONS
    ).images
    assert_close(frames[2], guided(CAPTIONS[1], generator=seeds(2), **OPTIONS).images[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("a", {}, "a list of two or more"),
        (["a"], {}, "a list of two or more"),
        (["a", "b", "c"], {"num_frames": 2}, "num_frames must be at least 3, one for each prompt, got 2"),
        (["a", "b"], {"num_frames": 2.5}, "num_frames must be a whole number"),
        (["a", "b"], {"generator": seeds(1, 2, 3)}, "got 3 generators for 2 pictures"),
        (["a", "b"], {"negative_prompt": ["x", "y"]}, "negative_prompt must be one string, for all frames"),
        (["a", "b"], {"height": 9}, "height must be a positive multiple of 4"),
    ],
)
def test_what_does_not_fit_is_refused(pipeline, prompt, options, message):
    with pytest.raises(ValueError, match=message):
        InterpolationPipeline.from_pipe(pipeline)(prompt, **options)

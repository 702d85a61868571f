import copy
import warnings

import numpy as np
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DEISMultistepScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
)
from pipeline_parts import (
    CAPTIONS,
    DIM,
    oracle,
    quiet,
    seeds,
    stub_pipeline,
    text_parts,
    tiny_pipeline,
    tiny_unconditional,
    tiny_unet,
)
from torch.testing import assert_close

from unet_attn.pipelines.text_to_image import TextToImagePipeline, encode_captions
from unet_attn.schedulers import PREDICTION_TYPES

# diffusers' schedulers call numpy in ways that it has deprecated
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def pipeline():
    return tiny_pipeline()


def clean_picture():
    return torch.rand(1, 3, 12, 12, generator=torch.Generator().manual_seed(5)) * 1.8 - 0.9


# --- an oracle is sampled to the clean picture; every scheduler: tests/test_schedulers.py


@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
def test_a_saved_pipeline_recovers_the_picture_of_an_oracle_of_its_type(prediction_type, tmp_path):
    tiny_unconditional(prediction_type).save_pretrained(tmp_path)
    clean = clean_picture()
    unet = oracle(clean, prediction_type, DDIMScheduler().alphas_cumprod)
    pipe = quiet(TextToImagePipeline.from_pretrained(tmp_path, unet=unet))
    assert pipe.config.prediction_type == prediction_type
    classes = [FlowMatchEulerDiscreteScheduler, DPMSolverMultistepScheduler]
    for scheduler_class in classes if prediction_type == "flow" else [DDIMScheduler, DDPMScheduler]:
        pipe.scheduler = scheduler_class.from_config(pipe.scheduler.config)
        images = pipe(num_inference_steps=13, output_type="pt", generator=seeds(3)).images
        assert_close(images * 2 - 1, clean, rtol=0, atol=1e-3)


def test_a_flow_network_is_given_a_thousand_times_the_flow_time():
    for steps, scheduler_class in ((4, FlowMatchEulerDiscreteScheduler), (5, DPMSolverMultistepScheduler)):
        pipe = stub_pipeline()
        pipe.scheduler = scheduler_class.from_config(pipe.scheduler.config)
        pipe(num_inference_steps=steps, generator=seeds(1))
        sigmas = copy.deepcopy(pipe.scheduler)
        sigmas.set_timesteps(steps)
        assert_close(torch.stack([call[1] for call in pipe.unet.calls]), 1000 * sigmas.sigmas[:-1])


# --- guidance


def marked_stub():
    """Each row is answered by the mean of its text, so that rows of different captions differ."""
    pipe = stub_pipeline(with_text=True)
    pipe.unet.answer = lambda sample, timestep, context: (
        torch.zeros_like(sample) + context[:, 1, 0][:, None, None, None]
    )
    return pipe


def one_step(pipe, **options):
    """One Euler step of a flow from sigma 1 to 0: picture = noise - velocity. Returns the velocity."""
    latents = torch.zeros(1, 3, 12, 12)
    return -(pipe("a red heart", num_inference_steps=1, latents=latents, output_type="pt", **options).images * 2 - 1)


def test_guidance_is_u_plus_scale_times_c_minus_u():
    pipe = marked_stub()
    # small values, so that nothing is clamped
    answers = {0: 0.05, 1: -0.1}
    pipe.unet.answer = lambda sample, timestep, context: torch.stack(
        [torch.full_like(row, answers[int(i)]) for i, row in zip(kinds(context), sample, strict=True)]
    )
    empty = encode_captions([""], pipe.tokenizer, pipe.text_encoder)[0][0, 0]

    def kinds(context):
        return [0 if torch.allclose(row[0], empty, atol=1e-6) else 1 for row in context]

    for scale in (0, 0.5, 1, 3.0, 7):
        expected = answers[0] + scale * (answers[1] - answers[0])
        assert_close(one_step(pipe, guidance_scale=scale), torch.full((1, 3, 12, 12), expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("scale", "rows"), [(1, 3), (1.0, 3), (0, 3), (0.5, 6), (3.0, 6)])
def test_a_step_is_one_forward_pass_and_scale_one_halves_it(scale, rows):
    pipe = marked_stub()
    pipe(CAPTIONS, guidance_scale=scale, num_inference_steps=2, generator=seeds(1, 2, 3))
    assert [len(call[0]) for call in pipe.unet.calls] == [rows, rows]


def test_negative_rows_come_first_and_each_prompts_pictures_stand_together():
    pipe = marked_stub()
    pipe(
        ["a", "b"],
        negative_prompt=["x", "y"],
        num_images_per_prompt=2,
        num_inference_steps=1,
        generator=seeds(*range(4)),
    )
    states, _ = encode_captions(["x", "x", "y", "y", "a", "a", "b", "b"], pipe.tokenizer, pipe.text_encoder)
    assert_close(pipe.unet.calls[0][2], states, rtol=0, atol=1e-6)
    assert len({row[1, 0].item() for row in states}) == 4


def test_one_negative_prompt_is_for_all_and_none_is_the_empty_caption():
    pipe = marked_stub()
    for given, used in (("x", ["x", "x"]), (None, ["", ""])):
        pipe.unet.calls.clear()
        pipe(["a", "b"], negative_prompt=given, num_inference_steps=1)
        states, mask = encode_captions([*used, "a", "b"], pipe.tokenizer, pipe.text_encoder)
        found = pipe.unet.calls[0][2]
        assert_close(found * mask[..., None], states * mask[..., None], rtol=0, atol=1e-6)


def test_a_negative_prompt_without_guidance_is_warned_of(pipeline):
    with pytest.warns(UserWarning, match="negative_prompt has no effect"):
        pipeline("a", negative_prompt="b", guidance_scale=1, num_inference_steps=1)


def test_a_negative_prompt_changes_the_picture(pipeline):
    plain, other = (
        pipeline(
            "a red heart", negative_prompt=text, num_inference_steps=3, generator=seeds(1), output_type="np"
        ).images
        for text in (None, "cloud upload")
    )
    assert np.abs(plain - other).max() > 1e-4


def test_guided_pictures_stay_in_range_at_scale_ten(pipeline):
    images = pipeline(
        "a red heart", guidance_scale=10, num_inference_steps=5, generator=seeds(1), output_type="np"
    ).images
    assert images.min() >= 0 and images.max() <= 1


# --- captions


def test_a_caption_is_encoded_alike_alone_and_beside_a_longer_one():
    text_encoder, tokenizer = text_parts()
    alone, mask = encode_captions(["a red heart"], tokenizer, text_encoder)
    beside, wide_mask = encode_captions(["a red heart", CAPTIONS[2]], tokenizer, text_encoder)
    length = int(mask.sum())
    assert wide_mask.dtype == torch.bool and wide_mask[0].tolist() == [True] * length + [False] * (
        wide_mask.shape[1] - length
    )
    assert_close(beside[0, :length], alone[0], rtol=0, atol=1e-5)


def test_too_long_captions_are_cut_and_keep_their_end():
    text_encoder, tokenizer = text_parts()
    many, mask = encode_captions(["w " * 11], tokenizer, text_encoder)
    more, _ = encode_captions(["w " * 500], tokenizer, text_encoder)
    assert many.shape == (1, 11, DIM) and mask.all()
    assert_close(many, more)
    assert tokenizer(["w " * 500], truncation=True).input_ids[0][-1] == tokenizer.eos_token_id


def test_the_empty_caption_has_tokens_and_gradients_reach_the_encoder():
    text_encoder, tokenizer = text_parts()
    states, mask = encode_captions(["", "a"], tokenizer, text_encoder)
    assert mask[0].sum() == 2
    states.square().sum().backward()
    assert all(parameter.grad is not None for parameter in text_encoder.parameters())


# --- randomness


@pytest.mark.parametrize(
    ("scheduler_class", "eta"),
    [(DDPMScheduler, 0.0), (DDIMScheduler, 0.0), (DDIMScheduler, 1.0), (EulerAncestralDiscreteScheduler, 0.0)],
)
def test_a_picture_of_a_batch_equals_the_picture_made_alone(scheduler_class, eta):
    pipe = tiny_pipeline("epsilon")
    pipe.scheduler = scheduler_class.from_config(pipe.scheduler.config)
    options = {"num_inference_steps": 5, "eta": eta, "output_type": "np"}
    together = pipe(CAPTIONS, generator=seeds(7, 8, 9), **options).images
    for prompt, seed, picture in zip(CAPTIONS, (7, 8, 9), together, strict=True):
        alone = pipe(prompt, generator=seeds(seed)[0], **options).images[0]
        np.testing.assert_allclose(alone, picture, atol=1e-4)
    assert np.abs(together[0] - together[1]).max() > 0.01


def test_ddim_is_deterministic_by_default_and_with_eta_follows_its_generator():
    pipe = tiny_pipeline("v_prediction")
    latents = torch.randn(1, 3, 12, 12, generator=torch.Generator().manual_seed(1))

    def picture(eta, global_seed, generator=None):
        torch.manual_seed(global_seed)
        options = {"num_inference_steps": 5, "latents": latents, "eta": eta, "output_type": "np"}
        return pipe("a", generator=generator, **options).images

    assert (picture(0.0, 1) == picture(0.0, 2)).all()
    assert np.abs(picture(1.0, 1) - picture(1.0, 2)).max() > 1e-3
    assert (picture(1.0, 1, seeds(3)) == picture(1.0, 2, seeds(3))).all()


def test_with_generators_the_global_one_is_not_touched():
    pipe = tiny_pipeline("epsilon")
    pipe.scheduler = DDPMScheduler.from_config(pipe.scheduler.config)
    before = torch.get_rng_state()
    pipe(["a", "b"], generator=seeds(1, 2), num_inference_steps=3)
    assert torch.equal(torch.get_rng_state(), before)


def test_one_generator_for_many_pictures_draws_like_diffusers():
    pipe = stub_pipeline()
    pipe(num_images_per_prompt=2, generator=torch.Generator().manual_seed(4), num_inference_steps=1)
    expected = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(4))
    assert_close(pipe.unet.calls[0][0], expected)


def test_the_start_noise_has_the_scale_that_the_scheduler_asks_for():
    pipe = stub_pipeline("epsilon")
    pipe.scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config)
    pipe(num_inference_steps=3, generator=seeds(2))
    scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config)
    scheduler.set_timesteps(3)
    noise = torch.randn(1, 3, 12, 12, generator=torch.Generator().manual_seed(2))
    expected = scheduler.scale_model_input(noise * scheduler.init_noise_sigma, scheduler.timesteps[0])
    assert_close(pipe.unet.calls[0][0], expected)


def test_the_scheduler_keeps_nothing_from_one_call_to_the_next():
    pipe = tiny_pipeline("epsilon")
    pipe.scheduler = DPMSolverMultistepScheduler.from_config(pipe.scheduler.config)
    before = pipe.scheduler.timesteps.clone()
    first, second = (
        pipe("a", num_inference_steps=steps, generator=seeds(1), output_type="np").images for steps in (5, 5)
    )
    assert (first == second).all()
    assert torch.equal(pipe.scheduler.timesteps, before) and pipe.scheduler.step_index is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_cpu_generator_gives_the_same_start_on_the_gpu_and_a_foreign_one_is_refused():
    on_cpu, on_gpu = stub_pipeline(), stub_pipeline().to("cuda")
    for pipe in (on_cpu, on_gpu):
        pipe(num_inference_steps=1, generator=seeds(1))
    assert torch.equal(on_cpu.unet.calls[0][0], on_gpu.unet.calls[0][0].cpu())
    with pytest.raises(ValueError, match="cannot draw for a model on cpu"):
        on_cpu(generator=torch.Generator("cuda"))


# --- a scheduler of another type


def test_a_scheduler_swapped_for_one_of_another_type_is_refused_at_the_call_and_at_saving(tmp_path):
    pipe = tiny_unconditional("v_prediction")
    pipe.scheduler = DDIMScheduler()
    for action in (pipe, lambda: pipe.save_pretrained(tmp_path / "pipe")):
        with pytest.raises(
            ValueError, match=r"type is epsilon, the model's is v_prediction: make it with DDIM.*from_config"
        ):
            action()
    assert not (tmp_path / "pipe").exists()


def test_deis_is_refused_for_a_flow_model():
    pipe = tiny_unconditional()
    pipe.scheduler = DEISMultistepScheduler.from_config(pipe.scheduler.config)
    with pytest.raises(ValueError, match="DEISMultistepScheduler cannot sample a flow model"):
        pipe()


def test_a_bare_flow_scheduler_is_given_the_keys_by_which_other_classes_know_a_flow():
    pipe = TextToImagePipeline(tiny_unet(context_dim=None), FlowMatchEulerDiscreteScheduler(shift=2.0))
    assert pipe.config.prediction_type == "flow"
    assert DPMSolverMultistepScheduler.from_config(pipe.scheduler.config).config.flow_shift == 2.0


def test_eta_without_effect_is_warned_of():
    with pytest.warns(UserWarning, match="FlowMatchEulerDiscreteScheduler has no such setting"):
        tiny_unconditional()(eta=0.5, num_inference_steps=1)


# --- the life of a call


def test_modes_are_restored_after_a_call_even_when_it_fails():
    pipe = stub_pipeline(with_text=True)
    pipe.unet.train()
    pipe.text_encoder.train()
    pipe.text_encoder.norm.eval()
    pipe("a", num_inference_steps=1)
    assert pipe.unet.modes == [False]

    def fail(sample, timestep, context):
        raise RuntimeError("stop")

    pipe.unet.answer = fail
    with pytest.raises(RuntimeError, match="stop"):
        pipe("a", num_inference_steps=1)
    assert pipe.unet.training and pipe.text_encoder.training and not pipe.text_encoder.norm.training


def test_the_callback_sees_every_step_and_may_change_the_latents():
    pipe = stub_pipeline()
    seen = []

    def callback(caller, step, timestep, values):
        seen.append((caller is pipe, step, float(timestep), sorted(values)))
        return {"latents": torch.full_like(values["latents"], 0.5)}

    images = pipe(num_inference_steps=3, callback_on_step_end=callback, output_type="np").images
    assert [(own, step, names) for own, step, _, names in seen] == [(True, n, ["latents"]) for n in range(3)]
    assert [time for _, _, time, _ in seen] == sorted((time for _, _, time, _ in seen), reverse=True)
    np.testing.assert_allclose(images, 0.75)


def test_a_callback_may_return_nothing_and_may_interrupt():
    pipe = stub_pipeline()

    def stop(caller, step, timestep, values):
        caller._interrupt = step == 1

    pipe(num_inference_steps=7, callback_on_step_end=stop)
    assert len(pipe.unet.calls) == 2 and pipe.num_timesteps == 7
    pipe(num_inference_steps=3)
    assert len(pipe.unet.calls) == 5


def test_the_progress_bar_counts_the_steps_asked_for(capsys):
    pipe = stub_pipeline()
    pipe.set_progress_bar_config(disable=False, ascii=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe(num_inference_steps=3)
    assert "3/3" in capsys.readouterr().err

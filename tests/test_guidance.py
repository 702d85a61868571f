import math
import warnings

import pytest
import torch
from pipeline_parts import seeds, stub_pipeline, text_parts, tiny_pipeline, tiny_unconditional, tiny_unet
from torch.testing import assert_close

from unet_attn.pipelines.captions import encode_captions
from unet_attn.pipelines.guidance import Guidance, Guide, limited, projected, rescaled
from unet_attn.pipelines.text_to_image import TextToImagePipeline
from unet_attn.schedulers import PREDICTION_TYPES, clean_coefficients


def answers(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 3, 5, 7, generator=generator) for _ in range(3)]


# --- the formulas


def test_the_default_rules_are_plain_guidance():
    c, u, sample = answers()
    assert_close(Guide(3.5, Guidance())(c, u, sample, (1.0, -0.5)), u + 3.5 * (c - u))


def test_a_full_rescale_has_the_spread_of_the_answer_and_half_of_it_lies_between():
    c, u, _ = answers()
    guided = u + 6 * (c - u)
    full = rescaled(guided, c, 1.0)
    for row in range(2):
        assert_close(full[row].std(), c[row].std())
        assert_close(full[row] / full[row].std(), guided[row] / guided[row].std())
    assert_close(rescaled(guided, c, 0.25), 0.25 * full + 0.75 * guided)
    assert_close(Guide(6, Guidance(rescale=0.25))(c, u, u, (1.0, -1.0)), 0.25 * full + 0.75 * guided)


def test_the_limit_shortens_what_is_longer_and_leaves_the_rest():
    difference = torch.stack([torch.full((3, 2, 2), 2.0), torch.full((3, 2, 2), 0.1)])
    short = limited(difference, 1.5)
    assert short[0].norm().item() == pytest.approx(1.5)
    assert_close(short[0] / short[0].norm(), difference[0] / difference[0].norm())
    assert torch.equal(short[1], difference[1])


def test_a_projection_splits_into_a_part_along_and_a_part_across():
    difference, direction, _ = answers()
    across = projected(difference, direction, 0.0)
    for row in range(2):
        assert float((across[row] * direction[row]).sum()) == pytest.approx(0, abs=1e-4)
        d, v = difference[row].double().flatten(), direction[row].double().flatten()
        along = (d @ v) / (v @ v) * v
        assert_close(across[row].flatten().double(), d - along, rtol=0, atol=1e-5)
        half = projected(difference, direction, 0.5)[row].flatten().double()
        assert_close(half, d - along + 0.5 * along, rtol=0, atol=1e-5)
    assert_close(projected(difference, direction, 1.0), difference)


@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
def test_projected_guidance_is_that_of_the_clean_pictures_whatever_is_predicted(prediction_type):
    c, u, sample = answers()
    alpha, sigma = (0.4, 0.6) if prediction_type == "flow" else (0.6, 0.8)
    a, b = clean_coefficients(prediction_type, alpha, sigma)
    rules = Guidance(parallel=0.25, norm_limit=2.0, momentum=-0.5)
    guide = Guide(4.0, rules)
    average = 0.0
    for turn in range(3):  # momentum goes from call to call
        answer = c + turn
        clean, weak = a * sample + b * answer, a * sample + b * u
        average = (clean - weak) - 0.5 * average
        step = projected(limited(average, 2.0), clean, 0.25)
        found = a * sample + b * guide(answer, u, sample, (a, b))
        assert_close(found, clean + 3.0 * step, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
def test_the_clean_coefficients_give_the_clean_picture_of_a_right_answer(prediction_type):
    clean, noise, _ = answers()
    alpha, sigma = (0.4, 0.6) if prediction_type == "flow" else (0.6, 0.8)
    noisy = alpha * clean + sigma * noise
    answer = {
        "flow": noise - clean,
        "epsilon": noise,
        "v_prediction": alpha * noise - sigma * clean,
        "sample": clean,
    }[prediction_type]
    a, b = clean_coefficients(prediction_type, alpha, sigma)
    assert_close(a * noisy + b * answer, clean)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rescale": 1.5}, "rescale must lie in 0..1, got 1.5"),
        ({"rescale": math.nan}, "rescale"),
        ({"interval": (2.0, 1.0)}, r"0 <= low < high, got \(2.0, 1.0\)"),
        ({"interval": (-1.0, 1.0)}, "interval"),
        ({"interval": None}, "interval must be two noise levels, 0 <= low < high, got None"),
        ({"interval": (1,)}, r"interval must be two noise levels, .* got \(1,\)"),
        ({"interval": "ab"}, "interval must be two noise levels, .* got 'ab'"),
        ({"rescale": "much"}, "rescale must be a number, got 'much'"),
        ({"norm_limit": 0.0}, "norm_limit must be above 0"),
        ({"momentum": 1.0}, "momentum must lie between -1 and 1"),
        ({"parallel": math.inf}, "parallel must be a finite number"),
    ],
)
def test_rules_out_of_range_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        Guidance(**options)


# --- in the pipeline


def test_guidance_acts_in_the_interval_only_and_elsewhere_costs_one_answer():
    pipe = stub_pipeline(with_text=True)
    rules = Guidance(interval=(0.3, 2.0))
    pipe("a", num_inference_steps=10, guidance=rules, generator=seeds(1))
    # of a flow sigma / alpha = t / (1 - t): in the interval where t is in (3/13, 2/3]
    times = [float(call[1]) / 1000 for call in pipe.unet.calls]
    expected = [2 if 0.3 / 1.3 < time <= 2 / 3 else 1 for time in times]
    assert [len(call[0]) for call in pipe.unet.calls] == expected
    assert 2 in expected and expected[0] == 1 and expected[-1] == 1


def test_the_interval_of_another_prediction_type_is_the_same_noise_level():
    pipe = stub_pipeline("epsilon", with_text=True)
    pipe("a", num_inference_steps=10, guidance=Guidance(interval=(0.3, 2.0)), generator=seeds(1))
    for sample, timestep, _ in pipe.unet.calls:
        cumulative = float(pipe.scheduler.alphas_cumprod[int(timestep)])
        level = math.sqrt((1 - cumulative) / cumulative)
        assert len(sample) == (2 if 0.3 < level <= 2.0 else 1)


@pytest.mark.parametrize("rules", [Guidance(rescale=0.7), Guidance(parallel=0.0, norm_limit=1.0, momentum=-0.5)])
def test_each_rule_changes_the_picture_and_leaves_scale_one_alone(rules):
    pipe = tiny_pipeline("v_prediction")

    def picture(scale, **options):
        return pipe(
            "a red heart", guidance_scale=scale, num_inference_steps=3, generator=seeds(1), output_type="pt", **options
        ).images

    assert (picture(5.0, guidance=rules) - picture(5.0)).abs().max() > 1e-4
    with pytest.warns(UserWarning, match="^guidance has no effect at guidance_scale 1$"):
        unguided = picture(1.0, guidance=rules)
    assert torch.equal(unguided, picture(1.0))


def test_momentum_does_not_pass_from_one_call_to_the_next():
    pipe = tiny_pipeline()
    options = {"guidance": Guidance(momentum=-0.5), "num_inference_steps": 3, "output_type": "pt"}
    first, second = (pipe("a", generator=seeds(1), **options).images for _ in range(2))
    assert torch.equal(first, second)


# --- autoguidance


def test_a_weaker_network_answers_to_the_same_prompt_and_is_led_away_from():
    pipe, weak = stub_pipeline(with_text=True), stub_pipeline(with_text=True).unet
    guided = TextToImagePipeline.from_pipe(pipe, guide_unet=weak)
    pipe.unet.answer = lambda sample, timestep, context: torch.full_like(sample, -0.1)
    weak.answer = lambda sample, timestep, context: torch.full_like(sample, 0.05)
    latents = torch.zeros(1, 3, 12, 12)
    options = {"num_inference_steps": 1, "latents": latents, "output_type": "latent"}
    for scale in (0.0, 3.0):
        # one Euler step of a flow from sigma 1 to 0: the picture is the noise less the velocity
        found = -guided("a red heart", guidance_scale=scale, **options).images
        assert_close(found, torch.full_like(latents, 0.05 + scale * (-0.1 - 0.05)))
    states, _ = encode_captions(["a red heart"], pipe.tokenizer, pipe.text_encoder)
    assert all(torch.equal(call[2], states) for call in [*pipe.unet.calls, *weak.calls])
    weak.calls.clear()
    with pytest.warns(UserWarning, match="guide_unet has no effect at guidance_scale 1"):
        alone = -guided("a", guidance_scale=1.0, **options).images
    assert_close(alone, torch.full_like(latents, -0.1))
    assert weak.calls == []
    guided("a", negative_prompt="cloud", **options)
    states, mask = encode_captions(["cloud", "a"], pipe.tokenizer, pipe.text_encoder)
    assert_close(weak.calls[0][2] * mask[:1, :, None], states[:1] * mask[:1, :, None])


def test_a_guide_works_without_text_and_is_saved_and_loaded(tmp_path):
    plain = tiny_unconditional()
    pipe = TextToImagePipeline.from_pipe(plain, guide_unet=tiny_unet(context_dim=None, seed=3))
    options = {"num_inference_steps": 2, "output_type": "pt"}
    expected = pipe(generator=seeds(1), **options).images
    assert (expected - plain(generator=seeds(1), **options).images).abs().max() > 1e-4
    pipe.save_pretrained(tmp_path)
    loaded = TextToImagePipeline.from_pretrained(tmp_path)
    assert torch.equal(loaded(generator=seeds(1), **options).images, expected)
    assert TextToImagePipeline.from_pipe(loaded).guide_unet is loaded.guide_unet


def test_what_is_given_for_the_guidance_of_a_model_that_has_none_is_told_of():
    pipe = tiny_unconditional()
    options = {"num_inference_steps": 1, "output_type": "pt"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = pipe(generator=seeds(1), **options).images
        for scale in (1, 3.0):  # 3 is the pipeline's own, which scripts give where their user gave none
            pipe(guidance_scale=scale, guidance=Guidance(), **options)
        TextToImagePipeline.from_pipe(pipe, guide_unet=pipe.unet)(guidance_scale=7.0, **options)
    for name, value in (
        ("guidance_scale", 7.0),
        ("guidance", Guidance(rescale=0.5)),
        ("guidance", Guidance(momentum=0.1)),
    ):
        with pytest.warns(
            UserWarning, match=f"^{name} has no effect on a model without text, unless it has a guide_un"
        ):
            found = pipe(generator=seeds(1), **{name: value}, **options).images
        assert torch.equal(found, expected)


def test_a_guide_that_does_not_fit_is_refused_at_construction():
    pipe = tiny_unconditional()
    with pytest.raises(ValueError, match="guide_unet must have the U-Net's in_channels 3, got 1"):
        TextToImagePipeline.from_pipe(pipe, guide_unet=tiny_unet(context_dim=None, channels=1))
    text_encoder, tokenizer = text_parts()
    with pytest.raises(ValueError, match="context_dim 12, got None"):
        TextToImagePipeline(
            tiny_unet(), pipe.scheduler, text_encoder, tokenizer, guide_unet=tiny_unet(context_dim=None)
        )

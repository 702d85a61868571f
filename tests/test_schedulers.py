"""Every scheduler of the table: an oracle's picture, pictures made alone, and starts in the middle."""

import math

import diffusers
import numpy as np
import pytest
import torch
from diffusers import (
    DDIMInverseScheduler,
    DDIMScheduler,
    DDPMScheduler,
    DEISMultistepScheduler,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    HeunDiscreteScheduler,
    LCMScheduler,
    PNDMScheduler,
)
from pipeline_parts import (
    CAPTIONS,
    StubUNet,
    oracle,
    quiet,
    scheduler_for,
    seeds,
    tiny_pipeline,
    tiny_unconditional,
    tiny_unet,
    with_recorded_scales,
)
from scheduler_cases import CASES, PAGE, ZERO_TERMINAL_SNR, written
from torch.testing import assert_close

from unet_attn.objective import Objective
from unet_attn.pipelines.image_to_image import ImageToImagePipeline
from unet_attn.pipelines.pictures import FIRST_STEP_ONLY
from unet_attn.pipelines.text_to_image import TextToImagePipeline
from unet_attn.schedulers import (
    PREDICTION_TYPES,
    check_sampling_scheduler,
    declare_prediction_type,
    inversion_schedulers,
    sampling_schedulers,
    scheduler_from_config,
    scheduler_prediction_type,
)

# diffusers' schedulers call numpy in ways that it has deprecated
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

PAIRS = [(kind, case) for case in CASES for kind in case.types()]
NAMES = [f"{kind}-{case.title}" for kind, case in PAIRS]
COSINE = {"beta_schedule": "squaredcos_cap_v2"}


def clean_picture():
    return torch.rand(1, 3, 12, 12, generator=torch.Generator().manual_seed(5)) * 1.8 - 0.9


def scheduler_of(case, base, scheduler_class=None):
    return (scheduler_class or getattr(diffusers, case.name)).from_config(base.config, **case.settings)


def test_the_page_has_the_table_of_this_list_and_the_list_has_every_scheduler():
    page = PAGE.read_text(encoding="utf-8")
    assert page == written(page)
    offered = {name for kind in PREDICTION_TYPES for name in sampling_schedulers(kind)}
    assert {case.name for case in CASES} == offered


def sampled_oracle(prediction_type, case, betas=None):
    """Two pictures (2, C, H, W) of a network that always answers rightly for the clean picture, and that picture."""
    clean = clean_picture()
    base = scheduler_for(prediction_type, betas)
    scheduler_class, scales = with_recorded_scales(getattr(diffusers, case.name))
    unet = oracle(clean, prediction_type, getattr(base, "alphas_cumprod", None), scales)
    pipe = quiet(TextToImagePipeline(unet, base))
    pipe.scheduler = scheduler_of(case, base, scheduler_class)
    images = pipe(num_images_per_prompt=2, num_inference_steps=20, generator=seeds(1, 2), output_type="pt").images
    return images * 2 - 1, clean.expand(2, -1, -1, -1)


@pytest.mark.parametrize(("prediction_type", "case"), PAIRS, ids=NAMES)
def test_an_oracle_of_every_type_gives_the_clean_picture(prediction_type, case):
    found, clean = sampled_oracle(prediction_type, case)
    assert_close(found, clean, rtol=0, atol=case.error)


@pytest.mark.parametrize("case", [case for case in CASES if case.types(COSINE)], ids=lambda case: case.title)
def test_an_oracle_with_cosine_betas_gives_the_clean_picture(case):
    for kind in case.types(COSINE):
        found, clean = sampled_oracle(kind, case, COSINE)
        assert_close(found, clean, rtol=0, atol=case.error)


@pytest.mark.parametrize("case", [case for case in CASES if case.types(ZERO_TERMINAL_SNR)], ids=lambda case: case.title)
def test_an_oracle_with_zero_terminal_snr_gives_the_clean_picture(case):
    for kind in case.types(ZERO_TERMINAL_SNR):
        found, clean = sampled_oracle(kind, case, ZERO_TERMINAL_SNR)
        assert_close(found, clean, rtol=0, atol=case.error)


@pytest.mark.parametrize("case", [case for case in CASES if "flow" in case.types()], ids=lambda case: case.title)
def test_a_network_that_predicts_the_picture_samples_it_with_every_flow_scheduler(case, tmp_path):
    unet = tiny_unet(context_dim=None, x_prediction=True)
    colours = torch.linspace(-0.9, 0.9, len(unet.conv_out.bias))
    with torch.no_grad():
        unet.conv_out.weight.zero_()
        unet.conv_out.bias.copy_(colours)  # whatever it is shown, it sees this picture
    TextToImagePipeline(unet, scheduler_for("flow")).save_pretrained(tmp_path)
    pipe = quiet(TextToImagePipeline.from_pretrained(tmp_path))
    assert pipe.config.prediction_type == "flow" and pipe.unet.config.x_prediction
    pipe.scheduler = scheduler_of(case, pipe.scheduler)
    images = pipe(num_images_per_prompt=2, num_inference_steps=20, generator=seeds(1, 2), output_type="pt").images
    expected = torch.nn.functional.pixel_shuffle(colours[:, None, None].expand(-1, 6, 6), 2)
    assert_close(images * 2 - 1, expected.expand(2, -1, -1, -1), rtol=0, atol=case.error)


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


# --- what a scheduler's config carries, and what is refused


@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
def test_the_sampling_scheduler_carries_the_type_through_saving_and_other_classes(prediction_type, tmp_path):
    scheduler = scheduler_for(prediction_type)
    assert scheduler_prediction_type(scheduler) == prediction_type
    scheduler.save_pretrained(tmp_path)
    config = type(scheduler).load_config(tmp_path)
    loaded = scheduler_from_config(type(scheduler), config)
    other = DPMSolverMultistepScheduler.from_config(loaded.config)
    back = type(scheduler).from_config(other.config)
    for each in (loaded, other, back):
        check_sampling_scheduler(each, prediction_type)


def test_the_betas_survive_a_change_of_class():
    # even where they are one class's defaults and not the other's
    for betas in ({}, {"beta_schedule": "scaled_linear", "beta_start": 0.0013, "beta_end": 0.017}):
        scheduler = Objective(DDIMScheduler(**betas), prediction_type="sample").sampling_scheduler()
        for scheduler_class in (DPMSolverMultistepScheduler, LCMScheduler):
            other = scheduler_class.from_config(scheduler.config)
            assert_close(other.alphas_cumprod, scheduler.alphas_cumprod)


def test_declaring_a_type_leaves_the_scheduler_at_work_as_it_was():
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    declare_prediction_type(scheduler, "flow")
    assert scheduler.shift == 3.0 and scheduler.config.flow_shift == 3.0
    scheduler.set_timesteps(5)
    expected = FlowMatchEulerDiscreteScheduler(shift=3.0)
    expected.set_timesteps(5)
    assert_close(scheduler.sigmas, expected.sigmas)


def test_the_flow_shift_becomes_that_of_the_multistep_schedulers():
    scheduler = Objective(FlowMatchEulerDiscreteScheduler(shift=3.0)).sampling_scheduler()
    other = DPMSolverMultistepScheduler.from_config(scheduler.config)
    assert other.config.flow_shift == 3.0 and other.config.use_flow_sigmas
    assert FlowMatchEulerDiscreteScheduler.from_config(other.config).shift == 3.0
    other.set_timesteps(5)
    # sigma = 3 s / (1 + 2 s) at s = 1 - 1/1000 first
    assert float(other.sigmas[0]) == pytest.approx(3 * 0.999 / (1 + 2 * 0.999), abs=1e-6)


def test_a_sampling_scheduler_of_another_type_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"type is epsilon, the model's is sample.*from_config"):
        check_sampling_scheduler(DDIMScheduler(), "sample")
    with pytest.raises(ValueError, match=r"type is epsilon, the model's is flow.*from_config"):
        check_sampling_scheduler(DPMSolverMultistepScheduler(), "flow")
    with pytest.raises(ValueError, match="FlowMatchEulerDiscreteScheduler cannot sample a epsilon model"):
        # the key that it was copied with does not make it one
        check_sampling_scheduler(FlowMatchEulerDiscreteScheduler.from_config(DDIMScheduler().config), "epsilon")


def test_deis_is_refused_in_flow_mode_and_allowed_otherwise():
    flow = Objective(FlowMatchEulerDiscreteScheduler()).sampling_scheduler()
    with pytest.raises(
        ValueError, match="DEISMultistepScheduler cannot sample a flow model; these can: FlowMatchEuler"
    ):
        check_sampling_scheduler(DEISMultistepScheduler.from_config(flow.config), "flow")
    check_sampling_scheduler(DEISMultistepScheduler.from_config(DDIMScheduler().config), "epsilon")


def test_unsafe_settings_of_a_scheduler_are_refused():
    with pytest.raises(ValueError, match="linspace"):
        check_sampling_scheduler(DDIMScheduler(timestep_spacing="linspace"), "epsilon")
    flow = Objective(FlowMatchEulerDiscreteScheduler()).sampling_scheduler()
    with pytest.raises(ValueError, match="use_karras_sigmas=True leaves the flow's own noise levels"):
        check_sampling_scheduler(DPMSolverMultistepScheduler.from_config(flow.config, use_karras_sigmas=True), "flow")
    cosine = scheduler_for("epsilon", {**COSINE, "timestep_spacing": "trailing"})
    with pytest.raises(ValueError, match="PNDMScheduler with squaredcos_cap_v2 cannot begin at the last step"):
        check_sampling_scheduler(PNDMScheduler.from_config(cosine.config), "epsilon")
    with pytest.raises(ValueError, match="use_dynamic_shifting"):
        check_sampling_scheduler(FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), "flow")
    with pytest.raises(ValueError, match="without use_flow_sigmas"):
        scheduler_prediction_type(DPMSolverMultistepScheduler(prediction_type="flow_prediction"))


@pytest.mark.parametrize(
    ("kind", "name", "settings", "message"),
    [
        ("flow", "FlowMatchEulerDiscrete", {"invert_sigmas": True}, "invert_sigmas=True goes from pictures to noise"),
        ("flow", "FlowMatchEulerDiscrete", {"shift": 0.0}, "shift=0.0 has noise levels outside 0..1"),
        ("flow", "FlowMatchHeunDiscrete", {"shift": -1.0}, "shift=-1.0 has noise levels outside"),
        ("flow", "FlowMatchLCM", {"shift": 0.0}, "shift=0.0 has noise levels outside"),
        ("flow", "FlowMatchLCM", {"invert_sigmas": True}, "invert_sigmas=True goes from pictures to noise"),
        ("flow", "FlowMatchLCM", {"use_dynamic_shifting": True}, "needs a shift per picture size"),
        ("flow", "UniPCMultistep", {"flow_shift": -1.0}, "flow_shift=-1.0 has noise levels outside"),
        ("flow", "UniPCMultistep", {"final_sigmas_type": "sigma_min"}, "sigma_min leaves noise in a flow's pictures"),
        ("flow", "DPMSolverMultistep", {"use_lu_lambdas": True}, "use_lu_lambdas=True leaves the flow's own"),
        ("flow", "DPMSolverSinglestep", {"algorithm_type": "dpmsolver"}, "sigma_min leaves noise"),
        ("epsilon", "DPMSolverMultistep", {"algorithm_type": "sde-dpmsolver"}, "use sde-dpmsolver[+][+]"),
        ("epsilon", "UniPCMultistep", {"predict_x0": False}, "predict_x0=False divides by"),
        ("sample", "UniPCMultistep", {"solver_type": "bh1"}, "solver_type bh1 divides infinity"),
        ("epsilon", "DDPM", {"variance_type": "learned"}, "learned variance is not supported"),
        ("epsilon", "DPMSolverMultistep", {"use_flow_sigmas": True}, "use_flow_sigmas=True has a flow's noise levels"),
        ("epsilon", "DPMSolverSinglestep", {"use_flow_sigmas": True}, "use_flow_sigmas=True has a flow's"),
        ("v_prediction", "DEISMultistep", {"use_flow_sigmas": True}, "use_flow_sigmas=True has a flow's"),
        ("sample", "UniPCMultistep", {"use_flow_sigmas": True}, "use_flow_sigmas=True has a flow's"),
        ("v_prediction", "EulerDiscrete", {"timestep_type": "continuous"}, "continuous gives the network other times"),
        ("epsilon", "PNDM", {"timestep_spacing": "linspace"}, "linspace misses its own next step"),
        ("epsilon", "DDIM", {"trained_betas": torch.linspace(1e-4, 0.02, 1000)}, "as a tensor cannot be saved"),
    ],
)
def test_settings_with_which_an_oracle_fails_are_refused_by_name(kind, name, settings, message):
    if str(settings.get("algorithm_type")).endswith("dpmsolver"):
        settings = {**settings, "final_sigmas_type": "sigma_min"}  # diffusers itself refuses zero
    scheduler = getattr(diffusers, f"{name}Scheduler").from_config(scheduler_for(kind).config, **settings)
    with pytest.raises(ValueError, match=f"{name}Scheduler with .*{message}"):
        check_sampling_scheduler(scheduler, kind)


def test_a_shift_set_later_is_seen_and_what_samples_rightly_stays_allowed():
    scheduler = scheduler_for("flow")
    scheduler.set_shift(-2.0)
    with pytest.raises(ValueError, match=r"shift=-2\.0"):
        check_sampling_scheduler(scheduler, "flow")
    for kind, settings in (("epsilon", {"final_sigmas_type": "sigma_min"}), ("epsilon", {"use_lu_lambdas": True})):
        made = DPMSolverMultistepScheduler.from_config(scheduler_for(kind).config, **settings)
        check_sampling_scheduler(made, kind)
    # it does nothing for epsilon, and nothing in a class that does not know it
    for name, kind in (("EulerDiscrete", "epsilon"), ("DDIM", "v_prediction")):
        config = {**scheduler_for(kind).config, "timestep_type": "continuous"}
        check_sampling_scheduler(scheduler_from_config(getattr(diffusers, f"{name}Scheduler"), config), kind)


def test_the_noise_levels_of_a_flow_do_not_come_along_to_another_model():
    trained = DDIMScheduler.from_config(scheduler_for("flow").config)
    assert trained.config.use_flow_sigmas
    scheduler = Objective(trained, prediction_type="epsilon").sampling_scheduler()
    other = DPMSolverMultistepScheduler.from_config(scheduler.config)
    assert not other.config.use_flow_sigmas
    check_sampling_scheduler(other, "epsilon")
    own = DDIMScheduler.from_config(scheduler_for("flow").config, prediction_type="sample")
    pipe = TextToImagePipeline(StubUNet(), own)
    assert not DPMSolverMultistepScheduler.from_config(pipe.scheduler.config).config.use_flow_sigmas


def test_betas_that_a_class_does_not_know_are_refused_by_name():
    config = Objective(DDPMScheduler(beta_schedule="sigmoid"), prediction_type="epsilon").sampling_scheduler().config
    for name in sampling_schedulers("epsilon"):
        if name == "DDPMScheduler":
            continue
        with pytest.raises(ValueError, match=f"^{name} has no beta_schedule 'sigmoid', which the config asks for"):
            scheduler_from_config(getattr(diffusers, name), config)


def test_schedulers_that_know_no_sample_prediction_are_not_offered_for_it():
    assert "PNDMScheduler" in sampling_schedulers("epsilon")
    assert "PNDMScheduler" not in sampling_schedulers("sample")
    assert "DDIMScheduler" not in sampling_schedulers("flow")


def test_x_prediction_is_refused_in_a_pipeline_without_a_flow():
    unet = tiny_unet(context_dim=None, x_prediction=True)
    for parts in ({"unet": unet}, {"unet": tiny_unet(context_dim=None), "guide_unet": unet}):
        with pytest.raises(ValueError, match="x_prediction answers with a flow's velocity, not with sample"):
            TextToImagePipeline(**parts, scheduler=scheduler_for("sample"))


def test_zero_terminal_snr_goes_along_and_is_refused_where_it_would_be_lost():
    base = scheduler_for("v_prediction", ZERO_TERMINAL_SNR)
    solver = DPMSolverMultistepScheduler.from_config(base.config)
    assert_close(solver.alphas_cumprod, base.alphas_cumprod, rtol=0, atol=1e-7)
    solver.set_timesteps(7)
    assert int(solver.timesteps[0]) == 999
    with pytest.raises(ValueError, match=r"HeunDiscreteScheduler does not know rescale_betas_zero_snr.*these do: DDPM"):
        check_sampling_scheduler(HeunDiscreteScheduler.from_config(base.config), "v_prediction")
    with pytest.raises(ValueError, match=r"never begins at the last step.*set timestep_spacing to trailing"):
        check_sampling_scheduler(DDIMScheduler.from_config(base.config, timestep_spacing="leading"), "v_prediction")
    epsilon = DDIMScheduler(**ZERO_TERMINAL_SNR, prediction_type="epsilon")
    with pytest.raises(ValueError, match="cannot go with epsilon"):
        check_sampling_scheduler(epsilon, "epsilon")


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


@pytest.mark.parametrize(
    ("prediction_type", "betas"), [("epsilon", None), ("v_prediction", None), ("v_prediction", ZERO_TERMINAL_SNR)]
)
def test_ddim_inverse_finds_the_noise_of_a_picture_and_ddim_the_picture_again(prediction_type, betas):
    base = scheduler_for(prediction_type, betas)
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

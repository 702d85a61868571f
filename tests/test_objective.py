import math

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DEISMultistepScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    LCMScheduler,
)
from torch.testing import assert_close

from unet_attn.objective import (
    MIN_SNR_GAMMA,
    PREDICTION_TYPES,
    Objective,
    check_sampling_scheduler,
    declare_prediction_type,
    sampling_schedulers,
    scheduler_from_config,
    scheduler_prediction_type,
)

# diffusers' schedulers call numpy in ways that it has deprecated
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

DISCRETE_TYPES = ("epsilon", "v_prediction", "sample")


def training_scheduler(prediction_type):
    return FlowMatchEulerDiscreteScheduler() if prediction_type == "flow" else DDPMScheduler()


def pictures(count=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    clean = torch.rand(count, 3, 7, 11, generator=generator) * 2 - 1
    return clean, torch.randn(clean.shape, generator=generator)


def stratified(count):
    return (torch.arange(count) + 0.5) / count


@pytest.mark.parametrize("scheduler_class", [DDPMScheduler, DDIMScheduler])
@pytest.mark.parametrize("beta_schedule", ["linear", "scaled_linear", "squaredcos_cap_v2"])
def test_noising_and_velocity_equal_the_stock_scheduler(scheduler_class, beta_schedule):
    scheduler = scheduler_class(beta_schedule=beta_schedule, num_train_timesteps=103)
    objective = Objective(scheduler, prediction_type="v_prediction", time_sampling="uniform")
    clean, noise = pictures()
    t = objective.sample_times(stratified(5))
    assert_close(objective.add_noise(clean, noise, t), scheduler.add_noise(clean, noise, t), rtol=0, atol=1e-6)
    assert_close(objective.target(clean, noise, t), scheduler.get_velocity(clean, noise, t), rtol=0, atol=1e-6)


def test_flow_noising_equals_the_stock_scheduler_and_the_target_is_its_slope():
    scheduler = FlowMatchEulerDiscreteScheduler()
    objective = Objective(scheduler)
    clean, noise = pictures()
    timesteps = scheduler.timesteps[torch.tensor([0, 13, 211, 599, 998])]
    t = timesteps / 1000
    assert_close(
        objective.add_noise(clean, noise, t), scheduler.scale_noise(clean, timesteps, noise), rtol=0, atol=1e-6
    )
    assert_close(objective.model_timestep(t), timesteps, rtol=0, atol=1e-3)
    later = objective.add_noise(clean, noise, t + 0.125) - objective.add_noise(clean, noise, t)
    assert_close(objective.target(clean, noise, t), later / 0.125, rtol=0, atol=1e-5)


def test_the_targets_of_epsilon_and_sample_are_the_noise_and_the_picture():
    clean, noise = pictures()
    t = torch.tensor([0, 1, 2, 500, 999])
    assert_close(Objective(DDPMScheduler(), prediction_type="epsilon").target(clean, noise, t), noise)
    assert_close(Objective(DDPMScheduler(), prediction_type="sample").target(clean, noise, t), clean)


@pytest.mark.parametrize("loss_weighting", ["none", "min_snr"])
@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
def test_an_oracle_has_loss_zero_and_a_wrong_answer_has_not(prediction_type, loss_weighting):
    objective = Objective(
        training_scheduler(prediction_type), prediction_type=prediction_type, loss_weighting=loss_weighting
    )
    clean, noise = pictures()
    t = objective.sample_times(stratified(5))
    answer = objective.target(clean, noise, t)
    loss = objective.loss(answer, clean, noise, t)
    assert loss.shape == (5,) and loss.dtype == torch.float32
    assert_close(loss, torch.zeros(5))
    assert_close(objective.loss(answer + 0.5, clean, noise, t), 0.25 * objective.weight(t))
    assert (objective.weight(t) > 0).all()


def test_min_snr_weights_follow_the_formula_of_each_type():
    scheduler = DDPMScheduler()
    t = torch.tensor([0, 99, 400, 998])
    weights = [
        Objective(scheduler, prediction_type=kind, loss_weighting="min_snr").weight(t) for kind in DISCRETE_TYPES
    ]
    for step, found in zip(t.tolist(), torch.stack(weights, dim=1).tolist(), strict=True):
        cumulative = float(scheduler.alphas_cumprod[step])
        snr = cumulative / (1 - cumulative)
        clipped = min(snr, MIN_SNR_GAMMA)
        expected = (clipped / snr, clipped / (snr + 1), clipped)
        assert found == pytest.approx(expected, rel=1e-3)
    flow = Objective(FlowMatchEulerDiscreteScheduler(), loss_weighting="min_snr")
    times = torch.tensor([0.1, 0.5, 0.9])
    expected = [min(((1 - t) / t) ** 2, MIN_SNR_GAMMA) * t**2 for t in (0.1, 0.5, 0.9)]
    assert flow.weight(times).tolist() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
def test_min_snr_is_one_loss_of_the_picture_whatever_is_predicted(prediction_type):
    # an error of the predicted picture, carried over into each type, costs min(SNR, gamma) times its square
    objective = Objective(
        training_scheduler(prediction_type), prediction_type=prediction_type, loss_weighting="min_snr"
    )
    clean, noise = pictures(1)
    t = torch.tensor([0.4]) if prediction_type == "flow" else torch.tensor([250])
    noisy = objective.add_noise(clean, noise, t)
    alpha, sigma = objective._scales(t, 4)
    wrong = clean + 0.125
    implied_noise = (noisy - alpha * wrong) / sigma
    answer = objective.target(wrong, implied_noise, t)
    snr = float((alpha / sigma) ** 2)
    expected = min(snr, MIN_SNR_GAMMA) * 0.125**2
    assert objective.loss(answer, clean, noise, t).item() == pytest.approx(expected, rel=1e-3)


def test_logit_normal_times_have_the_quantiles_of_the_normal_distribution():
    objective = Objective(FlowMatchEulerDiscreteScheduler())
    # the standard normal's quantiles at 0.1, 0.5 and 0.9 are -1.2816, 0 and 1.2816
    times = objective.sample_times(torch.tensor([0.1, 0.5, 0.9]))
    expected = [1 / (1 + math.exp(1.2815516)), 0.5, 1 / (1 + math.exp(-1.2815516))]
    assert_close(times, torch.tensor(expected), rtol=0, atol=1e-5)


@pytest.mark.parametrize("time_sampling", ["logit_normal", "uniform"])
@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
def test_times_stay_inside_their_range_at_both_ends_and_in_order(prediction_type, time_sampling):
    objective = Objective(
        training_scheduler(prediction_type), prediction_type=prediction_type, time_sampling=time_sampling
    )
    uniform = torch.tensor([0.0, 0.25, 0.75, 1.0 - 2.0**-24])
    times = objective.sample_times(uniform)
    assert (times[1:] > times[:-1]).all()
    if prediction_type == "flow":
        assert times.dtype == torch.float32 and times.min() > 0 and times.max() < 1
    else:
        assert times.dtype == torch.int64 and times.min() >= 0 and times.max() <= 999


def test_uniform_discrete_times_reach_every_step_equally():
    objective = Objective(DDPMScheduler(num_train_timesteps=7), prediction_type="sample", time_sampling="uniform")
    counts = objective.sample_times(stratified(7 * 13)).bincount(minlength=7)
    assert counts.tolist() == [13] * 7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_noise_at_small_times_does_not_vanish_in_half_precision(dtype):
    scheduler = DDPMScheduler()
    objective = Objective(scheduler, prediction_type="epsilon")
    generator = torch.Generator().manual_seed(3)
    clean = torch.ones(2, 3, 61, 61, dtype=dtype)
    noise = torch.randn(clean.shape, generator=generator).to(dtype)
    t = torch.tensor([0, 2])
    noisy = objective.add_noise(clean, noise, t)
    assert noisy.dtype == torch.float32
    for row, step in zip(noisy, t.tolist(), strict=True):
        expected = float((1 - scheduler.alphas_cumprod[step].double()).sqrt())
        assert float((row - clean[0].float()).std()) == pytest.approx(expected, rel=0.05)


def test_a_prediction_of_another_shape_is_refused():
    objective = Objective(FlowMatchEulerDiscreteScheduler())
    clean, noise = pictures()
    with pytest.raises(ValueError, match=r"\(5, 1, 7, 11\).*\(5, 3, 7, 11\)"):
        objective.loss(clean[:, :1], clean, noise, torch.full((5,), 0.5))


@pytest.mark.parametrize(
    ("option", "value"), [("prediction_type", "score"), ("time_sampling", "cosine"), ("loss_weighting", "snr")]
)
def test_unknown_options_are_refused_by_name(option, value):
    with pytest.raises(ValueError, match=f"{option} must be one of .* got '{value}'"):
        Objective(FlowMatchEulerDiscreteScheduler(), **{option: value})


@pytest.mark.parametrize(
    ("scheduler", "prediction_type"),
    [
        (DDIMScheduler(), "flow"),
        (FlowMatchEulerDiscreteScheduler(), "epsilon"),
        (EulerDiscreteScheduler(), "epsilon"),
        (DPMSolverMultistepScheduler(), "v_prediction"),
    ],
)
def test_a_scheduler_that_cannot_train_the_type_is_refused(scheduler, prediction_type):
    with pytest.raises(ValueError, match=f"{type(scheduler).__name__} cannot train a {prediction_type} model"):
        Objective(scheduler, prediction_type=prediction_type)


def test_zero_terminal_snr_is_refused_for_epsilon_only():
    scheduler = DDIMScheduler(rescale_betas_zero_snr=True)
    with pytest.raises(ValueError, match="rescale_betas_zero_snr"):
        Objective(scheduler, prediction_type="epsilon")
    Objective(scheduler, prediction_type="v_prediction")


def test_a_learned_variance_is_refused():
    with pytest.raises(ValueError, match="learned variance"):
        Objective(DDPMScheduler(variance_type="learned_range"), prediction_type="epsilon")


@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
def test_the_sampling_scheduler_carries_the_type_through_saving_and_other_classes(prediction_type, tmp_path):
    scheduler = Objective(training_scheduler(prediction_type), prediction_type=prediction_type).sampling_scheduler()
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
    with pytest.raises(ValueError, match="use_dynamic_shifting"):
        check_sampling_scheduler(FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), "flow")
    with pytest.raises(ValueError, match="without use_flow_sigmas"):
        scheduler_prediction_type(DPMSolverMultistepScheduler(prediction_type="flow_prediction"))


def test_schedulers_that_know_no_sample_prediction_are_not_offered_for_it():
    assert "PNDMScheduler" in sampling_schedulers("epsilon")
    assert "PNDMScheduler" not in sampling_schedulers("sample")
    assert "DDIMScheduler" not in sampling_schedulers("flow")

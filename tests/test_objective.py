"""Noising, targets and times against the formulas and the stock schedulers, and what an objective refuses."""

import math

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
)
from pipeline_parts import tiny_unet
from torch.testing import assert_close

from unet_attn.loss_weights import NoiseUncertainty
from unet_attn.objective import Objective
from unet_attn.sampler import stratified_uniform
from unet_attn.schedulers import PREDICTION_TYPES

# diffusers' schedulers call numpy in ways that it has deprecated
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


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


@pytest.mark.parametrize("loss_weighting", ["none", "min_snr", "soft_min_snr"])
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


def test_logit_normal_times_have_the_quantiles_of_the_normal_distribution():
    objective = Objective(FlowMatchEulerDiscreteScheduler())
    # the standard normal's quantiles at 0.1, 0.5 and 0.9 are -1.2816, 0 and 1.2816
    times = objective.sample_times(torch.tensor([0.1, 0.5, 0.9]))
    expected = [1 / (1 + math.exp(1.2815516)), 0.5, 1 / (1 + math.exp(-1.2815516))]
    assert_close(times, torch.tensor(expected), rtol=0, atol=1e-5)


def test_the_mean_and_spread_of_logit_normal_move_its_quantiles():
    objective = Objective(FlowMatchEulerDiscreteScheduler(), logit_mean=0.8, logit_std=0.7)
    times = objective.sample_times(torch.tensor([0.1, 0.5, 0.9]))
    expected = [1 / (1 + math.exp(-(0.8 + 0.7 * normal))) for normal in (-1.2815516, 0, 1.2815516)]
    assert_close(times, torch.tensor(expected), rtol=0, atol=1e-5)
    # Esser et al. 2024, eq. 23: a shift of the times by 3 is a mean of ln 3
    plain = Objective(FlowMatchEulerDiscreteScheduler()).sample_times(torch.tensor([0.1, 0.5, 0.9]))
    shifted = Objective(FlowMatchEulerDiscreteScheduler(), logit_mean=math.log(3))
    assert_close(shifted.sample_times(torch.tensor([0.1, 0.5, 0.9])), 3 * plain / (1 + 2 * plain))


@pytest.mark.parametrize(("mean", "std"), [(-90.0, 1.0), (90.0, 1.0), (0.0, 50.0)])
def test_extreme_times_keep_some_noise_and_some_picture(mean, std):
    objective = Objective(FlowMatchEulerDiscreteScheduler(), logit_mean=mean, logit_std=std)
    times = objective.sample_times(torch.tensor([0.0, 0.4, 1.0 - 2.0**-24]))
    assert times.min() > 0 and times.max() < 1


@pytest.mark.parametrize(
    ("kind", "time_sampling"), [("flow", "logit_normal"), ("flow", "uniform"), ("sample", "uniform")]
)
def test_the_times_of_a_global_batch_fall_one_in_each_part_of_equal_chance(kind, time_sampling):
    # 640 steps, so that each part has the same number of them
    scheduler = FlowMatchEulerDiscreteScheduler() if kind == "flow" else DDPMScheduler(num_train_timesteps=640)
    objective = Objective(scheduler, prediction_type=kind, time_sampling=time_sampling)
    bounds = objective.sample_times(torch.arange(64) / 64)[1:]
    for step in (1, 2, 977):
        uniform = stratified_uniform(7, step, 64)
        times = objective.sample_times(uniform)
        parts = torch.bucketize(times, bounds, right=True)
        assert sorted(parts.tolist()) == list(range(64))
        assert parts.tolist() != list(range(64))  # a sample's place in the batch says nothing of its time
    if time_sampling == "logit_normal":
        # the parts are those of the distribution: a quarter of the times on each side of its quartiles
        quartiles = torch.sigmoid(torch.tensor([-0.6744898, 0.0, 0.6744898]))
        assert torch.bucketize(times, quartiles).bincount().tolist() == [16] * 4


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


def test_a_step_that_the_schedule_does_not_have_is_refused_by_number():
    objective, (clean, noise) = Objective(DDPMScheduler(), prediction_type="epsilon"), pictures(2)
    for step in (-1, 1000):
        with pytest.raises(ValueError, match=rf"t must lie in 0\.\.999, got {min(step, 7)} to {max(step, 7)}"):
            objective.add_noise(clean, noise, torch.tensor([7, step]))


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
    ("options", "message"),
    [
        ({"logit_std": 0.0}, "logit_std finite and above 0, got 0.0 and 0.0"),
        ({"logit_mean": math.nan}, "logit_mean must be finite"),
        ({"time_sampling": "uniform", "logit_mean": 0.5}, "need time_sampling logit_normal, got uniform"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Objective(FlowMatchEulerDiscreteScheduler(), **options)


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "sample"])
def test_x_prediction_is_refused_without_a_flow(prediction_type):
    with pytest.raises(ValueError, match=f"x_prediction needs prediction_type flow, got {prediction_type}"):
        Objective(DDIMScheduler(), prediction_type=prediction_type, x_prediction=True)


def test_a_model_of_another_objective_is_refused():
    networks = {kind: tiny_unet(x_prediction=kind) for kind in (False, True)}
    plain = Objective(FlowMatchEulerDiscreteScheduler())
    predicting = Objective(FlowMatchEulerDiscreteScheduler(), x_prediction=True, loss_weighting="uncertainty")
    plain.check_model(networks[False], None)
    predicting.check_model(networks[True], NoiseUncertainty())
    with pytest.raises(ValueError, match="x_prediction is False, the U-Net's is True"):
        plain.check_model(networks[True], None)
    with pytest.raises(ValueError, match="loss_weighting is uncertainty, but the model has no NoiseUncertainty"):
        predicting.check_model(networks[True], None)
    with pytest.raises(ValueError, match="loss_weighting is none, but the model has a NoiseUncertainty"):
        plain.check_model(networks[False], NoiseUncertainty())


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


def test_zero_terminal_snr_ends_training_in_pure_noise():
    # Lin et al. 2024, algorithm 1: sqrt(abar) is shifted to 0 at the end, and scaled to its old value at the start
    before, after = DDIMScheduler(), DDIMScheduler(rescale_betas_zero_snr=True, timestep_spacing="trailing")
    roots = before.alphas_cumprod.double().sqrt()
    expected = ((roots - roots[-1]) * roots[0] / (roots[0] - roots[-1])).square()
    assert_close(after.alphas_cumprod.double(), expected, rtol=0, atol=1e-6)
    clean, noise = pictures(2)
    t = torch.tensor([999, 0])
    objective = Objective(after, prediction_type="v_prediction")
    noisy = objective.add_noise(clean, noise, t)
    assert torch.equal(noisy[0], noise[0])
    assert torch.equal(objective.target(clean, noise, t)[0], -clean[0])
    assert_close(noisy[1], Objective(before, prediction_type="sample").add_noise(clean, noise, t)[1])
    assert objective.sampling_scheduler().config.rescale_betas_zero_snr


def test_zero_terminal_snr_is_refused_for_epsilon_and_with_a_spacing_that_misses_the_last_step():
    scheduler = DDIMScheduler(rescale_betas_zero_snr=True, timestep_spacing="trailing")
    with pytest.raises(ValueError, match="cannot go with epsilon: the last step is pure noise"):
        Objective(scheduler, prediction_type="epsilon")
    for kind in ("v_prediction", "sample"):
        Objective(scheduler, prediction_type=kind)
        with pytest.raises(ValueError, match="set timestep_spacing to trailing"):
            Objective(DDPMScheduler(rescale_betas_zero_snr=True, timestep_spacing="leading"), prediction_type=kind)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trained_betas": torch.linspace(1e-4, 0.02, 1000)}, "trained_betas as a tensor cannot be saved"),
        ({"trained_betas": [0.1, 0.2]}, "has 2 betas and num_train_timesteps 1000: trained_betas must be as many"),
        ({"beta_end": 2.0}, "has betas outside 0..1"),
        ({"beta_start": -0.1}, "has betas outside 0..1"),
        ({"beta_end": math.nan}, "has betas outside 0..1"),
    ],
)
def test_betas_that_no_picture_can_be_noised_with_are_refused(settings, message):
    with pytest.raises(ValueError, match=f"DDIMScheduler .*{message}"):
        Objective(DDIMScheduler(**settings), prediction_type="epsilon")
    Objective(DDIMScheduler(num_train_timesteps=2, trained_betas=[0.1, 0.2]), prediction_type="epsilon")


def test_a_learned_variance_is_refused():
    with pytest.raises(ValueError, match="learned variance"):
        Objective(DDPMScheduler(variance_type="learned_range"), prediction_type="epsilon")

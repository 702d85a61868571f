"""Each loss weight against its paper's formula, and the learned one."""

import math

import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler, FlowMatchEulerDiscreteScheduler
from test_objective import pictures, stratified, training_scheduler
from torch.testing import assert_close

from unet_attn.flow import velocity_from_clean
from unet_attn.loss_weights import CLEAN_FLOOR, SNR_GAMMA, NoiseUncertainty, min_snr, soft_min_snr, uncertain_loss
from unet_attn.objective import Objective
from unet_attn.schedulers import PREDICTION_TYPES

DISCRETE_TYPES = ("epsilon", "v_prediction", "sample")
FORMULAS = {
    "min_snr": lambda snr: min(snr, SNR_GAMMA),
    # Crowson et al. 2024, with sigma^2 = 1 / SNR
    "soft_min_snr": lambda snr: 1 / (1 / snr + 1 / SNR_GAMMA),
}


def flow(**options):
    return Objective(FlowMatchEulerDiscreteScheduler(), **options)


@pytest.mark.parametrize("loss_weighting", FORMULAS)
def test_snr_weights_follow_the_formula_of_each_type(loss_weighting):
    scheduler, formula = DDPMScheduler(), FORMULAS[loss_weighting]
    t = torch.tensor([0, 99, 400, 998])
    weights = [
        Objective(scheduler, prediction_type=kind, loss_weighting=loss_weighting).weight(t) for kind in DISCRETE_TYPES
    ]
    for step, found in zip(t.tolist(), torch.stack(weights, dim=1).tolist(), strict=True):
        cumulative = float(scheduler.alphas_cumprod[step])
        snr = cumulative / (1 - cumulative)
        expected = (formula(snr) / snr, formula(snr) / (snr + 1), formula(snr))
        assert found == pytest.approx(expected, rel=1e-3)
    times = torch.tensor([0.1, 0.5, 0.9])
    expected = [formula(((1 - t) / t) ** 2) * t**2 for t in (0.1, 0.5, 0.9)]
    assert flow(loss_weighting=loss_weighting).weight(times).tolist() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("loss_weighting", FORMULAS)
@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
def test_an_snr_weight_is_one_loss_of_the_picture_whatever_is_predicted(prediction_type, loss_weighting):
    # an error of the predicted picture, carried over into each type, costs the weight times its square
    objective = Objective(
        training_scheduler(prediction_type), prediction_type=prediction_type, loss_weighting=loss_weighting
    )
    clean, noise = pictures(1)
    t = torch.tensor([0.4]) if prediction_type == "flow" else torch.tensor([250])
    noisy = objective.add_noise(clean, noise, t)
    alpha, sigma = objective._scales(t, 4)
    wrong = clean + 0.125
    implied_noise = (noisy - alpha * wrong) / sigma
    answer = objective.target(wrong, implied_noise, t)
    expected = FORMULAS[loss_weighting](float((alpha / sigma) ** 2)) * 0.125**2
    assert objective.loss(answer, clean, noise, t).item() == pytest.approx(expected, rel=1e-3)


def test_the_soft_weight_is_the_hard_one_without_its_corner():
    snr = torch.logspace(-6, 6, 41)
    share = soft_min_snr(snr) / min_snr(snr)
    assert (share <= 1).all() and (share >= 0.5 - 1e-6).all()
    assert float(soft_min_snr(torch.tensor(SNR_GAMMA))) == SNR_GAMMA / 2
    assert_close(share[[0, -1]], torch.ones(2), rtol=0, atol=1e-5)


@pytest.mark.parametrize("betas", ["linear", "squaredcos_cap_v2", "zero_terminal_snr"])
@pytest.mark.parametrize("loss_weighting", ["none", *FORMULAS])
def test_every_weight_of_every_schedule_is_finite(loss_weighting, betas):
    options = {"beta_schedule": betas}
    if betas == "zero_terminal_snr":
        options = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    for kind in DISCRETE_TYPES[betas == "zero_terminal_snr" :]:
        objective = Objective(DDIMScheduler(**options), prediction_type=kind, loss_weighting=loss_weighting)
        weights = objective.weight(torch.arange(1000))
        assert weights.dtype == torch.float32 and weights.isfinite().all() and (weights >= 0).all()
        assert (weights[:-1] > 0).all()
    times = flow().sample_times(torch.tensor([0.0, 0.5, 1.0]))
    assert flow(loss_weighting=loss_weighting).weight(times).isfinite().all()


# --- x-prediction


@pytest.mark.parametrize("loss_weighting", ["none", *FORMULAS])
def test_x_prediction_has_the_papers_velocity_loss_and_the_weights_of_the_picture(loss_weighting):
    # Li & He 2025: the squared error of the picture over max(t, 0.05)^2
    objective = flow(x_prediction=True, loss_weighting=loss_weighting)
    clean, noise = pictures(5)
    t = torch.tensor([0.003, 0.04, 0.06, 0.5, 0.97])
    guess = clean + 0.25 * torch.randn(clean.shape, generator=torch.Generator().manual_seed(3))
    velocity = velocity_from_clean(objective.add_noise(clean, noise, t), guess, objective.model_timestep(t))
    squared = (guess - clean).square().flatten(1).mean(dim=1)
    if loss_weighting == "none":
        expected = squared / t.clamp(min=CLEAN_FLOOR).square()
    else:
        weights = [FORMULAS[loss_weighting](((1 - time) / time) ** 2) for time in t.tolist()]
        expected = squared * torch.tensor(weights)
    assert_close(objective.loss(velocity, clean, noise, t), expected, rtol=1e-3, atol=0)


def test_x_prediction_keeps_gradients_small_at_the_smallest_times():
    objective = flow(x_prediction=True, time_sampling="uniform")
    clean, noise = pictures(3)
    t = objective.sample_times(torch.tensor([0.0, 1e-4, 0.03]))
    guess = (clean + 0.5).requires_grad_()
    velocity = velocity_from_clean(objective.add_noise(clean, noise, t), guess, objective.model_timestep(t))
    objective.loss(velocity, clean, noise, t).sum().backward()
    exact = 2 * 0.5 / CLEAN_FLOOR**2 / clean[0].numel()
    assert guess.grad.isfinite().all() and guess.grad.abs().max() < 1.01 * exact


# --- learned uncertainty


def test_the_uncertainty_starts_at_zero_where_the_loss_is_the_plain_one():
    objective, plain = flow(loss_weighting="uncertainty"), flow()
    clean, noise = pictures()
    t = objective.sample_times(stratified(5))
    prediction = torch.zeros_like(clean)
    u = NoiseUncertainty()(objective.model_timestep(t))
    assert u.shape == (5,) and u.dtype == torch.float32 and not u.any()
    loss = uncertain_loss(objective.loss(prediction, clean, noise, t), u)
    assert torch.equal(loss, plain.loss(prediction, clean, noise, t))


@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
def test_the_uncertain_loss_is_the_error_over_exp_u_plus_u(prediction_type):
    options = {"prediction_type": prediction_type, "loss_weighting": "uncertainty"}
    objective = Objective(training_scheduler(prediction_type), **options)
    clean, noise = pictures()
    t = objective.sample_times(stratified(5))
    u = torch.tensor([-2.0, -0.5, 0.0, 0.7, 3.0])
    answer = objective.target(clean, noise, t) + 0.5
    expected = [0.25 / math.exp(each) + each for each in u.tolist()]
    loss = uncertain_loss(objective.loss(answer, clean, noise, t), u)
    assert loss.tolist() == pytest.approx(expected, rel=1e-5)


def test_the_uncertainty_learns_the_logarithm_of_the_error_at_each_noise_level():
    uncertainty = NoiseUncertainty()
    timestep = torch.linspace(0.5, 999.5, 256)
    error = 0.05 + (timestep / 1000).square()
    optimizer = torch.optim.Adam(uncertainty.parameters(), lr=0.02)
    for _ in range(400):
        optimizer.zero_grad()
        u = uncertainty(timestep)
        uncertain_loss(error, u).mean().backward()
        optimizer.step()
    assert_close(uncertainty(timestep).detach(), error.log(), rtol=0, atol=0.2)


def test_the_uncertaintys_gradient_is_no_longer_than_the_losses_own():
    uncertainty = NoiseUncertainty()
    for timestep in (0.1, 300.0, 1000.0):
        uncertainty.weight.grad = None
        uncertain_loss(torch.tensor([7.0]), uncertainty(torch.tensor([timestep]))).sum().backward()
        assert float(uncertainty.weight.grad.norm()) == pytest.approx(6.0, rel=1e-4)

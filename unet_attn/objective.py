"""The training objective: how pictures are noised, what the network predicts, and how its error is weighed.

With a clean picture x, noise n ~ N(0, 1) and a time t, every prediction type noises as x_t = alpha x + sigma n and asks
the network for:

    flow          n - x                with alpha = 1 - t, sigma = t     (Liu et al. 2022; Lipman et al. 2022)
    epsilon       n                    with alpha^2 = abar_t, sigma^2 = 1 - abar_t      (Ho et al. 2020)
    v_prediction  alpha n - sigma x    likewise                          (Salimans & Ho 2022)
    sample        x                    likewise

abar comes from the scheduler, so that training and sampling share one noise schedule. docs/objectives.md has the
choices, their papers, and when to take which.
"""

from math import isfinite
from typing import Literal, get_args

import torch
from diffusers import ConfigMixin, SchedulerMixin
from torch import Tensor, nn

from unet_attn.flow import FLOW_TIME_SCALE
from unet_attn.loss_weights import clipped_velocity, min_snr, soft_min_snr
from unet_attn.schedulers import (
    PREDICTION_TYPES,
    PredictionType,
    check_training_scheduler,
    clean_coefficients,
    declare_prediction_type,
    require_one_of,
    scheduler_from_config,
)

TimeSampling = Literal["logit_normal", "uniform"]
LossWeighting = Literal["none", "min_snr", "soft_min_snr", "uncertainty"]

SNR_WEIGHTS = {"min_snr": min_snr, "soft_min_snr": soft_min_snr}
TINY = 2.0**-20


class Objective:
    """Noising, target and loss of one prediction type over one scheduler's noise schedule.

    scheduler: a DDPM or DDIM scheduler, or a flow-matching one for `flow`; its config holds betas and training steps.
        Its own prediction type is ignored: this object's is written into `sampling_scheduler()`.
    prediction_type: what the network predicts, see the module's head.
    x_prediction: the network's last layer gives the clean picture, from which the U-Net makes the velocity that it
        answers with (Li & He 2025); for `flow` alone.
    time_sampling: how times are spread, `logit_normal` (Esser et al. 2024, eq. 19) or `uniform`.
    logit_mean, logit_std: m and s of logit_normal; above m = 0 there is more noise. A time shift by a factor
        (Esser et al. 2024, eq. 23) is its logarithm added to m.
    loss_weighting: `none`, `min_snr`, `soft_min_snr`, or `uncertainty`, which is learned (unet_attn.loss_weights).
    Everything is computed in float32 whatever the inputs are: in half precision sigma vanishes at small t.
    Raises ValueError for an unknown option and for a scheduler that cannot train the type.
    """

    def __init__(
        self,
        scheduler: SchedulerMixin,
        *,
        prediction_type: PredictionType = "flow",
        x_prediction: bool = False,
        time_sampling: TimeSampling = "logit_normal",
        logit_mean: float = 0.0,
        logit_std: float = 1.0,
        loss_weighting: LossWeighting = "none",
    ) -> None:
        require_one_of("prediction_type", prediction_type, PREDICTION_TYPES)
        require_one_of("time_sampling", time_sampling, get_args(TimeSampling))
        require_one_of("loss_weighting", loss_weighting, get_args(LossWeighting))
        check_training_scheduler(scheduler, prediction_type)
        if x_prediction and prediction_type != "flow":
            raise ValueError(
                f"objective.x_prediction needs prediction_type flow, got {prediction_type}: "
                "to predict the picture without a velocity, use prediction_type sample alone"
            )
        if not (isfinite(logit_mean) and isfinite(logit_std) and logit_std > 0):
            raise ValueError(
                "objective.logit_mean must be finite and logit_std finite and above 0, "
                f"got {logit_mean} and {logit_std}"
            )
        if time_sampling == "uniform" and (logit_mean, logit_std) != (0.0, 1.0):
            raise ValueError("objective.logit_mean and logit_std need time_sampling logit_normal, got uniform")
        self.scheduler = scheduler
        self.prediction_type = prediction_type
        self.x_prediction = x_prediction
        self.time_sampling = time_sampling
        self.logit_mean, self.logit_std = logit_mean, logit_std
        self.loss_weighting = loss_weighting
        self.num_train_timesteps = int(scheduler.config.num_train_timesteps)
        self._alphas_cumprod = None if self.is_flow else scheduler.alphas_cumprod.float()

    @property
    def is_flow(self) -> bool:
        return self.prediction_type == "flow"

    def sample_times(self, uniform: Tensor) -> Tensor:
        """Turn uniform numbers into training times, one each.

        uniform: (B,) in [0, 1). Returns (B,): for flow float32 in (0, 1); otherwise int64 in [0, num_train_timesteps).
        The map is monotone, so that stratified numbers give stratified times.
        """
        # at 0 and 1 the logit is infinite, and t = 0 has no noise to learn from
        time = uniform.float().clamp(TINY, 1.0 - TINY)
        if self.time_sampling == "logit_normal":
            normal = self.logit_mean + self.logit_std * torch.special.ndtri(time)
            time = torch.sigmoid(normal).clamp(TINY, 1.0 - TINY)
        if self.is_flow:
            return time
        return (time * self.num_train_timesteps).long().clamp(max=self.num_train_timesteps - 1)

    def add_noise(self, clean: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """x_t = alpha x + sigma n. clean, noise: (B, ...); t: (B,) as from `sample_times`. Returns (B, ...) float32."""
        alpha, sigma = self._scales(t, clean.ndim)
        return alpha * clean.float() + sigma * noise.float()

    def target(self, clean: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """What a perfect network answers at (x_t, t). Shapes as in `add_noise`. Returns (B, ...) float32."""
        clean, noise = clean.float(), noise.float()
        if self.prediction_type == "flow":
            return noise - clean
        if self.prediction_type == "epsilon":
            return noise
        if self.prediction_type == "sample":
            return clean
        alpha, sigma = self._scales(t, clean.ndim)
        return alpha * noise - sigma * clean  # Salimans & Ho 2022, appendix D

    def model_timestep(self, t: Tensor) -> Tensor:
        """What the network is given for t: 1000 t for flow, the integer time step otherwise. (B,) to (B,)."""
        return FLOW_TIME_SCALE * t if self.is_flow else t

    def loss(
        self, prediction: Tensor, clean: Tensor, noise: Tensor, t: Tensor, *, target: Tensor | None = None
    ) -> Tensor:
        """The weighted mean square error of each sample, without the learned weight (`loss_weights.uncertain_loss`).

        prediction, clean, noise: (B, ...); t: (B,); target: (B, ...) to aim at, `target(clean, noise, t)` by default.
        Returns (B,) float32.
        Raises ValueError if the prediction's shape is not the picture's (it would broadcast).
        """
        if prediction.shape != clean.shape:
            raise ValueError(f"the prediction has shape {tuple(prediction.shape)}, the pictures {tuple(clean.shape)}")
        target = self.target(clean, noise, t) if target is None else target
        error = (prediction.float() - target).square().flatten(1).mean(dim=1)
        return error * self.weight(t)

    def weight(self, t: Tensor) -> Tensor:
        """The loss weight at t, without the learned one. (B,) to (B,) float32."""
        alpha, sigma = self._scales(t, 1)
        if self.loss_weighting in SNR_WEIGHTS:
            # an error e of the answer is one of b e in the clean picture
            _, b = clean_coefficients(self.prediction_type, alpha, sigma)
            return SNR_WEIGHTS[self.loss_weighting]((alpha / sigma).square()) * b**2
        return clipped_velocity(sigma) if self.x_prediction else torch.ones_like(sigma)

    def check_model(self, unet: ConfigMixin, uncertainty: nn.Module | None) -> None:
        """Refuse a model that was made for another objective, with a ValueError that names the setting."""
        if unet.config.get("x_prediction", False) != self.x_prediction:
            raise ValueError(f"objective.x_prediction is {self.x_prediction}, the U-Net's is {not self.x_prediction}")
        if (uncertainty is None) == (self.loss_weighting == "uncertainty"):
            found = "no" if uncertainty is None else "a"
            raise ValueError(
                f"objective.loss_weighting is {self.loss_weighting}, but the model has {found} NoiseUncertainty"
            )

    def sampling_scheduler(self) -> SchedulerMixin:
        """A fresh scheduler of the same class for sampling, with the prediction type written into its config."""
        scheduler = scheduler_from_config(type(self.scheduler), self.scheduler.config)
        declare_prediction_type(scheduler, self.prediction_type)
        return scheduler

    def _scales(self, t: Tensor, ndim: int) -> tuple[Tensor, Tensor]:
        """alpha and sigma at t (B,), each (B, 1, ...) with ndim axes, float32."""
        if self.is_flow:
            t = t.float()
            alpha, sigma = 1.0 - t, t
        else:
            # elsewhere the look would wait for the device
            if t.device.type == "cpu" and bool(((t < 0) | (t >= self.num_train_timesteps)).any()):
                raise ValueError(
                    f"t must lie in 0..{self.num_train_timesteps - 1}, got {int(t.min())} to {int(t.max())}"
                )
            cumulative = self._alphas_cumprod.to(t.device)[t]
            alpha, sigma = cumulative.sqrt(), (1.0 - cumulative).sqrt()
        shape = (-1, *[1] * (ndim - 1))
        return alpha.reshape(shape), sigma.reshape(shape)

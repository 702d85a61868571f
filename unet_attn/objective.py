"""The training objective: how pictures are noised, what the network predicts, and how its error is weighed.

This module is the one home of what distinguishes the prediction types. With a clean picture x, noise n ~ N(0, 1) and a
time t, every type noises as x_t = alpha x + sigma n and asks the network for:

    flow          n - x                with alpha = 1 - t, sigma = t     (Liu et al. 2022; Lipman et al. 2022)
    epsilon       n                    with alpha^2 = abar_t, sigma^2 = 1 - abar_t      (Ho et al. 2020)
    v_prediction  alpha n - sigma x    likewise                          (Salimans & Ho 2022)
    sample        x                    likewise

abar comes from the scheduler, so that training and sampling share one noise schedule.
"""

from typing import Literal

import torch
from diffusers import SchedulerMixin
from torch import Tensor

PredictionType = Literal["flow", "epsilon", "v_prediction", "sample"]
TimeSampling = Literal["logit_normal", "uniform"]
LossWeighting = Literal["none", "min_snr"]

PREDICTION_TYPES = ("flow", "epsilon", "v_prediction", "sample")
FLOW_TIME_SCALE = 1000.0  # a flow network is given 1000 t: the range that the time embedding is made for
MIN_SNR_GAMMA = 5.0  # Hang et al. 2023, section 4: 5 in all their experiments

# The stock schedulers that bring a perfect model of the type back to the clean picture (tests/test_text_to_image.py).
# DEIS and SASolver know flow_prediction, yet in flow mode they end elsewhere, so they are not among them.
_FLOW_SAMPLERS = (
    "FlowMatchEulerDiscreteScheduler",
    "FlowMatchHeunDiscreteScheduler",
    "DPMSolverMultistepScheduler",
    "DPMSolverSinglestepScheduler",
    "UniPCMultistepScheduler",
)
_DISCRETE_SAMPLERS = (
    "DDPMScheduler",
    "DDIMScheduler",
    "DEISMultistepScheduler",
    "DPMSolverMultistepScheduler",
    "DPMSolverSinglestepScheduler",
    "EulerDiscreteScheduler",
    "EulerAncestralDiscreteScheduler",
    "HeunDiscreteScheduler",
    "KDPM2DiscreteScheduler",
    "KDPM2AncestralDiscreteScheduler",
    "LCMScheduler",
    "LMSDiscreteScheduler",
    "PNDMScheduler",
    "UniPCMultistepScheduler",
)
# these know no model that predicts the picture itself
_NO_SAMPLE_PREDICTION = (
    "EulerAncestralDiscreteScheduler",
    "KDPM2DiscreteScheduler",
    "KDPM2AncestralDiscreteScheduler",
    "PNDMScheduler",
)
# These go from a picture to the noise it comes from. With `sample` the first of its steps divides 0 by 0.
_INVERSION = {"epsilon": ("DDIMInverseScheduler",), "v_prediction": ("DDIMInverseScheduler",)}
# in the multistep schedulers each of these puts noise levels of another kind in the place of the flow's
_OTHER_SIGMAS = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas")
_TRAINING_SCHEDULERS = {
    "flow": ("FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler"),
    "discrete": ("DDIMScheduler", "DDPMScheduler"),
}


class Objective:
    """Noising, target and loss of one prediction type over one scheduler's noise schedule.

    scheduler: a DDPM or DDIM scheduler, or a flow-matching one for `flow`; its config holds betas and training steps.
        Its own prediction type is ignored: this object's is written into `sampling_scheduler()`.
    prediction_type: what the network predicts, see the module's head.
    time_sampling: how times are spread, `logit_normal` (Esser et al. 2024, eq. 19, with m 0 and s 1) or `uniform`.
    loss_weighting: `none`, or `min_snr` (Hang et al. 2023).
    Everything is computed in float32 whatever the inputs are: in half precision sigma vanishes at small t.
    Raises ValueError for an unknown option and for a scheduler that cannot train the type.
    """

    def __init__(
        self,
        scheduler: SchedulerMixin,
        *,
        prediction_type: PredictionType = "flow",
        time_sampling: TimeSampling = "logit_normal",
        loss_weighting: LossWeighting = "none",
    ) -> None:
        _require("prediction_type", prediction_type, PREDICTION_TYPES)
        _require("time_sampling", time_sampling, ("logit_normal", "uniform"))
        _require("loss_weighting", loss_weighting, ("none", "min_snr"))
        _check_training_scheduler(scheduler, prediction_type)
        self.scheduler = scheduler
        self.prediction_type = prediction_type
        self.time_sampling = time_sampling
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
        tiny = 2.0**-20
        uniform = uniform.float().clamp(tiny, 1.0 - tiny)
        time = torch.sigmoid(torch.special.ndtri(uniform)) if self.time_sampling == "logit_normal" else uniform
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

    def loss(self, prediction: Tensor, clean: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """The weighted mean square error of each sample.

        prediction, clean, noise: (B, ...); t: (B,). Returns (B,) float32.
        Raises ValueError if the prediction's shape is not the picture's (it would broadcast).
        """
        if prediction.shape != clean.shape:
            raise ValueError(f"the prediction has shape {tuple(prediction.shape)}, the pictures {tuple(clean.shape)}")
        error = (prediction.float() - self.target(clean, noise, t)).square().flatten(1).mean(dim=1)
        return error * self.weight(t)

    def weight(self, t: Tensor) -> Tensor:
        """The loss weight at t. (B,) to (B,) float32.

        min_snr weighs the error of the clean picture by min(SNR, gamma) (Hang et al. 2023, eq. 8). An error e of the
        clean picture is an error of e alpha / sigma in epsilon, e / sigma in v, and e / t in the flow velocity.
        """
        if self.loss_weighting == "none":
            return torch.ones_like(t, dtype=torch.float32)
        alpha, sigma = self._scales(t, 1)
        snr = (alpha / sigma).square()
        clipped = snr.clamp(max=MIN_SNR_GAMMA)
        if self.prediction_type == "epsilon":
            return clipped / snr
        if self.prediction_type == "v_prediction":
            return clipped / (snr + 1.0)
        if self.prediction_type == "flow":
            return clipped * sigma.square()
        return clipped

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
            cumulative = self._alphas_cumprod.to(t.device)[t]
            alpha, sigma = cumulative.sqrt(), (1.0 - cumulative).sqrt()
        shape = (-1, *[1] * (ndim - 1))
        return alpha.reshape(shape), sigma.reshape(shape)


def scheduler_prediction_type(scheduler: SchedulerMixin) -> PredictionType:
    """The prediction type that a scheduler takes its model's output for.

    Raises ValueError if its config names none that is known, or a flow without flow sigmas.
    """
    # a FlowMatch scheduler takes every output for a velocity, whatever its config was copied from
    if _is_one_of(scheduler, ("FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler")):
        return "flow"
    name = type(scheduler).__name__
    found = scheduler.config.get("prediction_type")
    if found == "flow_prediction":
        if not scheduler.config.get("use_flow_sigmas", False):
            raise ValueError(f"{name} has prediction_type flow_prediction without use_flow_sigmas=True")
        return "flow"
    if found not in PREDICTION_TYPES or found == "flow":
        raise ValueError(f"{name} has the unknown prediction_type {found!r}")
    return found


def sampling_schedulers(prediction_type: PredictionType) -> tuple[str, ...]:
    """The names of the stock schedulers that sample a model of the prediction type rightly."""
    _require("prediction_type", prediction_type, PREDICTION_TYPES)
    if prediction_type == "flow":
        return _FLOW_SAMPLERS
    if prediction_type == "sample":
        return tuple(name for name in _DISCRETE_SAMPLERS if name not in _NO_SAMPLE_PREDICTION)
    return _DISCRETE_SAMPLERS


def inversion_schedulers(prediction_type: PredictionType) -> tuple[str, ...]:
    """The names of the stock schedulers that turn a picture into its noise, for a model of the prediction type."""
    _require("prediction_type", prediction_type, PREDICTION_TYPES)
    return _INVERSION.get(prediction_type, ())


def clean_coefficients(prediction_type: PredictionType, alpha: float, sigma: float) -> tuple[float, float]:
    """(a, b) with which a x_t + b prediction is the clean picture, where x_t = alpha x + sigma n."""
    _require("prediction_type", prediction_type, PREDICTION_TYPES)
    if prediction_type == "flow":
        return 1.0, -sigma
    if prediction_type == "epsilon":
        return 1.0 / alpha, -sigma / alpha
    return (alpha, -sigma) if prediction_type == "v_prediction" else (0.0, 1.0)


def check_sampling_scheduler(scheduler: SchedulerMixin, prediction_type: PredictionType) -> None:
    """Refuse a scheduler that would sample a model of the prediction type wrongly, with a ValueError that says why."""
    name = type(scheduler).__name__
    allowed = sampling_schedulers(prediction_type)
    if not _is_one_of(scheduler, allowed + inversion_schedulers(prediction_type)):
        raise ValueError(f"{name} cannot sample a {prediction_type} model; these can: {', '.join(allowed)}")
    found = scheduler_prediction_type(scheduler)
    if found != prediction_type:
        raise ValueError(
            f"the scheduler's prediction type is {found}, the model's is {prediction_type}: "
            f"make it with {name}.from_config(pipe.scheduler.config)"
        )
    if name == "DDIMScheduler" and scheduler.config.timestep_spacing == "linspace":
        # its step() looks a fixed number of training steps ahead, which linspace does not visit
        raise ValueError(
            "DDIMScheduler with timestep_spacing linspace misses its own next step: use leading or trailing"
        )
    spacings = [key for key in _OTHER_SIGMAS if scheduler.config.get(key, False)]
    if prediction_type == "flow" and spacings and not name.startswith("FlowMatch"):
        raise ValueError(f"{name} with {spacings[0]}=True leaves the flow's own noise levels: set it to False")
    if scheduler.config.get("use_dynamic_shifting", False):
        raise ValueError(
            f"{name} with use_dynamic_shifting=True needs a shift per picture size, which is not supported"
        )


def declare_prediction_type(scheduler: SchedulerMixin, prediction_type: PredictionType) -> None:
    """Write the prediction type into the scheduler's config, so that `from_config` carries it to any class.

    A FlowMatch scheduler's config has no such key, and another class made from it would fall to epsilon in silence. So
    the keys by which the multistep schedulers know a flow are written beside its own; they survive saving.
    The betas are carried along too: diffusers would drop what was left at its default, and classes differ in those.
    """
    keys: dict[str, object] = {"prediction_type": prediction_type, "_use_default_values": []}
    if prediction_type == "flow":
        shift = scheduler.config.get("flow_shift", scheduler.config.get("shift", 1.0))
        keys |= {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": shift}
    scheduler.register_to_config(**keys)


def scheduler_from_config(scheduler_class: type[SchedulerMixin], config: dict) -> SchedulerMixin:
    """`from_config`, without diffusers' warning that the keys kept for other classes are not expected."""
    known = scheduler_class._get_init_keys(scheduler_class)
    scheduler = scheduler_class.from_config({key: value for key, value in config.items() if key in known})
    kept = {key: value for key, value in config.items() if key not in known and not key.startswith("_")}
    scheduler.register_to_config(**kept)
    return scheduler


def _require(what: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{what} must be one of {', '.join(allowed)}, got {value!r}")


def _is_one_of(scheduler: SchedulerMixin, names: tuple[str, ...]) -> bool:
    return any(base.__name__ in names for base in type(scheduler).__mro__)


def _check_training_scheduler(scheduler: SchedulerMixin, prediction_type: PredictionType) -> None:
    """Refuse what cannot noise at any time: inference schedulers look times up in a list that is made for sampling."""
    name = type(scheduler).__name__
    allowed = _TRAINING_SCHEDULERS["flow" if prediction_type == "flow" else "discrete"]
    if not _is_one_of(scheduler, allowed):
        raise ValueError(
            f"{name} cannot train a {prediction_type} model: train with {' or '.join(allowed)}; "
            "for sampling, other schedulers are made from its config"
        )
    if prediction_type == "epsilon" and scheduler.config.get("rescale_betas_zero_snr", False):
        # Lin et al. 2024, section 3.2: at the last step x_t is the noise, so epsilon tells nothing of the picture
        raise ValueError("rescale_betas_zero_snr cannot go with epsilon: use v_prediction or sample")
    if str(scheduler.config.get("variance_type", "")).startswith("learned"):
        raise ValueError(f"{name} with a learned variance is not supported: set variance_type to fixed_small")

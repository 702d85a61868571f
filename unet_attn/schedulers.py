"""The prediction types, and which of diffusers' stock schedulers know them.

What sampling has to know of a model; how it is trained is the business of `unet_attn.objective`, which has the
formulas of the types. A scheduler that would sample or train wrongly is refused here, with the reason.
"""

import copy
import re
from math import isfinite
from typing import Literal

import numpy as np
import torch
from diffusers import SchedulerMixin
from torch import Tensor

PredictionType = Literal["flow", "epsilon", "v_prediction", "sample"]

PREDICTION_TYPES = ("flow", "epsilon", "v_prediction", "sample")

# The stock schedulers that bring a perfect model of the type back to the clean picture (tests/test_schedulers.py).
# DEIS and SASolver know flow_prediction, yet in flow mode they end elsewhere, so they are not among them.
_FLOW_SAMPLERS = (
    "FlowMatchEulerDiscreteScheduler",
    "FlowMatchHeunDiscreteScheduler",
    "FlowMatchLCMScheduler",
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
# these can rescale the betas so that the last step is pure noise (Lin et al. 2024, algorithm 1)
_ZERO_TERMINAL_SNR = (
    "DDPMScheduler",
    "DDIMScheduler",
    "DDIMInverseScheduler",
    "DPMSolverMultistepScheduler",
    "EulerDiscreteScheduler",
    "EulerAncestralDiscreteScheduler",
    "LCMScheduler",
    "UniPCMultistepScheduler",
)
# in the multistep schedulers each of these puts noise levels of another kind in the place of the flow's
_OTHER_SIGMAS = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "use_lu_lambdas")
_FLOW_MATCH = ("FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler", "FlowMatchLCMScheduler")
# takes each predicted picture to the next noise level with new noise, as consistency models are sampled
_RENOISING = ("FlowMatchLCMScheduler",)
_TRAINING_SCHEDULERS = {
    "flow": _FLOW_MATCH,
    "discrete": ("DDIMScheduler", "DDPMScheduler"),
}


def scheduler_prediction_type(scheduler: SchedulerMixin) -> PredictionType:
    """The prediction type that a scheduler takes its model's output for.

    Raises ValueError if its config names none that is known, or a flow without flow sigmas.
    """
    # a FlowMatch scheduler takes every output for a velocity, whatever its config was copied from
    if _is_one_of(scheduler, _FLOW_MATCH):
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
    require_one_of("prediction_type", prediction_type, PREDICTION_TYPES)
    if prediction_type == "flow":
        return _FLOW_SAMPLERS
    if prediction_type == "sample":
        return tuple(name for name in _DISCRETE_SAMPLERS if name not in _NO_SAMPLE_PREDICTION)
    return _DISCRETE_SAMPLERS


def inversion_schedulers(prediction_type: PredictionType) -> tuple[str, ...]:
    """The names of the stock schedulers that turn a picture into its noise, for a model of the prediction type."""
    require_one_of("prediction_type", prediction_type, PREDICTION_TYPES)
    return _INVERSION.get(prediction_type, ())


def clean_coefficients(
    prediction_type: PredictionType, alpha: float | Tensor, sigma: float | Tensor
) -> tuple[float | Tensor, float | Tensor]:
    """(a, b) with which a x_t + b prediction is the clean picture, where x_t = alpha x + sigma n."""
    require_one_of("prediction_type", prediction_type, PREDICTION_TYPES)
    if prediction_type == "flow":
        return 1.0, -sigma
    if prediction_type == "epsilon":
        return 1.0 / alpha, -sigma / alpha
    return (alpha, -sigma) if prediction_type == "v_prediction" else (0.0, 1.0)


def set_timesteps(scheduler: SchedulerMixin, steps: int, device: torch.device | None = None) -> None:
    """`scheduler.set_timesteps(steps)`; for FlowMatchLCMScheduler with the noise levels 1, (steps - 1) / steps, ...

    It samples consistency models (Song et al. 2023, algorithm 1) by one new beginning per level. Its own levels go
    down to 0.001, where there is nothing left to do, so that two steps would be one. Its shift acts on either.
    Raises ValueError if there is no such schedule, naming the next number of steps that has one.
    """
    try:
        _set_timesteps(scheduler, steps, device)
    except _NoSchedule as error:
        remedy = ", nor of any other number: see its timestep_spacing and steps_offset"
        if fewer := most_steps(scheduler, steps - 1):
            remedy = f", take at most {fewer}"
        else:
            more = range(steps + 1, scheduler.config.num_train_timesteps + 1)
            if enough := next((count for count in more if _has_schedule(scheduler, count)), None):
                remedy = f", take at least {enough}"
        raise ValueError(f"{error}{remedy}") from None


def most_steps(scheduler: SchedulerMixin, at_most: int) -> int | None:
    """The largest number of steps, up to this one, of which the scheduler has a schedule; None if there is none."""
    return next((count for count in range(at_most, 0, -1) if _has_schedule(scheduler, count)), None)


class _NoSchedule(ValueError):
    """Another number of steps may have a schedule."""


def _has_schedule(scheduler: SchedulerMixin, steps: int) -> bool:
    try:
        _set_timesteps(copy.deepcopy(scheduler), steps)
    except ValueError:
        return False
    return True


def _set_timesteps(scheduler: SchedulerMixin, steps: int, device: torch.device | None = None) -> None:
    """`set_timesteps`, which tries other numbers of steps with it too."""
    name, terminal = type(scheduler).__name__, scheduler.config.get("shift_terminal")
    counted = f"no schedule of {steps} step{'s' if steps > 1 else ''}"
    fault = _NoSchedule(f"{name} has {counted}")
    # the first four are Runge-Kutta's, unless they are left out
    if _is_one_of(scheduler, ("PNDMScheduler",)) and steps < 4 and not scheduler.config.skip_prk_steps:
        raise fault
    levels = {}
    if _is_one_of(scheduler, _RENOISING):
        levels = {"sigmas": np.linspace(1.0, 1.0 / steps, steps)}
    with np.errstate(invalid="ignore"):  # it is told below, in one line
        scheduler.set_timesteps(steps, device=device, **levels)
    if bool(scheduler.timesteps.isnan().any()):
        # one level, which is 1, cannot be stretched to end elsewhere; KDPM2Ancestral has none between two of linspace
        cause = "" if terminal is None else f" with shift_terminal={terminal}"
        remedy = "" if terminal is None else ", or set shift_terminal to None"
        raise ValueError(f"{name}{cause} has {counted}: take more, such as {steps + 1}{remedy}")
    latest, last = float(scheduler.timesteps.max()), scheduler.config.num_train_timesteps - 1
    offset = scheduler.config.get("steps_offset", 0)
    if offset and latest > last and scheduler_prediction_type(scheduler) != "flow":
        raise ValueError(
            f"{name} with steps_offset={offset} comes to timestep {latest:g} in {steps} steps, "
            f"and {last} is the last that was trained: take fewer steps, or set steps_offset to 0"
        )
    if not _leads_on(scheduler):
        raise fault


def _leads_on(scheduler: SchedulerMixin) -> bool:
    """Whether the timesteps that were set are trained ones, and each step comes to another noise level.

    A step between equal levels divides 0 by 0. So it is with as many steps as were trained in `leading`: the multistep
    schedulers part the trained ones by one more than the steps, which rounds down to 0.
    """
    if float(scheduler.timesteps.min()) < 0:
        return False  # rounding gives `trailing` one step too many of some numbers: 61 of 1000 end at -1
    if scheduler.order > 1 or _is_one_of(scheduler, ("PNDMScheduler",)):
        return True  # these stay at a level on purpose, to look at it twice
    levels = getattr(scheduler, "sigmas", None)
    if levels is None:
        levels = scheduler.timesteps  # beside sigmas they are rounded, and may repeat
    elif len(levels) > 2:
        levels = levels[:-1]  # a last step to its own level changes nothing, after others
    return not bool((levels[1:] == levels[:-1]).any())


def check_training_scheduler(scheduler: SchedulerMixin, prediction_type: PredictionType) -> None:
    """Refuse what cannot noise at any time: inference schedulers look times up in a list that is made for sampling."""
    name = type(scheduler).__name__
    allowed = _TRAINING_SCHEDULERS["flow" if prediction_type == "flow" else "discrete"]
    if not _is_one_of(scheduler, allowed):
        raise ValueError(
            f"{name} cannot train a {prediction_type} model: train with {' or '.join(allowed)}; "
            "for sampling, other schedulers are made from its config"
        )
    # what is wrong for sampling too, or training would end in a pipeline that is refused
    _check_zero_terminal_snr(scheduler, prediction_type)
    if prediction_type == "flow":
        _check_flow_settings(scheduler)
    else:
        _check_betas(scheduler)
        _check_discrete_settings(scheduler)
    _check_solver_settings(scheduler)  # a learned variance among them


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
    _check_zero_terminal_snr(scheduler, prediction_type)
    if prediction_type == "flow":
        _check_flow_settings(scheduler)
    else:
        _check_discrete_settings(scheduler)
    _check_solver_settings(scheduler)


def _check_betas(scheduler: SchedulerMixin) -> None:
    """Refuse betas of which a training step would find none for its time, or no alpha and sigma in them."""
    name, betas, steps = type(scheduler).__name__, scheduler.betas, scheduler.config.num_train_timesteps
    if len(betas) != steps:
        raise ValueError(
            f"{name} has {len(betas)} betas and num_train_timesteps {steps}: trained_betas must be as many"
        )
    if not bool(((betas >= 0) & (betas <= 1)).all()):  # NaN among them
        raise ValueError(f"{name} has betas outside 0..1: see its beta_start, beta_end, beta_schedule, trained_betas")


def _check_flow_settings(scheduler: SchedulerMixin) -> None:
    """Refuse settings with which a scheduler leaves the way of a flow, or never comes to its end."""
    name, config = type(scheduler).__name__, scheduler.config
    own = _is_one_of(scheduler, _FLOW_MATCH)
    spacings = [key for key in _OTHER_SIGMAS if config.get(key, False)]
    if spacings and not own:
        raise ValueError(f"{name} with {spacings[0]}=True leaves the flow's own noise levels: set it to False")
    if own and config.get("invert_sigmas", False):
        raise ValueError(f"{name} with invert_sigmas=True goes from pictures to noise: set it to False")
    # set_scale_factors() changes those at work, and not the config
    if _is_one_of(scheduler, _RENOISING) and scheduler._scale_factors:
        raise ValueError(f"{name} with scale_factors changes the pictures' size between its steps: set them to None")
    key = "shift" if own else "flow_shift"
    # set_shift() changes the one at work, and not the config
    has_own = isinstance(getattr(type(scheduler), "shift", None), property)
    shift = scheduler.shift if has_own else config.get(key, 1.0)
    if not (isfinite(shift) and shift > 0):
        raise ValueError(f"{name} with {key}={shift} has noise levels outside 0..1: set it above 0")
    if not own and config.get("final_sigmas_type") == "sigma_min":
        raise ValueError(f"{name} with final_sigmas_type sigma_min leaves noise in a flow's pictures: set it to zero")
    if not own and config.get("algorithm_type") in ("dpmsolver", "sde-dpmsolver"):
        raise ValueError(f"{name} with algorithm_type {config.algorithm_type} knows no flow: use dpmsolver++")


def _check_discrete_settings(scheduler: SchedulerMixin) -> None:
    """Refuse settings with which a scheduler samples at other noise levels or times than the model was trained at."""
    name, config = type(scheduler).__name__, scheduler.config
    if _is_one_of(scheduler, ("DDIMScheduler", "PNDMScheduler")) and config.timestep_spacing == "linspace":
        # their step() looks a fixed number of training steps ahead, which linspace does not visit
        raise ValueError(f"{name} with timestep_spacing linspace misses its own next step: use leading or trailing")
    if _is_one_of(scheduler, ("PNDMScheduler",)) and config.beta_schedule == "squaredcos_cap_v2":
        if config.timestep_spacing == "trailing":
            # its first step divides by an alpha of 5e-5, and float32 does not hold what is left of the picture
            raise ValueError("PNDMScheduler with squaredcos_cap_v2 cannot begin at the last step: use leading")
    known = type(scheduler)._get_init_keys(type(scheduler))  # others may be kept along for other classes
    if "use_flow_sigmas" in known and config.use_flow_sigmas:
        raise ValueError(
            f"{name} with use_flow_sigmas=True has a flow's noise levels, not this model's: set it to False"
        )
    if "timestep_type" in known and (config.timestep_type, config.prediction_type) == ("continuous", "v_prediction"):
        # it would give the network a quarter of sigma's logarithm; for other types it does nothing
        raise ValueError(
            f"{name} with timestep_type continuous gives the network other times than it was trained with: "
            "set it to discrete"
        )


def _check_solver_settings(scheduler: SchedulerMixin) -> None:
    """Refuse settings with which diffusers' steps fail, or end elsewhere, whatever the model predicts."""
    name, config = type(scheduler).__name__, scheduler.config
    if isinstance(config.get("trained_betas"), Tensor):
        raise ValueError(f"{name} with trained_betas as a tensor cannot be saved: give a list, as tolist() makes it")
    if config.get("use_dynamic_shifting", False):
        raise ValueError(
            f"{name} with use_dynamic_shifting=True needs a shift per picture size, which is not supported"
        )
    if str(config.get("variance_type", "")).startswith("learned"):
        raise ValueError(f"{name} with a learned variance is not supported: set variance_type to fixed_small")
    if _is_one_of(scheduler, ("DPMSolverMultistepScheduler",)) and config.algorithm_type == "sde-dpmsolver":
        raise ValueError(f"{name} with algorithm_type sde-dpmsolver ends at another picture: use sde-dpmsolver++")
    if not _is_one_of(scheduler, ("UniPCMultistepScheduler",)):
        return
    if not config.predict_x0:
        raise ValueError(f"{name} with predict_x0=False divides by a last noise level of 0: set it to True")
    if config.solver_type == "bh1" and config.final_sigmas_type == "zero":
        raise ValueError(f"{name} with solver_type bh1 divides infinity by itself at the last step: set it to bh2")


def declare_prediction_type(scheduler: SchedulerMixin, prediction_type: PredictionType) -> None:
    """Write the prediction type into the scheduler's config, so that `from_config` carries it to any class.

    A FlowMatch scheduler's config has no such key, and another class made from it would fall to epsilon in silence. So
    the keys by which the multistep schedulers know a flow are written beside its own; they survive saving. Where they
    have come along from a flow's config to another model's, they are taken back.
    The betas are carried along too: diffusers would drop what was left at its default, and classes differ in those.
    """
    keys: dict[str, object] = {
        "prediction_type": prediction_type,
        "use_flow_sigmas": False,
        "_use_default_values": [],
    }
    if prediction_type == "flow":
        shift = scheduler.config.get("flow_shift", scheduler.config.get("shift", 1.0))
        keys |= {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": shift}
    scheduler.register_to_config(**keys)


def scheduler_from_config(scheduler_class: type[SchedulerMixin], config: dict) -> SchedulerMixin:
    """`from_config`, without diffusers' warning that the keys kept for other classes are not expected.

    Raises ValueError if the class does not know a value that the config has.
    """
    known = scheduler_class._get_init_keys(scheduler_class)
    taken = {key: value for key, value in config.items() if key in known}
    try:
        scheduler = scheduler_class.from_config(taken)
    except NotImplementedError as error:
        fault = unknown_value(scheduler_class.__name__, taken, error)
        raise ValueError(f"{fault}, which the config asks for") from None
    kept = {key: value for key, value in config.items() if key not in known and not key.startswith("_")}
    scheduler.register_to_config(**kept)
    return scheduler


def unknown_value(name: str, settings: dict[str, object], error: NotImplementedError) -> str:
    """What a scheduler class means by "x is not implemented for ...", with the setting's name."""
    found = re.search(r"(\S+) is not implemented", str(error))
    keys = [key for key, value in settings.items() if found and str(value) == found[1]]
    return f"{name} has no {keys[0]} {found[1]!r}" if keys else f"{name} cannot be made: {error}"


def require_one_of(what: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise a ValueError that names the allowed values for any other."""
    if value not in allowed:
        raise ValueError(f"{what} must be one of {', '.join(allowed)}, got {value!r}")


def _check_zero_terminal_snr(scheduler: SchedulerMixin, prediction_type: PredictionType) -> None:
    """Refuse what cannot go with betas that are rescaled to end in pure noise (Lin et al. 2024, section 3)."""
    if prediction_type == "flow" or not scheduler.config.get("rescale_betas_zero_snr", False):
        return
    name = type(scheduler).__name__
    if prediction_type == "epsilon":
        raise ValueError(
            "rescale_betas_zero_snr cannot go with epsilon: the last step is pure noise, which tells nothing of the "
            "picture; use v_prediction or sample"
        )
    if not _is_one_of(scheduler, _ZERO_TERMINAL_SNR):
        # it would take the betas as they were before
        can = ", ".join(each for each in sampling_schedulers(prediction_type) if each in _ZERO_TERMINAL_SNR)
        raise ValueError(
            f"{name} does not know rescale_betas_zero_snr, which the model was trained with; these do: {can}"
        )
    if scheduler.config.timestep_spacing == "leading":
        raise ValueError(
            f"{name} with rescale_betas_zero_snr and timestep_spacing leading never begins at the last step, "
            "which is pure noise: set timestep_spacing to trailing"
        )


def _is_one_of(scheduler: SchedulerMixin, names: tuple[str, ...]) -> bool:
    return any(base.__name__ in names for base in type(scheduler).__mro__)

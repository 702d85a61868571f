"""The schedulers that a pipeline is tried with, and the table of them in docs/schedulers.md.

python tests/scheduler_cases.py     writes the table anew, from the same list that the tests run
"""

from functools import cache
from pathlib import Path
from typing import NamedTuple

import diffusers
from pipeline_parts import scheduler_for

from unet_attn.schedulers import PREDICTION_TYPES, check_sampling_scheduler, inversion_schedulers, scheduler_from_config

PAGE = Path(__file__).resolve().parent.parent / "docs" / "schedulers.md"
BEGIN, END = "<!-- table: python tests/scheduler_cases.py -->\n", "<!-- end of table -->\n"

EXACT = 1e-3  # the most that an oracle's picture may differ from the clean one, whose values lie in [-1, 1]
ZERO_TERMINAL_SNR = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
# The last step of these goes to the schedule's first noise level, not to none: what is left of x_T is about 1 % of it.
# In few steps PNDM leaves more of a v_prediction: an oracle's picture is off by 0.8 in 4, by 0.2 in 5, by 0.02 in 10.
STOPS_EARLY = {"DEISMultistepScheduler": 0.1, "PNDMScheduler": 0.1}


Settings = tuple[tuple[str, object], ...]


class Case(NamedTuple):
    """One scheduler with settings: `Class.from_config(pipe.scheduler.config, **settings)`."""

    name: str
    settings: dict[str, object]
    draws_noise: bool = False

    @property
    def title(self) -> str:
        shown = "".join(f", {key}={value!r}" for key, value in self.settings.items())
        return f"{self.name}{shown}"

    @property
    def error(self) -> float:
        return STOPS_EARLY.get(self.name, EXACT)

    def types(self, betas: dict[str, object] | None = None) -> list[str]:
        """The prediction types that it samples, as the pipeline's own check has it.

        betas: settings of the scheduler that the model was trained with; with them, types that have betas.
        """
        kinds = [kind for kind in PREDICTION_TYPES if betas is None or kind != "flow"]
        settings, betas = tuple(self.settings.items()), tuple((betas or {}).items())
        return [kind for kind in kinds if _samples(self.name, settings, kind, betas)]


@cache  # some constructors take half a second
def _samples(name: str, settings: Settings, kind: str, betas: Settings) -> bool:
    try:
        config = scheduler_for(kind, dict(betas)).config
        made = scheduler_from_config(getattr(diffusers, name), {**config, **dict(settings)})
        check_sampling_scheduler(made, kind)
    except ValueError:
        return False
    return True


CASES = [
    Case("DDIMScheduler", {}),
    Case("DDIMScheduler", {"timestep_spacing": "trailing"}),
    Case("DDPMScheduler", {}, draws_noise=True),
    Case("DEISMultistepScheduler", {}),
    Case("DPMSolverMultistepScheduler", {}),
    Case("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++"}, draws_noise=True),
    Case("DPMSolverMultistepScheduler", {"use_karras_sigmas": True}),
    Case("DPMSolverSinglestepScheduler", {}),
    Case("DPMSolverSinglestepScheduler", {"algorithm_type": "sde-dpmsolver++"}, draws_noise=True),
    Case("EulerDiscreteScheduler", {}),
    Case("EulerDiscreteScheduler", {"use_karras_sigmas": True}),
    Case("EulerAncestralDiscreteScheduler", {}, draws_noise=True),
    Case("FlowMatchEulerDiscreteScheduler", {}),
    Case("FlowMatchEulerDiscreteScheduler", {"use_karras_sigmas": True}),
    Case("FlowMatchEulerDiscreteScheduler", {"stochastic_sampling": True}, draws_noise=True),
    Case("FlowMatchHeunDiscreteScheduler", {}),
    Case("FlowMatchLCMScheduler", {}, draws_noise=True),
    Case("HeunDiscreteScheduler", {}),
    Case("KDPM2DiscreteScheduler", {}),
    Case("KDPM2AncestralDiscreteScheduler", {}, draws_noise=True),
    Case("LCMScheduler", {}, draws_noise=True),
    Case("LMSDiscreteScheduler", {}),
    Case("PNDMScheduler", {}),
    Case("UniPCMultistepScheduler", {}),
]


def table() -> str:
    lines = [
        f"| scheduler | {' | '.join(PREDICTION_TYPES)} | zero terminal SNR | noise in its steps | error of an oracle |",
        "|---|" + "---|" * (len(PREDICTION_TYPES) + 3),
    ]
    for case in CASES:
        works = ("yes" if kind in case.types() else "refused" for kind in PREDICTION_TYPES)
        noise = "yes" if case.draws_noise else "no"
        rescaled = "not needed" if case.types() == ["flow"] else ", ".join(case.types(ZERO_TERMINAL_SNR)) or "refused"
        lines.append(f"| {case.title} | {' | '.join(works)} | {rescaled} | {noise} | at most {case.error:g} |")
    inverse = Case("DDIMInverseScheduler", {})
    inverts = ("inverts" if inversion_schedulers(kind) else "refused" for kind in PREDICTION_TYPES)
    rescaled = ", ".join(inverse.types(ZERO_TERMINAL_SNR))
    lines.append(f"| {inverse.title} | {' | '.join(inverts)} | {rescaled} | no | see below |")
    return "\n".join(lines) + "\n"


def written(page: str) -> str:
    """The page with the table in its place."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + "\n" + table() + "\n" + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

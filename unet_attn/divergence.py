"""What is done about steps whose loss or gradient is not finite: each is skipped, many end the run."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from unet_attn.sharding import whole

MOST_SKIPS = 10
MOST_NAMES = 8
ADVICE = "lower train.learning_rate; the checkpoints from before these steps are kept"


class TrainingDiverged(ValueError):
    """Too many steps in a row had a loss or gradient that was not finite, or a weight has become so."""


class SkippedSteps:
    """Counts the steps that were skipped, those in a row."""

    def __init__(self) -> None:
        self.in_row = 0

    def describe(self, step: int, losses: Tensor, indices: Tensor, name: Callable[[int], str]) -> str:
        """The warning of a skipped step: losses (b,) and data indices (b,) of its samples; name: of a picture."""
        bad = indices[~torch.isfinite(losses).cpu()].tolist()
        found = bad or indices.tolist()
        names = ", ".join(name(index) for index in found[:MOST_NAMES])
        more = f" and {len(found) - MOST_NAMES} more" if len(found) > MOST_NAMES else ""
        what = "loss" if bad else "gradient"
        return f"step {step} is skipped: its {what} is not finite; pictures: {names}{more}"

    def check(self, step: int, *, at_end: bool = False) -> None:
        """Raise TrainingDiverged if it were no use to go on, or, at the end, to publish what there is."""
        # a single bad batch at the end is no sign of broken weights
        if self.in_row < (2 if at_end else MOST_SKIPS):
            return
        raise TrainingDiverged(
            f"{self.in_row} steps in a row had a loss or gradient that is not finite, up to step {step}: {ADVICE}"
        )


def check_finite(parameters: Iterable[Tensor], step: int) -> None:
    """Raise TrainingDiverged if a weight is not finite, or all together too large for float32. Collective."""
    norm = torch.nn.utils.get_total_norm([parameter.detach() for parameter in parameters])
    if not math.isfinite(float(whole(norm))):
        raise TrainingDiverged(f"the weights are not finite after step {step}: {ADVICE}")

"""How the answer to the prompt is led away from another, weaker answer.

With c the answer to the prompt and u the other one, all of it begins with u + s (c - u) (Ho & Salimans 2022, eq. 6, in
which s = 1 + w). u is the U-Net's answer to the negative prompt, by default the empty caption, or that of a weaker
U-Net to the same prompt (autoguidance, Karras et al. 2024, https://arxiv.org/abs/2406.02507).
"""

import math
from dataclasses import dataclass
from numbers import Real

from torch import Tensor


@dataclass(frozen=True)
class Guidance:
    """What is done beside u + s (c - u); the defaults do nothing.

    rescale: phi in [0, 1], the share of the guided answer that is scaled back to the spread of c (Lin et al. 2024,
        https://arxiv.org/abs/2305.08891, section 3.4).
    interval: (low, high], noise levels sigma / alpha between which there is guidance; elsewhere c alone is computed, at
        half the cost (Kynkaanniemi et al. 2024, https://arxiv.org/abs/2404.07724).
    parallel, norm_limit, momentum: eta, r and beta of adaptive projected guidance (Sadat et al. 2024,
        https://arxiv.org/abs/2410.02416): the weight of the part of c - u along c, which over-saturates; the most that
        c - u may measure in a picture; and how much of the earlier steps' c - u is added, negative as a rule. They act
        on the clean pictures that the answers stand for.
    Raises ValueError for a number out of its range.
    """

    rescale: float = 0.0
    interval: tuple[float, float] = (0.0, math.inf)
    parallel: float = 1.0
    norm_limit: float = math.inf
    momentum: float = 0.0

    def __post_init__(self) -> None:
        for name in ("rescale", "parallel", "norm_limit", "momentum"):
            if not isinstance(getattr(self, name), Real):
                raise ValueError(f"guidance {name} must be a number, got {getattr(self, name)!r}")
        low, high = _pair(self.interval)
        if not 0 <= self.rescale <= 1:
            raise ValueError(f"guidance rescale must lie in 0..1, got {self.rescale}")
        if not 0 <= low < high:
            raise ValueError(f"guidance interval must be two noise levels, 0 <= low < high, got {self.interval}")
        if not self.norm_limit > 0:
            raise ValueError(f"guidance norm_limit must be above 0, got {self.norm_limit}")
        if not -1 < self.momentum < 1:
            raise ValueError(f"guidance momentum must lie between -1 and 1, got {self.momentum}")
        if not math.isfinite(self.parallel):
            raise ValueError(f"guidance parallel must be a finite number, got {self.parallel}")

    @property
    def is_projected(self) -> bool:
        return (self.parallel, self.norm_limit, self.momentum) != (1.0, math.inf, 0.0)

    @property
    def is_everywhere(self) -> bool:
        return tuple(self.interval) == (0.0, math.inf)


def _pair(interval: tuple[float, float]) -> tuple[float, float]:
    if not isinstance(interval, tuple | list) or len(interval) != 2 or not all(isinstance(x, Real) for x in interval):
        raise ValueError(f"guidance interval must be two noise levels, 0 <= low < high, got {interval!r}")
    return interval[0], interval[1]


PLAIN_GUIDANCE = Guidance()


class Guide:
    """The guidance of one call: scale and rules, and the memory that momentum needs."""

    def __init__(self, scale: float, rules: Guidance) -> None:
        self.scale = scale
        self.rules = rules
        self._average: Tensor | float = 0.0

    def acts_at(self, noise_level: float) -> bool:
        """Whether the other answer is needed where sigma / alpha is noise_level."""
        low, high = self.rules.interval
        return self.scale != 1 and low < noise_level <= high

    def __call__(self, answer: Tensor, other: Tensor, sample: Tensor, to_clean: tuple[float, float]) -> Tensor:
        """The guided answer.

        answer, other: c and u (B, C, H, W); sample: what the U-Net was given; to_clean: (a, b) with which
        a sample + b answer is the clean picture that an answer stands for.
        """
        if self.rules.is_projected:
            a, b = to_clean
            clean = a * sample + b * answer
            step = self._project(b * (answer - other), clean)
            # back through b: clean + (s - 1) step, as an answer
            guided = answer + (self.scale - 1) / b * step
        else:
            guided = other + self.scale * (answer - other)
        return rescaled(guided, answer, self.rules.rescale) if self.rules.rescale else guided

    def _project(self, difference: Tensor, clean: Tensor) -> Tensor:
        """Sadat et al. 2024, algorithm 1: momentum, then the limit, then the projection."""
        self._average = difference + self.rules.momentum * self._average
        return projected(limited(self._average, self.rules.norm_limit), clean, self.rules.parallel)


def limited(difference: Tensor, limit: float) -> Tensor:
    """Each row scaled down to a norm of at most limit. (B, ...)."""
    norm = _row_norms(difference)
    return difference * (limit / norm.clamp(min=1e-12)).clamp(max=1.0)


def projected(difference: Tensor, direction: Tensor, parallel: float) -> Tensor:
    """Each row with the part of it along the row of `direction` multiplied by `parallel`. (B, ...)."""
    unit = direction / _row_norms(direction).clamp(min=1e-12)
    along = (difference * unit).sum(dim=tuple(range(1, difference.ndim)), keepdim=True) * unit
    return difference + (parallel - 1.0) * along


def rescaled(guided: Tensor, answer: Tensor, share: float) -> Tensor:
    """Lin et al. 2024, eq. 15 and 16: mixed, by share, with itself at the standard deviation of `answer`. (B, ...)."""
    axes = tuple(range(1, guided.ndim))
    ratio = answer.std(dim=axes, keepdim=True) / guided.std(dim=axes, keepdim=True).clamp(min=1e-12)
    return guided * (share * ratio + 1.0 - share)


def _row_norms(x: Tensor) -> Tensor:
    return x.square().sum(dim=tuple(range(1, x.ndim)), keepdim=True).sqrt()

"""Averaged weights whose length is chosen after training (Karras et al. 2024, 2312.02696, section 3 and appendix C).

Training keeps two averages whose weights rise as powers of training time and writes snapshots of both. Any other such
average is nearly a sum of the snapshots, with the coefficients that fit its profile best. An average's length is the
standard deviation of its profile as a share of the training: at 0.1 the last fifth has five sixths of the weight.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from unet_attn.checkpoint import STATE, load_checkpoint, numbered, save_checkpoint, step_of
from unet_attn.ema import float_copies, load_averages, trainable
from unet_attn.sharding import gathered

TRACKED = (0.05, 0.10)  # as in the paper: powers 16.97 and 6.94
LONGEST = 0.28  # 1 / sqrt(12) = 0.289 is the plain mean of all steps
SNAPSHOTS = "ema_snapshots"

Read = TypeVar("Read")


class Profile(NamedTuple):
    """A power-function average: its length, and the number of updates it was taken after."""

    length: float
    updates: int


class Snapshot(NamedTuple):
    """A folder with one average for each of `lengths`, taken after `step` steps of which `updates` changed weights."""

    path: Path
    step: int
    updates: int
    lengths: tuple[float, ...]

    @property
    def profiles(self) -> list[Profile]:
        return [Profile(length, self.updates) for length in self.lengths]


class PowerFunctionEMA:
    """Averages of the trainable parameters of `model` for several lengths, in float32 and in tensors of their own.

    After t updates the weights of update s count as the integral of the profile from s - 1 to s; what the model was
    before the first update does not count. lengths: none = nothing is kept and nothing costs time.
    """

    def __init__(self, model: nn.Module, lengths: Sequence[float] = TRACKED) -> None:
        self.exponents = {length: exponent(length) for length in lengths}
        self.averages = {length: float_copies(model) for length in lengths}
        self.updates = 0

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Take in the weights that an optimizer step has just made."""
        self.updates += 1
        parameters = trainable(model) if self.averages else {}
        for length, averages in self.averages.items():
            live = [parameters[name].float() for name in averages]
            decay = (1 - 1 / self.updates) ** (self.exponents[length] + 1)  # section 3.1
            torch._foreach_lerp_(list(averages.values()), live, 1 - decay)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """The averages by length and name, as checkpoints and snapshots hold them."""
        return {_group(length): averages for length, averages in self.averages.items()}

    def load(self, tensors: Mapping[str, Mapping[str, Tensor]], *, updates: int) -> None:
        """Go on from a checkpoint's tensors. Raises ValueError if it was saved without these averages."""
        for length, averages in self.averages.items():
            if _group(length) not in tensors:
                raise ValueError(
                    f"the checkpoint holds no average of length {length:g}, as it was trained without "
                    "train.ema_snapshot_every: leave that null to go on from it"
                )
            load_averages(averages, tensors[_group(length)])
        self.updates = updates


# snapshots


def write_snapshot(run: Path, step: int, ema: PowerFunctionEMA, *, is_main: bool = True) -> None:
    """Write the averages into `run`, complete or not at all. All processes call it and the main one alone writes.

    Raises CheckpointError when the disk refuses.
    """
    state = {"updates": ema.updates, "lengths": list(ema.averages)}
    tensors = {name: gathered(averages, keep=is_main) for name, averages in ema.tensors().items()}
    if is_main:
        save_checkpoint(run / SNAPSHOTS, step, tensors=tensors, state=state)


def drop_snapshots(run: Path, *, after: int) -> None:
    """Remove the snapshots of steps beyond `after`, which a run that is resumed there makes anew."""
    for path in numbered(run / SNAPSHOTS):
        if step_of(path) > after:
            shutil.rmtree(path)


def find_snapshots(run: Path, *, step: int | None = None) -> list[Snapshot]:
    """The snapshots of `run` in order, up to that of `step`, by default the last.

    Raises ValueError if there are none, naming the option that makes them, none of that step, or one is damaged.
    """
    found = [_snapshot(path) for path in numbered(run / SNAPSHOTS)]
    found = [snapshot for snapshot in found if snapshot.updates > 0]
    if not found:
        raise ValueError(f"{run} has no snapshots of averaged weights: they are kept with --train.ema_snapshot_every")
    steps = [snapshot.step for snapshot in found]
    if step is not None and step not in steps:
        raise ValueError(f"{run} has no snapshot of step {step}: there are {', '.join(map(str, steps))}")
    return found if step is None else found[: steps.index(step) + 1]


def synthesize(snapshots: Iterable[Snapshot], coefficients: Tensor) -> list[dict[str, Tensor]]:
    """The averages of which `coefficients` (W, K) are the fit, each by parameter name in float32.

    K: over the snapshots' profiles, in order. Each file is read once. Raises ValueError naming a damaged snapshot.
    """
    made: list[dict[str, Tensor]] = [{} for _ in coefficients]
    columns = iter(coefficients.T.tolist())
    for snapshot in snapshots:
        tensors = _undamaged(snapshot.path, lambda path: load_checkpoint(path).tensors)
        for length in snapshot.lengths:
            parts = tensors[_group(length)]
            for averages, factor in zip(made, next(columns), strict=True):
                if not averages:
                    averages.update({name: torch.zeros_like(part) for name, part in parts.items()})
                if _shapes(averages) != _shapes(parts):
                    raise ValueError(f"the snapshot {snapshot.path} is of another model than those before it")
                for name, part in parts.items():
                    averages[name].add_(part, alpha=factor)
    return made


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _snapshot(path: Path) -> Snapshot:
    def read(path: Path) -> Snapshot:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        return Snapshot(path, state["step"], state["updates"], tuple(state["lengths"]))

    return _undamaged(path, read)


def _undamaged(path: Path, read: Callable[[Path], Read]) -> Read:
    """Read from a snapshot's folder, and say of any failure what can be done."""
    try:
        return read(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"the snapshot {path} is damaged ({error}): remove that folder to do without it") from error


# the profiles


def exponent(length: float) -> float:
    """The power gamma of training time whose profile has this length. Raises ValueError outside (0, 0.28]."""
    if not 0 < length <= LONGEST:
        raise ValueError(f"the length of an average must be above 0 and at most {LONGEST}, got {length:g}")
    # t^gamma on [0, 1] has the variance (gamma + 1) / ((gamma + 2)^2 (gamma + 3)): a cubic with one positive root
    inverse = length**-2
    return float(max(np.roots([1, 7, 16 - inverse, 12 - inverse]).real))


def inner_products(first: Sequence[Profile], second: Sequence[Profile]) -> Tensor:
    """The integrals over training time of the products of profiles, (F, S) float64."""
    gamma, time = (column[:, None] for column in _columns(first))
    other_gamma, other_time = _columns(second)
    # the product (g + 1) (h + 1) s^(g + h) / (t^(g + 1) u^(h + 1)) is integrated up to the earlier of t and u; written
    # with the ratio of the two, no power overflows
    earlier, later = torch.minimum(time, other_time), torch.maximum(time, other_time)
    gamma_of_later = torch.where(time > other_time, gamma, other_gamma)
    factor = (gamma + 1) * (other_gamma + 1) / (gamma + other_gamma + 1)
    return factor * (earlier / later) ** gamma_of_later / later


def fit(profiles: Sequence[Profile], wanted: Sequence[Profile]) -> tuple[Tensor, Tensor]:
    """The sums of `profiles` that come closest to each of `wanted`: coefficients (W, K) and errors (W,), float64.

    An error is the distance of the two profiles relative to the wanted one's norm. Other than in the paper the
    coefficients are made to add up to 1: weights that do not move are then reproduced exactly, where otherwise a part
    of their size is lost; in short runs that was most of the error.
    """
    inner, targets = inner_products(profiles, profiles), inner_products(profiles, wanted)
    norms, wanted_norms = inner.diagonal().sqrt(), inner_products(wanted, wanted).diagonal().sqrt()
    inner, targets = inner / norms[:, None] / norms, targets / norms[:, None] / wanted_norms  # all of norm 1
    size = len(profiles)

    # least squares with a Lagrange multiplier for the sum, which is a weighted one where profiles have norm 1
    weights = norms.min() / norms
    system = torch.zeros(size + 1, size + 1, dtype=torch.float64)
    system[:size, :size], system[size, :size], system[:size, size] = inner, weights, weights
    right = torch.cat([targets, (norms.min() / wanted_norms)[None]])
    # of equal profiles, as of a step whose update was skipped, gelsd takes equal shares
    solution = torch.linalg.lstsq(system, right, driver="gelsd").solution[:size]

    squares = (solution * (inner @ solution - 2 * targets)).sum(dim=0) + 1
    coefficients = solution * wanted_norms / norms[:, None]
    return coefficients.T, squares.clamp(min=0).sqrt()


def _columns(profiles: Sequence[Profile]) -> tuple[Tensor, Tensor]:
    """The exponents and the times of profiles, (P,) float64 each."""
    gammas = torch.tensor([exponent(profile.length) for profile in profiles], dtype=torch.float64)
    return gammas, torch.tensor([profile.updates for profile in profiles], dtype=torch.float64)


def _group(length: float) -> str:
    """The file of an average in a checkpoint or a snapshot."""
    return f"ema_length_{length:g}"

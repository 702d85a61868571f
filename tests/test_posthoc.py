"""Averages whose length is chosen after training: the profiles' formulas, the tracked averages, and their synthesis."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from unet_attn.checkpoint import load_checkpoint, save_checkpoint
from unet_attn.posthoc import (
    TRACKED,
    PowerFunctionEMA,
    Profile,
    Snapshot,
    drop_snapshots,
    exponent,
    find_snapshots,
    fit,
    inner_products,
    synthesize,
    write_snapshot,
)

UPDATES, EVERY = 221, 13
# by length, how far a synthesized average may be from the true one, relative to the distance from there to the live
# weights
LIMITS = {0.03: 0.02, 0.05: 1e-5, 0.07: 0.002, 0.15: 0.003, 0.2: 0.01}


def sampled_profile(profile: Profile, times: Tensor) -> Tensor:
    """The profile (gamma + 1) s^gamma / t^(gamma + 1) at `times`, 0 after its own time t. float64."""
    gamma, end = exponent(profile.length), profile.updates
    values = (gamma + 1) / end * (times / end) ** gamma
    return torch.where(times <= end, values, torch.zeros_like(values))


def midpoints(end: int, parts: int = 200_000) -> tuple[Tensor, float]:
    """Where to sample [0, end] for an integral by the midpoint rule, and the width of a part."""
    width = end / parts
    return (torch.arange(parts, dtype=torch.float64) + 0.5) * width, width


class Walk:
    """A model whose weights drift and walk at random around 1, the same way each time."""

    def __init__(self) -> None:
        self.model = nn.Linear(7, 5).requires_grad_(True)
        self.generator = torch.Generator().manual_seed(3)
        self.drift = {name: self.random(value) for name, value in self.model.named_parameters()}
        self.steps: list[Tensor] = []  # the weights after each step
        nn.init.ones_(self.model.weight)
        nn.init.ones_(self.model.bias)

    def random(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self.generator)

    @torch.no_grad()
    def step(self) -> nn.Module:
        for name, value in self.model.named_parameters():
            value += 0.05 * self.random(value) + 0.01 * self.drift[name]
        self.steps.append(self.model.weight.clone())
        return self.model


class Tracked(NamedTuple):
    """A run with snapshots, its weights after the last step, and averages tracked directly."""

    run: Path
    last: Tensor
    direct: PowerFunctionEMA


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Tracked:
    """UPDATES steps of a walk, with a snapshot each EVERY steps."""
    run, walk = tmp_path_factory.mktemp("run"), Walk()
    ema, direct = PowerFunctionEMA(walk.model), PowerFunctionEMA(walk.model, tuple(LIMITS))
    for step in range(1, UPDATES + 1):
        model = walk.step()
        ema.update(model)
        direct.update(model)
        if step % EVERY == 0:
            write_snapshot(run, step, ema)
    return Tracked(run, walk.steps[-1], direct)


@pytest.mark.parametrize("length", [0.005, 0.05, 0.1, 0.17, 0.28])
def test_the_exponent_gives_a_profile_of_the_length(length: float) -> None:
    times, width = midpoints(1)
    density = sampled_profile(Profile(length, 1), times) * width
    mean = (density * times).sum()
    deviation = (density * (times - mean) ** 2).sum().sqrt()

    assert_close(float(density.sum()), 1.0, atol=1e-5, rtol=0)
    assert_close(float(deviation), length, atol=1e-6, rtol=1e-4)


def test_the_tracked_lengths_have_the_papers_exponents() -> None:
    assert [round(exponent(length), 2) for length in TRACKED] == [16.97, 6.94]


@pytest.mark.parametrize("length", [0.0, -0.1, 0.281, float("nan")])
def test_a_length_that_no_average_has_is_refused(length: float) -> None:
    with pytest.raises(ValueError, match=f"above 0 and at most 0.28, got {length:g}"):
        exponent(length)


def test_inner_products_are_the_integrals() -> None:
    first = [Profile(0.05, 100), Profile(0.1, 70), Profile(0.28, 37)]
    second = [Profile(0.1, 100), Profile(0.02, 83)]
    times, width = midpoints(100)

    expected = [
        [float((sampled_profile(a, times) * sampled_profile(b, times)).sum() * width) for b in second] for a in first
    ]

    assert_close(inner_products(first, second), torch.tensor(expected, dtype=torch.float64), atol=1e-9, rtol=1e-4)


def test_inner_products_of_long_runs_do_not_overflow() -> None:
    short = Profile(0.005, 10**7)

    assert inner_products([short], [short, Profile(0.005, 1)]).isfinite().all()


def test_a_fit_of_a_snapshots_own_profile_is_that_snapshot() -> None:
    profiles = [Profile(length, updates) for updates in (13, 26, 39) for length in TRACKED]

    coefficients, errors = fit(profiles, [profiles[4], profiles[3]])

    assert_close(coefficients, torch.eye(6, dtype=torch.float64)[[4, 3]], atol=1e-10, rtol=0)
    assert errors.max() < 1e-6


def test_the_error_of_a_fit_is_the_distance_of_the_profiles() -> None:
    profiles = [Profile(length, updates) for updates in (50, 75, 100) for length in TRACKED]
    wanted = [Profile(0.02, 100), Profile(0.2, 100)]
    times, _ = midpoints(100)

    coefficients, errors = fit(profiles, wanted)

    parts = torch.stack([sampled_profile(profile, times) for profile in profiles])
    for row, error, profile in zip(coefficients, errors, wanted, strict=True):
        target = sampled_profile(profile, times)
        assert_close(float(error), float((row @ parts - target).norm() / target.norm()), atol=1e-4, rtol=1e-3)
        assert_close(float(row.sum()), 1.0)
    # no small change of the coefficients that keeps their sum comes closer
    nudged = coefficients[1] + 0.01 * torch.tensor([1, -1, 0, 0, 1, -1], dtype=torch.float64)
    target = sampled_profile(wanted[1], times)
    assert (nudged @ parts - target).norm() / target.norm() > errors[1]


def test_a_snapshot_that_is_there_twice_does_no_harm() -> None:
    profiles = [Profile(length, 50) for length in TRACKED]

    coefficients, errors = fit([*profiles, *profiles], [Profile(0.07, 50)])
    once, error = fit(profiles, [Profile(0.07, 50)])

    assert_close(coefficients[:, :2] + coefficients[:, 2:], once)
    assert_close(errors, error)


def test_the_tracked_average_is_the_formulas_weighted_sum() -> None:
    walk = Walk()
    ema = PowerFunctionEMA(walk.model, (0.05, 0.2))
    for _ in range(29):
        ema.update(walk.step())

    for length in (0.05, 0.2):
        ends = torch.arange(30, dtype=torch.float64) / 29
        weights = (ends ** (exponent(length) + 1)).diff()  # the profile's integral from each step to the next
        expected = torch.einsum("s,sij->ij", weights, torch.stack(walk.steps).double())
        assert_close(ema.averages[length]["weight"].double(), expected, atol=1e-6, rtol=1e-6)
    assert ema.updates == 29


def test_the_first_update_forgets_what_was_before_training() -> None:
    model = nn.Linear(3, 2)
    ema = PowerFunctionEMA(model)
    nn.init.constant_(model.weight, 5.0)

    ema.update(model)
    nn.init.constant_(model.weight, 7.0)

    assert ema.averages[0.05]["weight"].unique().tolist() == [5.0]


def test_frozen_weights_are_left_out_and_halves_averaged_in_float32() -> None:
    model = nn.Linear(3, 2).to(torch.bfloat16)
    model.bias.requires_grad_(False)
    ema = PowerFunctionEMA(model)

    ema.update(model)

    assert {key: value.dtype for key, value in ema.averages[0.1].items()} == {"weight": torch.float32}


def test_without_lengths_nothing_is_kept() -> None:
    model = nn.Linear(3, 2)
    ema = PowerFunctionEMA(model, ())

    ema.update(model)
    ema.load({}, updates=3)

    assert ema.tensors() == {}
    assert ema.updates == 3


@pytest.mark.parametrize("length", LIMITS)
def test_a_synthesized_average_is_the_one_tracked_directly(tracked: Tracked, length: float) -> None:
    snapshots = find_snapshots(tracked.run)
    profiles = [profile for snapshot in snapshots for profile in snapshot.profiles]

    coefficients, _ = fit(profiles, [Profile(length, UPDATES)])
    made = synthesize(snapshots, coefficients)[0]

    expected = tracked.direct.averages[length]["weight"]
    distance = (expected - tracked.last).norm()
    assert made.keys() == {"weight", "bias"}
    assert (made["weight"] - expected).norm() < LIMITS[length] * distance
    assert distance > 0.1  # the average is another point than the live weights


def test_weights_that_stand_still_are_reproduced_even_by_a_poor_fit(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    ema = PowerFunctionEMA(model)
    for step in (1, 2):
        ema.update(model)
        write_snapshot(tmp_path, step, ema)
    snapshots = find_snapshots(tmp_path)

    coefficients, errors = fit([each for snapshot in snapshots for each in snapshot.profiles], [Profile(0.01, 2)])

    assert errors[0] > 0.3
    assert_close(synthesize(snapshots, coefficients)[0]["weight"], model.weight.detach(), atol=1e-5, rtol=1e-5)


def test_a_resumed_run_keeps_the_averages_of_a_straight_one(tmp_path: Path) -> None:
    straight, walk = PowerFunctionEMA(Walk().model), Walk()
    first = PowerFunctionEMA(walk.model)
    for _ in range(5):
        first.update(walk.step())
    save_checkpoint(tmp_path, 5, tensors=first.tensors(), state={})

    resumed = PowerFunctionEMA(walk.model)
    resumed.load(load_checkpoint(tmp_path / "step-000005").tensors, updates=5)
    for _ in range(6):
        resumed.update(walk.step())
    again = Walk()
    for _ in range(11):
        straight.update(again.step())

    for length in TRACKED:
        for name, average in straight.averages[length].items():
            assert torch.equal(resumed.averages[length][name], average)
    assert resumed.updates == straight.updates == 11


def test_a_checkpoint_without_these_averages_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no average of length 0.05, .* without train.ema_snapshot_every"):
        PowerFunctionEMA(nn.Linear(3, 2)).load({"ema": {}}, updates=5)


def test_the_averages_of_another_model_are_refused() -> None:
    tensors = PowerFunctionEMA(nn.Linear(5, 2)).tensors()

    with pytest.raises(ValueError, match=r"'weight' has shape \(2, 5\), the model's is \(2, 3\)"):
        PowerFunctionEMA(nn.Linear(3, 2)).load(tensors, updates=5)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Snapshots of the steps 3, 7 and 11, of which one in the first 7 was skipped."""
    walk = Walk()
    ema = PowerFunctionEMA(walk.model)
    for step in range(1, 12):
        if step != 5:
            ema.update(walk.step())
        if step in (3, 7, 11):
            write_snapshot(tmp_path, step, ema)
    return tmp_path


def test_snapshots_are_found_up_to_a_step_with_their_updates(run: Path) -> None:
    found = find_snapshots(run, step=7)

    assert found == [
        Snapshot(run / "ema_snapshots" / "step-000003", 3, 3, (0.05, 0.1)),
        Snapshot(run / "ema_snapshots" / "step-000007", 7, 6, (0.05, 0.1)),
    ]
    assert [snapshot.step for snapshot in find_snapshots(run)] == [3, 7, 11]
    assert found[1].profiles == [Profile(0.05, 6), Profile(0.1, 6)]


def test_a_resumed_run_drops_the_snapshots_that_it_makes_anew(run: Path) -> None:
    drop_snapshots(run, after=7)
    assert [snapshot.step for snapshot in find_snapshots(run)] == [3, 7]

    drop_snapshots(run / "elsewhere", after=0)  # a run without snapshots


def test_a_step_without_snapshot_is_refused_with_those_there_are(run: Path) -> None:
    with pytest.raises(ValueError, match="no snapshot of step 8: there are 3, 7, 11"):
        find_snapshots(run, step=8)


def test_a_run_without_snapshots_is_told_the_option(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no snapshots .* --train.ema_snapshot_every"):
        find_snapshots(tmp_path)


@pytest.mark.parametrize("file", ["state.json", "ema_length_0.1.safetensors"])
def test_a_damaged_snapshot_is_named_with_the_way_out(run: Path, file: str) -> None:
    path = run / "ema_snapshots" / "step-000007"
    (path / file).write_bytes((path / file).read_bytes()[:-5])

    with pytest.raises(ValueError, match=r"step-000007 is damaged .* remove that folder to do without it"):
        synthesize(find_snapshots(run), torch.ones(1, 6))


def test_snapshots_of_two_models_are_not_mixed(run: Path) -> None:
    model = nn.Linear(7, 3)
    other = PowerFunctionEMA(model)
    other.update(model)
    write_snapshot(run, 9, other)

    with pytest.raises(ValueError, match="step-000009 is of another model than those before it"):
        synthesize(find_snapshots(run), torch.ones(1, 8))

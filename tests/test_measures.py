"""Each measure against its definition written out, and what it must and must not see."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from unet_attn import measures
from unet_attn.measures import (
    Estimate,
    blind_share,
    copy_rate,
    difference,
    found_among,
    gaussian_distance,
    kernel_distance,
    mean_with_error,
    nearest_pictures,
    precision_and_recall,
    resample_counts,
)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def asked_for(real: int, sampled: int, *, seed: int, shift: float, likeness: float = 0.7) -> tuple[Tensor, ...]:
    """Features of real pictures, of those sampled for their captions in turn, which are alike, and made_for."""
    made_for = torch.arange(sampled) % real
    caption = likeness**0.5 * normal(max(real, sampled), 11, seed=3 * seed)
    own, drawn = ((1 - likeness) ** 0.5 * normal(n, 11, seed=3 * seed + k) for k, n in ((1, real), (2, sampled)))
    return caption[:real] + own, (caption[made_for] if real < sampled else caption[:sampled]) + drawn + shift, made_for


def repeated(measure: Callable[..., Estimate], draws: int, **drawn: float) -> tuple[Tensor, Tensor]:
    """The values over new draws, and the errors that were reported."""
    estimates = []
    for seed in range(draws):
        real, sampled, made_for = asked_for(**drawn, seed=seed)
        estimates.append(measure(real, sampled, made_for=made_for))
    return torch.tensor(estimates, dtype=torch.float64).unbind(dim=1)


def test_a_resample_draws_as_many_as_there_are_and_repeats_with_its_seed() -> None:
    counts = resample_counts(13, 5, resamples=17)

    assert counts.shape == (17, 13) and (counts.sum(dim=1) == 13).all()
    assert torch.equal(counts, resample_counts(13, 5, resamples=17))
    assert not torch.equal(counts, resample_counts(13, 6, resamples=17))


def test_the_error_of_a_mean_is_its_known_standard_error() -> None:
    values = normal(100) + 0.3

    estimate = mean_with_error(values)

    assert estimate.value == pytest.approx(values.mean().item())
    assert estimate.error == pytest.approx(values.std().item() / 10, rel=0.15)
    with pytest.raises(ValueError, match="no values"):
        mean_with_error(torch.zeros(0))


def test_the_error_of_a_share_is_wilsons_and_not_0_where_all_say_the_same() -> None:
    share = mean_with_error(torch.tensor([True] * 30 + [False] * 70))
    assert share.value == pytest.approx(0.3)
    assert share.error == pytest.approx((0.3 * 0.7 / 100) ** 0.5, rel=0.01)

    # the roots of (p - share)^2 = p (1 - p) / n are 0 and 1 / (n + 1) where none is found among n
    for value in (True, False):
        assert mean_with_error(torch.full((67,), value)) == (float(value), pytest.approx(1 / 68 / 2))


def test_the_error_of_a_difference_is_that_of_independent_values() -> None:
    assert difference(Estimate(0.5, 0.03), Estimate(0.7, 0.04)) == pytest.approx((-0.2, 0.05))


def test_kid_is_its_definition_over_pairs_of_pictures_that_do_not_belong_together() -> None:
    real, sampled = normal(5, 3), normal(7, 3, seed=1) + 0.5
    made_for = torch.tensor([0, 1, 2, 3, 4, 0, 9])  # the sixth for the first's caption again, the last for no real one

    def mean(a: Tensor, own_a: list[int], b: Tensor, own_b: list[int]) -> float:
        pairs = [(x, y) for x, i in zip(a, own_a, strict=True) for y, j in zip(b, own_b, strict=True) if i != j]
        return sum(((x @ y).item() / 3 + 1) ** 3 for x, y in pairs) / len(pairs)

    x, y = (real, [0, 1, 2, 3, 4]), (sampled, made_for.tolist())
    expected = mean(*x, *x) + mean(*y, *y) - 2 * mean(*x, *y)

    assert kernel_distance(real, sampled, made_for=made_for).value == pytest.approx(expected, rel=1e-12)


def test_a_generator_that_repeats_the_picture_of_its_caption_is_not_nearer_than_the_data_are_to_themselves() -> None:
    values, biased = [], []
    for seed in range(200):
        real = normal(89, 7, seed=seed)
        values.append(kernel_distance(real, real[:67], made_for=torch.arange(67)).value)
        biased.append(kernel_distance(real, real[:67]).value)

    def errors_from_0(drawn: list[float]) -> float:
        return (torch.tensor(drawn).mean() / torch.tensor(drawn).std() * len(drawn) ** 0.5).item()

    assert abs(errors_from_0(values)) < 3
    assert errors_from_0(biased) < -10  # where a picture is held against its own copy
    # and with as many of both there is nothing left to differ by
    assert kernel_distance(real, real, made_for=torch.arange(89)) == pytest.approx((0, 0), abs=1e-9)


@pytest.mark.parametrize(
    "drawn",
    [
        {"real": 67, "sampled": 67, "shift": 0.0},
        {"real": 211, "sampled": 67, "shift": 0.0},
        {"real": 67, "sampled": 211, "shift": 0.0},
        {"real": 211, "sampled": 67, "shift": 0.2},
        {"real": 67, "sampled": 67, "shift": 0.7},
    ],
    ids=lambda drawn: f"{drawn['real']} real, {drawn['sampled']} sampled, {drawn['shift']} apart",
)
def test_the_error_of_kid_is_its_spread_over_new_draws_near_0_and_far(drawn: dict[str, float]) -> None:
    values, errors = repeated(kernel_distance, 200, **drawn)

    assert errors.mean() / values.std() == pytest.approx(1, abs=0.2)
    if not drawn["shift"]:
        assert abs(values.mean()) < 3 * values.std() / 200**0.5


def test_the_error_of_kid_without_captions_is_its_spread_too() -> None:
    estimates = [kernel_distance(normal(89, 11, seed=2 * n), normal(67, 11, seed=2 * n + 1)) for n in range(200)]

    values, errors = torch.tensor(estimates, dtype=torch.float64).unbind(dim=1)
    assert errors.mean() / values.std() == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize(("shift", "ratio"), [(0.0, 1.3), (0.7, 1.05)])
def test_the_error_of_the_frechet_distance_is_its_spread_and_too_large_near_0(shift: float, ratio: float) -> None:
    values, errors = repeated(gaussian_distance, 200, real=211, sampled=67, shift=shift)

    assert errors.mean() / values.std() == pytest.approx(ratio, abs=0.2)


def test_the_distances_are_the_same_in_blocks_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    features = asked_for(53, 67, seed=0, shift=0.2)

    def all_of_them() -> list[float]:
        real, sampled, made_for = features
        return [
            *kernel_distance(real, sampled, made_for=made_for),
            *(each.value for each in precision_and_recall(real, sampled, made_for=made_for)),
        ]

    whole = all_of_them()
    monkeypatch.setattr(measures, "BLOCK_NUMBERS", 500)

    assert all_of_them() == pytest.approx(whole, rel=1e-9)


def test_the_gaussian_distance_is_heusels_with_fewer_pictures_than_features_too() -> None:
    for count, other in ((7, 5), (31, 29), (7, 29), (31, 5)):
        real, sampled = normal(count, 11), 1.5 * normal(other, 11, seed=1) + 0.3
        a, b = real.T.cov(), sampled.T.cov()
        root = torch.linalg.eigvals(a @ b).real.clamp(min=0).sqrt().sum()
        expected = (real.mean(0) - sampled.mean(0)).square().sum() + a.trace() + b.trace() - 2 * root

        assert gaussian_distance(real, sampled).value == pytest.approx(expected.item(), rel=1e-5)
        assert gaussian_distance(real, real).value == pytest.approx(0, abs=1e-9)


def test_precision_and_recall_are_the_shares_within_the_others_balls() -> None:
    real, sampled = normal(17, 2), normal(13, 2, seed=1) + 0.7

    def inside(points: Tensor, centres: Tensor) -> Tensor:
        shares = []
        for point in points:
            radii = [sorted((c - other).norm() for other in centres)[2] for c in centres]  # itself and two neighbours
            shares.append(any((point - c).norm() <= r for c, r in zip(centres, radii, strict=True)))
        return torch.tensor(shares).double().mean()

    precision, recall = precision_and_recall(real, sampled, neighbours=2)

    assert precision.value == pytest.approx(inside(sampled, real).item())
    assert recall.value == pytest.approx(inside(real, sampled).item())
    assert 0 < precision.value < 1 and 0 < precision.error < 0.2


def test_copies_of_the_pictures_of_their_captions_are_as_precise_as_other_pictures_would_be() -> None:
    real = normal(300, 5)
    fresh = precision_and_recall(real, normal(300, 5, seed=1))

    copied = precision_and_recall(real, real, made_for=torch.arange(300))

    for mine, others in zip(copied, fresh, strict=True):
        assert mine.value < 1 and mine.value == pytest.approx(others.value, abs=0.07)


def test_a_dropped_class_lowers_recall_and_strange_pictures_lower_precision() -> None:
    two_classes = torch.cat([normal(50, 3), normal(50, 3, seed=1) + 20])

    dropped = precision_and_recall(two_classes, normal(100, 3, seed=2))
    strange = precision_and_recall(two_classes, torch.cat([two_classes[::2], normal(50, 3, seed=3) - 20]))

    assert dropped[0].value > 0.8 and dropped[1].value < 0.5
    assert strange[0].value == pytest.approx(0.5, abs=0.02)
    assert [each.value for each in precision_and_recall(two_classes, two_classes)] == [1, 1]
    with pytest.raises(ValueError, match=r"^3 sampled pictures are too few for precision and recall: 4 are needed$"):
        precision_and_recall(two_classes, two_classes[:3])


def test_a_copy_is_found_through_brightness_and_contrast_and_only_a_copy() -> None:
    training = normal(29, 1, 7, 5)
    sampled = torch.cat([0.3 * training[11:12] + 0.2, normal(2, 1, 7, 5, seed=1), torch.full((1, 1, 7, 5), -1.0)])

    nearest = nearest_pictures(sampled, training, chunk=3)

    assert nearest.index[0] == 11
    assert nearest.correlation[0].item() == pytest.approx(1, abs=1e-6)
    assert (nearest.correlation[1:] < 0.9).all() and nearest.correlation[3] == 0
    assert copy_rate(nearest).value == pytest.approx(1 / 4)


def test_the_nearest_pictures_are_the_same_in_chunks_of_any_size() -> None:
    training = normal(53, 1, 5, 7)
    training[41] = training[12]  # of two that are the same the first is taken
    pictures = torch.cat([training[[12, 30]] + 0.1 * normal(2, 1, 5, 7, seed=1), normal(5, 1, 5, 7, seed=2)])
    own = torch.tensor([-1, 30, -1, 52, 0, -1, 7])

    whole = nearest_pictures(pictures, training, own=own, chunk=53)

    for chunk in (1, 7, 52, None):
        nearest = nearest_pictures(pictures, iter(training), own=own, chunk=chunk)
        assert torch.equal(nearest.index, whole.index)
        torch.testing.assert_close(nearest.correlation, whole.correlation)
    assert whole.index[0] == 12 and whole.index[1] != 30
    with pytest.raises(ValueError, match="no pictures among which"):
        nearest_pictures(pictures, [])


def test_pictures_taken_from_the_others_are_not_their_own_neighbours() -> None:
    pictures = normal(11, 1, 5, 7)
    pictures[8] = pictures[3]

    nearest = nearest_pictures(pictures, pictures, own=torch.arange(11), chunk=4)

    assert (nearest.index != torch.arange(11)).all()
    assert (nearest.index[3], nearest.index[8]) == (8, 3)
    assert copy_rate(nearest).value == pytest.approx(2 / 11)


def test_the_own_caption_is_found_when_it_is_best_and_by_chance_otherwise() -> None:
    own = torch.arange(300) % 137
    perfect = torch.nn.functional.one_hot(own, 137).double()

    assert found_among(perfect, own).all()
    assert not found_among(-perfect, own).any()
    assert not found_among(torch.zeros(300, 137), own).any()  # says the same of all
    chance = found_among(normal(3000, 137), torch.arange(3000) % 137, candidates=10)
    assert chance.double().mean().item() == pytest.approx(0.1, abs=0.02)


def test_the_other_candidates_are_never_the_own_caption_and_repeat_with_the_seed() -> None:
    similarity, own = normal(50, 13), torch.arange(50) % 13
    best = similarity.argmax(dim=1) == own

    assert torch.equal(found_among(similarity, own, candidates=13), best)
    once = found_among(similarity, own, candidates=5, seed=1)
    assert torch.equal(once, found_among(similarity, own, candidates=5, seed=1))
    with pytest.raises(ValueError, match=r"^13 different captions are too few to find one among 100$"):
        found_among(similarity, own)


def test_who_does_not_look_at_the_pictures_finds_the_frequent_captions() -> None:
    assert blind_share([1] * 137, [0, 5]) == pytest.approx(1 / 100)

    times = torch.tensor([40] + [7] * 3 + [2] * 30 + [1] * 103)
    own = torch.arange(137).repeat_interleave(times)
    generator = torch.Generator().manual_seed(0)
    found = []
    for seed in range(30):
        prior = times + 0.5 * torch.rand(137, generator=generator)  # of equally frequent ones any
        found.append(found_among(prior.expand(len(own), -1), own, seed=seed).double().mean().item())

    expected = blind_share(times.tolist(), own.tolist())
    assert expected == pytest.approx(sum(found) / 30, abs=0.005) and expected > 0.1

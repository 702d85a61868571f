"""Each measure against its definition written out, and what it must and must not see."""

import pytest
import torch
from torch import Tensor

from unet_attn.measures import (
    Estimate,
    copy_rate,
    found_among,
    frechet_error,
    gaussian_distance,
    kernel_error,
    mean_with_error,
    nearest_pictures,
    precision_and_recall,
    resample_counts,
)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def drawn_again(values: list[Tensor], counts: list[Tensor]) -> list[Tensor]:
    return [each.repeat_interleave(count.long(), dim=0) for each, count in zip(values, counts, strict=True)]


def test_a_resample_draws_as_many_as_there_are_and_repeats_with_its_seed() -> None:
    counts = resample_counts(13, 5, resamples=17)

    assert counts.shape == (17, 13) and (counts.sum(dim=1) == 13).all()
    assert torch.equal(counts, resample_counts(13, 5, resamples=17))
    assert not torch.equal(counts, resample_counts(13, 6, resamples=17))


def test_the_error_of_a_mean_is_its_known_standard_error() -> None:
    estimate = mean_with_error(torch.tensor([1.0] * 30 + [0.0] * 70))

    assert estimate.value == pytest.approx(0.3)
    assert estimate.error == pytest.approx((0.3 * 0.7 / 100) ** 0.5, rel=0.15)
    with pytest.raises(ValueError, match="no values"):
        mean_with_error(torch.zeros(0))


def test_the_error_of_kid_is_the_spread_of_kid_over_new_draws() -> None:
    def kid(real: Tensor, sampled: Tensor) -> Tensor:
        def mean_kernel(a: Tensor, b: Tensor) -> Tensor:
            kernel = (a @ b.T / a.shape[1] + 1) ** 3
            return (kernel.sum() - kernel.diag().sum()) / (len(a) * (len(a) - 1)) if a is b else kernel.mean()

        return mean_kernel(real, real) + mean_kernel(sampled, sampled) - 2 * mean_kernel(real, sampled)

    truth = torch.stack([kid(normal(101, 5, seed=2 * n), normal(89, 5, seed=2 * n + 1) + 0.5) for n in range(200)])

    error = kernel_error(normal(101, 5, seed=1000), normal(89, 5, seed=1001) + 0.5)

    assert error == pytest.approx(truth.std().item(), rel=0.35)  # one set's own spread stands for that of all


def test_the_gaussian_distance_is_heusels_with_fewer_pictures_than_features_too() -> None:
    for count in (7, 31):
        real, sampled = normal(count, 11), 1.5 * normal(count, 11, seed=1) + 0.3
        a, b = real.T.cov(), sampled.T.cov()
        root = torch.linalg.eigvals(a @ b).real.clamp(min=0).sqrt().sum()
        expected = (real.mean(0) - sampled.mean(0)).square().sum() + a.trace() + b.trace() - 2 * root

        assert gaussian_distance(real, sampled) == pytest.approx(expected.item(), rel=1e-5)
        assert gaussian_distance(real, real) == pytest.approx(0, abs=1e-9)


def test_counts_in_the_gaussian_distance_are_repeated_pictures() -> None:
    real, sampled = normal(23, 5), normal(19, 5, seed=1)
    counts = [resample_counts(23, 0, resamples=1)[0], resample_counts(19, 1, resamples=1)[0]]

    weighed = gaussian_distance(real, sampled, *counts)

    assert weighed == pytest.approx(gaussian_distance(*drawn_again([real, sampled], counts)), rel=1e-9)


def test_the_error_of_the_frechet_distance_falls_with_the_number_of_pictures() -> None:
    few, many = (frechet_error(normal(n, 5), normal(n, 5, seed=1) + 1, resamples=100) for n in (50, 800))

    assert few / many == pytest.approx(4, rel=0.5)  # as 1 / sqrt(n)


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


def test_a_dropped_class_lowers_recall_and_strange_pictures_lower_precision() -> None:
    two_classes = torch.cat([normal(50, 3), normal(50, 3, seed=1) + 20])

    dropped = precision_and_recall(two_classes, normal(100, 3, seed=2))
    strange = precision_and_recall(two_classes, torch.cat([two_classes[::2], normal(50, 3, seed=3) - 20]))

    assert dropped[0].value > 0.8 and dropped[1].value < 0.5
    assert strange[0].value == pytest.approx(0.5, abs=0.02)
    assert precision_and_recall(two_classes, two_classes) == (Estimate(1, 0), Estimate(1, 0))
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

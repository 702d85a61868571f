"""Measures of sampled pictures as functions of feature matrices: no network, no files, no randomness but the seed's.

Letters: N pictures, M others, F features. What each can and cannot tell: docs/evaluation.md.
"""

from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

RESAMPLES = 200  # of a cheap statistic: its error bar is then right to 5 percent
NEIGHBOURS = 3  # Kynkaanniemi et al. 2019, section 3
CANDIDATES = 100  # captions among which the true one is to be found
# Correlation of the pixels from which on a picture is a near copy. Icons of one family that differ in a detail, "lock"
# and "lock open", reach 0.97.
COPY_CORRELATION = 0.98
CHUNK_NUMBERS = 1 << 24  # 64 MB of float32


class Estimate(NamedTuple):
    """A measured value and its standard error."""

    value: float
    error: float


def mean_with_error(values: Tensor, *, seed: int = 0) -> Estimate:
    """Mean of N values, with the bootstrap's standard error: Efron 1979, the spread over resampled sets. values: (N,).

    Raises ValueError if there is none.
    """
    if not len(values):
        raise ValueError("there are no values to average")
    values = values.double()
    return Estimate(values.mean().item(), (resample_counts(len(values), seed) @ values / len(values)).std().item())


def resample_counts(size: int, seed: int, *, resamples: int = RESAMPLES) -> Tensor:
    """How often each of `size` pictures is drawn, when `size` are drawn with replacement: (resamples, size) float64."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(size, (resamples, size), generator=generator)
    return torch.zeros(resamples, size, dtype=torch.float64).scatter_add_(
        1, drawn, torch.ones(drawn.shape, dtype=torch.float64)
    )


def kernel_error(real: Tensor, sampled: Tensor, *, seed: int = 0) -> float:
    """The bootstrap's standard error of KID. real: (N, F); sampled: (M, F).

    Both sides are drawn again with replacement; a pair of twins, two draws of one picture, is left out of the means, so
    that a resampled value is as unbiased as the estimate itself (Binkowski et al. 2018, eq. 4).
    """
    real, sampled = real.double(), sampled.double()
    a, b = resample_counts(len(real), seed), resample_counts(len(sampled), seed + 1)
    within = [_mean_of_pairs(w, _cubic(x, x)) for w, x in ((a, real), (b, sampled))]
    across = ((a @ _cubic(real, sampled)) * b).sum(dim=1) / (len(real) * len(sampled))
    return (within[0] + within[1] - 2 * across).std().item()


def _cubic(a: Tensor, b: Tensor) -> Tensor:
    return (a @ b.T / a.shape[1] + 1) ** 3


def _mean_of_pairs(weights: Tensor, kernel: Tensor) -> Tensor:
    """The weighted mean of the kernel over pairs of different pictures, for each resample. weights: (R, N)."""
    kernel = kernel - kernel.diag().diag()
    pairs = weights.sum(dim=1).square() - weights.square().sum(dim=1)
    return ((weights @ kernel) * weights).sum(dim=1) / pairs


def gaussian_distance(
    real: Tensor, sampled: Tensor, real_counts: Tensor | None = None, sampled_counts: Tensor | None = None
) -> float:
    """Frechet distance of the Gaussians fitted to two sets, each picture counted `counts` times: Heusel 2017, eq. 6.

    real: (N, F); sampled: (M, F); counts: (N,) and (M,). With A and B the centred sets, the trace of
    (C_a C_b)^(1/2) is the sum of the singular values of A B^T, which is small where N and M are.
    """
    (mean_a, a), (mean_b, b) = _centred(real, real_counts), _centred(sampled, sampled_counts)
    overlap = torch.linalg.svdvals(a @ b.T).sum()
    return ((mean_a - mean_b).square().sum() + a.square().sum() + b.square().sum() - 2 * overlap).item()


def _centred(features: Tensor, counts: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean (F,) and (N, F) whose Gram matrix over the features is the covariance."""
    features = features.double()
    counts = torch.ones(len(features), dtype=torch.float64) if counts is None else counts
    mean = counts @ features / counts.sum()
    return mean, (counts / (counts.sum() - 1)).sqrt()[:, None] * (features - mean)


def frechet_error(real: Tensor, sampled: Tensor, *, resamples: int = 20, seed: int = 0) -> float:
    """The bootstrap's standard error of the Frechet distance, right to a sixth at 20 resamples.

    The resampled values themselves lie above the distance, since they hold fewer different pictures: only their spread
    means something.
    """
    a = resample_counts(len(real), seed, resamples=resamples)
    b = resample_counts(len(sampled), seed + 1, resamples=resamples)
    return torch.tensor([gaussian_distance(real, sampled, *pair) for pair in zip(a, b, strict=True)]).std().item()


def precision_and_recall(
    real: Tensor, sampled: Tensor, *, neighbours: int = NEIGHBOURS, seed: int = 0
) -> tuple[Estimate, Estimate]:
    """Precision: the share of sampled pictures within the real ones' manifold; recall: the other way round.

    The manifold of a set is the union of the balls about its features, each as wide as the distance to its
    `neighbours`-th neighbour (Kynkaanniemi et al. 2019, eq. 1 and 2). Both depend on the counts: compare equal ones.
    The error bars hold the manifold fixed and draw the judged pictures again.
    Raises ValueError if a set has no more pictures than `neighbours`.
    """
    for side, features in (("real", real), ("sampled", sampled)):
        if len(features) <= neighbours:
            needed = f"precision and recall: {neighbours + 1} are needed"
            raise ValueError(f"{len(features)} {side} pictures are too few for {needed}")
    real, sampled = real.double(), sampled.double()
    between = torch.cdist(real, sampled)
    # the nearest of all is the picture itself
    real_radius, sampled_radius = (
        torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").kthvalue(neighbours + 1, dim=1).values
        for x in (real, sampled)
    )
    precision = (between <= real_radius[:, None]).any(dim=0)
    recall = (between <= sampled_radius[None, :]).any(dim=1)
    return mean_with_error(precision, seed=seed), mean_with_error(recall, seed=seed)


class Nearest(NamedTuple):
    """For each of N pictures its most similar one of another set: the correlation, (N,), and which it is, (N,)."""

    correlation: Tensor
    index: Tensor


def nearest_pictures(
    pictures: Tensor, others: Iterable[Tensor], *, own: Tensor | None = None, chunk: int | None = None
) -> Nearest:
    """The picture among `others`, M of (C, H, W), whose pixels correlate most with each of `pictures` (N, C, H, W).

    Correlation ignores brightness and contrast, and a few pixels weigh as much in a drawing with little ink as in a
    full one. A picture of one even colour correlates with nothing. own: (N,), where each picture stands among the
    others, for pictures that were taken from them and are not their own neighbours; -1 = was not taken from them.

    The others are held `chunk` at a time, by default as many as fit into CHUNK_NUMBERS numbers: memory does not grow
    with M. Of several that correlate the same the first is taken. Raises ValueError if there is none.
    """
    if chunk is None:
        chunk = max(1, CHUNK_NUMBERS // max(len(pictures), pictures[0].numel()))
    places = torch.arange(len(pictures))
    pictures = _standardised(pictures)
    best = Nearest(torch.full((len(pictures),), -torch.inf), torch.full((len(pictures),), -1))
    remaining, first = iter(others), 0
    while some := list(islice(remaining, chunk)):
        correlation = pictures @ _standardised(torch.stack(some)).T
        if own is not None:
            here = (own >= first) & (own < first + len(some))
            correlation[places[here], own[here] - first] = -torch.inf
        found = correlation.max(dim=1)
        better = found.values > best.correlation
        best = Nearest(
            torch.where(better, found.values, best.correlation), torch.where(better, found.indices + first, best.index)
        )
        first += len(some)
    if not first:
        raise ValueError("there are no pictures among which to look for the nearest")
    return best


def _standardised(pictures: Tensor) -> Tensor:
    """(N, C, H, W) to (N, C H W) float32 with mean 0 and length 1; an even picture becomes 0."""
    flat = pictures.flatten(1).float()
    flat = flat - flat.mean(dim=1, keepdim=True)
    length = flat.norm(dim=1, keepdim=True)
    return torch.where(length > 1e-3, flat / length.clamp(min=1e-3), 0.0)


def copy_rate(nearest: Nearest, *, seed: int = 0) -> Estimate:
    """The share of near copies, those whose correlation is at least COPY_CORRELATION."""
    return mean_with_error(nearest.correlation >= COPY_CORRELATION, seed=seed)


def found_among(similarity: Tensor, own: Tensor, *, candidates: int = CANDIDATES, seed: int = 0) -> Tensor:
    """Whether each picture's own caption is the best of `candidates`, the others drawn from M different captions.

    similarity: (N, M) of picture and caption; own: (N,), the number of each picture's own caption. A tie with another
    caption is a miss, so that a judge who says the same of all finds nothing. Returns (N,) bool.
    Raises ValueError if there are fewer captions than candidates.
    """
    size = similarity.shape[1]
    check_candidates(size, candidates=candidates)
    generator = torch.Generator().manual_seed(seed)
    found = []
    for scores, mine in zip(similarity, own.tolist(), strict=True):
        drawn = torch.randperm(size - 1, generator=generator)[: candidates - 1]
        others = drawn + (drawn >= mine)  # all numbers but the own one
        found.append(bool((scores[mine] > scores[others]).all()))
    return torch.tensor(found)


def check_candidates(captions: int, *, candidates: int = CANDIDATES) -> None:
    """Raise ValueError if there are fewer different captions than one is to be found among."""
    if captions < candidates:
        raise ValueError(f"{captions} different captions are too few to find one among {candidates}")

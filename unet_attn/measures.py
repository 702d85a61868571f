"""Measures of sampled pictures as functions of feature matrices: no network, no files, no randomness but the seed's.

Letters: N pictures, M others, F features. What each can and cannot tell: docs/evaluation.md.

made_for, (M,), says of which picture each sampled one has the caption: a row of the real ones, or a number from N on
for a picture that is not among them. The two are not independent of each other, however well the model learned, and are
never held against each other; nor are two sampled for one picture. None = sampled without captions.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from math import comb, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

RESAMPLES = 200  # of a cheap statistic: its error bar is then right to 5 percent
NEIGHBOURS = 3  # Kynkaanniemi et al. 2019, section 3
CANDIDATES = 100  # captions among which the true one is to be found
# Correlation of the pixels from which on a picture is a near copy. A drawing that differs in a detail may lie above it
# too, as "lock" and "lock open" do (0.984 to 0.989), so a rate of copies means something only beside that of the
# training pictures among one another: of the icons 0.12.
COPY_CORRELATION = 0.98
CHUNK_NUMBERS = 1 << 24  # 64 MB of float32
BLOCK_NUMBERS = 1 << 22  # of a matrix of pairs, at a time: 32 MB of float64
MOST_FOR_SPREAD = 1000  # pictures for the mean square of a kernel over pairs: it needs no more


class Estimate(NamedTuple):
    """A measured value and its standard error."""

    value: float
    error: float


def mean_with_error(values: Tensor, *, seed: int = 0) -> Estimate:
    """Mean of N values, with the bootstrap's standard error: Efron 1979, the spread over resampled sets. values: (N,).

    If they are bool the mean is a share, see share_with_error. Raises ValueError if there is none.
    """
    if not len(values):
        raise ValueError("there are no values to average")
    if values.dtype == torch.bool:
        return share_with_error(values)
    values = values.double()
    return Estimate(values.mean().item(), (resample_counts(len(values), seed) @ values / len(values)).std().item())


def share_with_error(found: Tensor) -> Estimate:
    """The share of what is true, with half the width of Wilson's interval of one standard error. found: (N,) bool.

    Wilson 1927: other than the bootstrap it is not 0 where all say the same, for which few pictures are no proof.
    """
    count, share = len(found), found.double().mean().item()
    return Estimate(share, sqrt(share * (1 - share) / count + 1 / (4 * count**2)) / (1 + 1 / count))


def resample_counts(size: int, seed: int, *, resamples: int = RESAMPLES) -> Tensor:
    """How often each of `size` pictures is drawn, when `size` are drawn with replacement: (resamples, size) float64."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(size, (resamples, size), generator=generator)
    return torch.zeros(resamples, size, dtype=torch.float64).scatter_add_(
        1, drawn, torch.ones(drawn.shape, dtype=torch.float64)
    )


# ----------------------------------------------------------------------------------------------------------- distances


def kernel_distance(real: Tensor, sampled: Tensor, *, made_for: Tensor | None = None) -> Estimate:
    """KID: the unbiased squared MMD with the kernel k(x, y) = (x y / F + 1)^3; Binkowski et al. 2018, eq. 4.

    real: (N, F); sampled: (M, F). Its expected value does not depend on N and M and is 0 for equal distributions, so
    that single values may be negative.

    The error is that of a U-statistic by Hoeffding's decomposition. With J the sum of squares of what each picture adds
    (the jackknife) and D the variance of what is left of the kernel without its row and column means, the expected J is
    the variance plus D: near 0, where the first order vanishes, it is twice the variance.
    """
    real, sampled = real.double(), sampled.double()
    count, others = len(real), len(sampled)
    own = torch.arange(count)
    given = torch.arange(count, count + others) if made_for is None else made_for

    within, within_sampled = _kernel_sums(real, own, real, own), _kernel_sums(sampled, given, sampled, given)
    across, back = _kernel_sums(real, own, sampled, given), _kernel_sums(sampled, given, real, own)
    value = sum(
        sign * sums.sum() / pairs.sum() for sign, (sums, pairs) in ((1, within), (1, within_sampled), (-2, across))
    )

    # a picture and what was sampled for it are drawn together
    added = torch.zeros(1 + int(max(own.max(), given.max())), dtype=torch.float64)
    for places, size, (sums, pairs), (cross, cross_pairs) in (
        (own, count, within, across),
        (given, others, within_sampled, back),
    ):
        influence = sums / pairs - cross / cross_pairs
        added.index_add_(0, places, 2 / size * (influence - influence.mean()))
    jackknife = added.square().sum()
    rest = _rest_of_kernel(real, sampled, made_for)
    return Estimate(value.item(), torch.maximum(jackknife - rest, rest).sqrt().item())


def _kernel_sums(a: Tensor, own_a: Tensor, b: Tensor, own_b: Tensor) -> tuple[Tensor, Tensor]:
    """For each of `a`, (A, F), the sum of the kernel over those of `b` that have another number, and how many: (A,)."""
    sums, pairs = [], []
    for rows in _row_blocks(len(a), len(b)):
        apart = own_a[rows, None] != own_b[None, :]
        sums.append((_cubic(a[rows], b) * apart).sum(dim=1))
        pairs.append(apart.sum(dim=1))
    return torch.cat(sums), torch.cat(pairs)


def _row_blocks(rows: int, columns: int) -> Iterator[slice]:
    """Slices of the rows of a matrix of pairs, each of which fits into memory."""
    height = max(1, BLOCK_NUMBERS // columns)
    for first in range(0, rows, height):
        yield slice(first, first + height)


def _cubic(a: Tensor, b: Tensor) -> Tensor:
    return (a @ b.T / a.shape[1] + 1) ** 3


def _rest_of_kernel(real: Tensor, sampled: Tensor, made_for: Tensor | None) -> Tensor:
    """The variance that KID has of the kernel without row and column means, estimated from at most 1,000 pictures."""
    count, given = len(real), torch.arange(len(sampled)) if made_for is None else made_for
    captions, inverse = given.unique(return_inverse=True)
    others = len(captions)  # of several pictures for one caption the mean counts
    together = 0 if made_for is None else int((captions < count).sum())

    size = min(together or min(count, others), MOST_FOR_SPREAD)
    chosen = torch.arange(size) * (together or others) // size  # captions are sorted, those among the real ones first
    x = real[captions[chosen] if together else torch.arange(size) * count // size]
    members = (inverse[None, :] == chosen[:, None]).double()
    some = members.any(dim=0)
    y, share = sampled[some], (members / members.sum(dim=1, keepdim=True))[:, some]

    def square(kernel: Tensor) -> Tensor:
        return kernel.square().sum() / (size * (size - 3))  # as many degrees of freedom are left

    kernel_y = sum(share[:, rows] @ (_cubic(y[rows], y) @ share.T) for rows in _row_blocks(len(y), len(y)))
    a = _without_means(_cubic(x, x)) / count**2
    b = _without_means(kernel_y) / others**2
    c = _without_means(_cubic(x, y) @ share.T) / (count * others)
    alone = count**2 * square(a) + others**2 * square(b) + 2 * count * others * square(c)
    # of two captions with a real and a sampled picture each, the four kernels are not independent
    joint = square(a + b - c - c.T) - square(a) - square(b) - 2 * square(c)
    return (2 * (alone + together**2 * joint)).clamp(min=0)


def _without_means(kernel: Tensor) -> Tensor:
    """(N, N) without its diagonal and the means of its rows and columns."""
    off = kernel - kernel.diag().diag()
    others = len(off) - 1
    rest = off - off.sum(dim=1, keepdim=True) / others - off.sum(dim=0) / others + off.sum() / (others * len(off))
    return rest - rest.diag().diag()


def gaussian_distance(real: Tensor, sampled: Tensor, *, made_for: Tensor | None = None) -> Estimate:
    """Frechet distance of the Gaussians fitted to two sets of features: Heusel et al. 2017, eq. 6.

    real: (N, F); sampled: (M, F). With A and B the centred sets, the trace of (C_a C_b)^(1/2) is the sum of the
    singular values of A B^T.

    The error is that of the infinitesimal jackknife (Efron 1982, chapter 6): the sum of squares of the derivatives by
    each picture's weight, all of which one singular value decomposition gives. Near 0 it is up to 1.4 times too large.
    """
    (mean_a, a), (mean_b, b) = _centred(real), _centred(sampled)
    (turn_a, small_a), (turn_b, small_b) = _fewer_rows(a), _fewer_rows(b)
    left, values, right = torch.linalg.svd(small_a @ small_b.T, full_matrices=False)
    apart = mean_a - mean_b
    value = apart.square().sum() + a.square().sum() + b.square().sum() - 2 * values.sum()

    own = torch.arange(len(a))
    given = torch.arange(len(a), len(a) + len(b)) if made_for is None else made_for
    added = torch.zeros(1 + int(max(own.max(), given.max())), dtype=torch.float64)
    for places, centred, turned, sign in ((own, a, turn_a(left), 1), (given, b, turn_b(right.T), -1)):
        influence = centred.square().sum(dim=1) - turned.square() @ values
        influence += sign * 2 * (centred @ apart) / sqrt(len(centred))
        added.index_add_(0, places, influence - influence.mean())
    return Estimate(value.item(), added.square().sum().sqrt().item())


def _centred(features: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (F,) and (N, F) whose Gram matrix over the features is the covariance."""
    features = features.double()
    mean = features.mean(dim=0)
    return mean, (features - mean) / sqrt(len(features) - 1)


def _fewer_rows(centred: Tensor) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """As many rows as features where there are more, with what turns vectors of those into vectors of all."""
    if len(centred) <= centred.shape[1]:
        return (lambda vectors: vectors), centred
    turn, small = torch.linalg.qr(centred)
    return (lambda vectors: turn @ vectors), small


def precision_and_recall(
    real: Tensor, sampled: Tensor, *, made_for: Tensor | None = None, neighbours: int = NEIGHBOURS
) -> tuple[Estimate, Estimate]:
    """Precision: the share of sampled pictures within the real ones' manifold; recall: the other way round.

    The manifold of a set is the union of the balls about its features, each as wide as the distance to its
    `neighbours`-th neighbour (Kynkaanniemi et al. 2019, eq. 1 and 2). Both depend on the counts: compare equal ones.
    The error bars hold the manifold fixed.
    Raises ValueError if a set has no more pictures than `neighbours`.
    """
    for side, features in (("real", real), ("sampled", sampled)):
        if len(features) <= neighbours:
            needed = f"precision and recall: {neighbours + 1} are needed"
            raise ValueError(f"{len(features)} {side} pictures are too few for {needed}")
    real, sampled = real.double(), sampled.double()
    real_radius, sampled_radius = (_radii(x, neighbours) for x in (real, sampled))
    recall, precision = [], torch.zeros(len(sampled), dtype=torch.bool)
    for rows in _row_blocks(len(real), len(sampled)):
        between = torch.cdist(real[rows], sampled)
        if made_for is not None:
            numbers = torch.arange(len(real))[rows]
            between[numbers[:, None] == made_for[None, :]] = torch.inf
        precision |= (between <= real_radius[rows, None]).any(dim=0)
        recall.append((between <= sampled_radius[None, :]).any(dim=1))
    return share_with_error(precision), share_with_error(torch.cat(recall))


def _radii(features: Tensor, neighbours: int) -> Tensor:
    """The distance of each picture to its neighbour of that rank: (N, F) to (N,)."""
    radii = []
    for rows in _row_blocks(len(features), len(features)):
        distances = torch.cdist(features[rows], features)
        distances[torch.arange(len(distances)), torch.arange(len(features))[rows]] = (
            0  # exactly, as it may not come out
        )
        radii.append(distances.kthvalue(neighbours + 1, dim=1).values)  # the nearest of all is the picture itself
    return torch.cat(radii)


# ------------------------------------------------------------------------------------------------------- near copies


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


def copy_rate(nearest: Nearest) -> Estimate:
    """The share of near copies, those whose correlation is at least COPY_CORRELATION."""
    return share_with_error(nearest.correlation >= COPY_CORRELATION)


def difference(one: Estimate, other: Estimate) -> Estimate:
    """`one` less `other`, of different pictures."""
    return Estimate(one.value - other.value, sqrt(one.error**2 + other.error**2))


# ----------------------------------------------------------------------------------------------------------- captions


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


def blind_share(times: Sequence[int], own: Sequence[int], *, candidates: int = CANDIDATES) -> float:
    """The share of captions that are found without looking at the pictures, by whoever says the most frequent one.

    times: how often each of M different captions occurs; own: the number of each picture's own caption. It is 1 in
    `candidates` where all occur equally often. Of captions that occur equally often any is said.
    """
    draws = candidates - 1
    ways = comb(len(times) - 1, draws)

    def found(mine: int) -> float:
        less = sum(each < mine for each in times)
        equal = sum(each == mine for each in times)
        # the mean over the ranks among the equal ones of comb(less + rank, draws) / ways, by the hockey-stick identity
        return (comb(less + equal, candidates) - comb(less, candidates)) / (equal * ways)

    chances = {mine: found(mine) for mine in {times[number] for number in own}}
    return sum(chances[times[number]] for number in own) / len(own)


def check_candidates(captions: int, *, candidates: int = CANDIDATES) -> None:
    """Raise ValueError if there are fewer different captions than one is to be found among."""
    if captions < candidates:
        raise ValueError(f"{captions} different captions are too few to find one among {candidates}")

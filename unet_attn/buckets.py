"""Shapes for pictures that are not square: a few sizes of nearly one area, so that a batch of any costs the same."""

from math import log

MAX_ASPECT = 4  # of a bucket; a longer strip is cut to it


def bucket_sizes(resolution: int, multiple_of: int) -> list[tuple[int, int]]:
    """(width, height) of the buckets, from the highest to the widest, the square in the middle.

    All sides are multiples of `multiple_of`; to each shorter side belongs the longer one that comes nearest to an area
    of resolution^2. Raises ValueError if resolution is no such multiple itself.
    """
    if resolution % multiple_of:
        raise ValueError(
            f"with data.buckets, data.resolution must be a multiple of {multiple_of} (the U-Net's downsample_factor), "
            f"got {resolution}"
        )
    sizes = {(resolution, resolution)}
    for short in range(multiple_of, resolution, multiple_of):
        long = round(resolution**2 / short / multiple_of) * multiple_of
        if long <= MAX_ASPECT * short:
            sizes |= {(short, long), (long, short)}
    return sorted(sizes, key=lambda size: size[0] / size[1])


def nearest_bucket(size: tuple[int, int], buckets: list[tuple[int, int]]) -> int:
    """Number of the bucket whose shape is nearest to the picture's, by the ratio of the ratios."""
    wanted = log(size[0] / size[1])
    return min(range(len(buckets)), key=lambda number: abs(log(buckets[number][0] / buckets[number][1]) - wanted))

"""Bucket sizes: multiples of what the U-Net needs, of nearly one area, and a place for every shape."""

import pytest

from unet_attn.buckets import bucket_sizes, nearest_bucket


@pytest.mark.parametrize(("resolution", "multiple_of"), [(32, 8), (24, 4), (64, 8), (35, 7), (256, 16)])
def test_buckets_are_multiples_of_nearly_one_area(resolution: int, multiple_of: int) -> None:
    sizes = bucket_sizes(resolution, multiple_of)

    assert (resolution, resolution) in sizes and len(sizes) == len(set(sizes)) > 2
    for width, height in sizes:
        assert width % multiple_of == height % multiple_of == 0
        assert abs(width * height / resolution**2 - 1) < 0.21
        assert (height, width) in sizes and max(width, height) <= 4 * min(width, height)


def test_the_buckets_of_a_small_run_are_known() -> None:
    assert bucket_sizes(32, 8) == [(16, 64), (24, 40), (32, 32), (40, 24), (64, 16)]


def test_every_shape_goes_to_the_nearest() -> None:
    sizes = bucket_sizes(32, 8)
    nearest = {
        size: sizes[nearest_bucket(size, sizes)] for size in [(3, 3), (40, 30), (4, 3), (9, 2), (1, 900), (2, 3)]
    }

    assert nearest == {
        (3, 3): (32, 32),
        (40, 30): (40, 24),
        (4, 3): (40, 24),
        (9, 2): (64, 16),
        (1, 900): (16, 64),
        (2, 3): (24, 40),
    }


def test_a_resolution_that_the_network_cannot_have_is_refused() -> None:
    with pytest.raises(ValueError, match=r"resolution must be a multiple of 8 .* got 20"):
        bucket_sizes(20, 8)

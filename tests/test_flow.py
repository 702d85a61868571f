"""The velocity that a predicted picture stands for."""

import pytest
import torch
from test_objective import pictures
from torch.testing import assert_close

from unet_attn.flow import LEAST_TIME, velocity_from_clean


def test_the_clean_picture_stands_for_the_velocity_from_it_to_the_noise():
    clean, noise = pictures()
    time = torch.tensor([0.002, 0.05, 0.31, 0.8, 1.0])[:, None, None, None]
    noisy = (1 - time) * clean + time * noise
    velocity = velocity_from_clean(noisy, clean, 1000 * time.flatten())
    assert_close(velocity, noise - clean, rtol=0, atol=2e-4)  # x_t is rounded to float32, then divided by t


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_finite_at_time_zero_and_has_the_dtype_of_its_input(dtype):
    noisy = torch.full((2, 1, 3, 5), 1.5, dtype=dtype)
    velocity = velocity_from_clean(noisy, torch.ones_like(noisy), torch.tensor([0, 1]))
    assert velocity.dtype == dtype
    assert_close(velocity, torch.full_like(noisy, 0.5 / LEAST_TIME))

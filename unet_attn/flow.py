"""The straight way from a picture x to noise n, x_t = (1 - t) x + t n (Liu et al. 2022; Lipman et al. 2022).

Its velocity is n - x. As x_t - x = t (n - x), a network that sees x in x_t knows the velocity too.
"""

from torch import Tensor

FLOW_TIME_SCALE = 1000.0  # a flow network is given 1000 t: the range that the time embedding is made for
LEAST_TIME = 1e-3  # what is left of the noise below it cannot be seen in 8 bits


def velocity_from_clean(noisy: Tensor, clean: Tensor, timestep: Tensor) -> Tensor:
    """The velocity that a predicted picture stands for, (x_t - x) / t (Li & He 2025, table 1, with t = 1 the noise).

    noisy, clean: x_t and x (B, C, H, W); timestep: 1000 t (B,). Returns (B, C, H, W) in the dtype of x_t; the quotient
    is taken in float32. Below LEAST_TIME it is divided by that, so that it is finite at t = 0 too.
    """
    time = (timestep.float() / FLOW_TIME_SCALE).clamp(min=LEAST_TIME)
    difference = noisy.float() - clean.float()
    return (difference / time.reshape(-1, *[1] * (noisy.ndim - 1))).to(noisy.dtype)

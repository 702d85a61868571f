"""How much an error costs at each noise level: fixed weights by the signal-to-noise ratio, and a learned one.

A fixed weight is that of the clean picture's squared error, so that it means the same whatever the network predicts;
SNR = alpha^2 / sigma^2 of x_t = alpha x + sigma n. Letters: B batch.
"""

import torch
from torch import Tensor, nn

from unet_attn.blocks import sinusoidal_embedding

SNR_GAMMA = 5.0  # Hang et al. 2023, section 4: 5 in all their experiments; the soft weight ends at the same height
CLEAN_FLOOR = 0.05  # Li & He 2025, section 4: the least t by which they divide


def min_snr(snr: Tensor) -> Tensor:
    """min(SNR, gamma): Hang et al. 2023, https://arxiv.org/abs/2303.09556, eq. 8. (B,) to (B,)."""
    return snr.clamp(max=SNR_GAMMA)


def soft_min_snr(snr: Tensor) -> Tensor:
    """1 / (sigma^2 + 1 / gamma) where alpha is 1: Crowson et al. 2024, https://arxiv.org/abs/2401.11605. (B,) to (B,).

    With sigma^2 = 1 / SNR it is SNR gamma / (SNR + gamma): min_snr without the corner.
    """
    return snr * SNR_GAMMA / (snr + SNR_GAMMA)


def clipped_velocity(sigma: Tensor) -> Tensor:
    """The weight of a velocity that is (x_t - x) / t, which makes of t, where it is small, CLEAN_FLOOR. (B,) to (B,).

    Li & He 2025, https://arxiv.org/abs/2511.13720, divide by max(t, 0.05) in loss and sampling alike. Here the loss is
    theirs, while the velocity stays right at small times, so that every scheduler ends at the clean picture.
    """
    return (sigma / CLEAN_FLOOR).clamp(max=1.0).square()


def uncertain_loss(loss: Tensor, log_variance: Tensor) -> Tensor:
    """L / exp(u) + u, which can be below 0. It is least at u = ln L, where all noise levels count the same.

    Karras et al. 2024, https://arxiv.org/abs/2312.02696, after Kendall et al. 2018, https://arxiv.org/abs/1705.07115.
    loss, log_variance: L and u (B,). Returns (B,).
    """
    return loss * torch.exp(-log_variance) + log_variance


class NoiseUncertainty(nn.Module):
    """u(timestep), the logarithm of the loss to expect at a noise level, learned beside the network.

    As in Karras et al. 2024 it is linear in sinusoids of the noise level. It starts at 0, where `uncertain_loss` is L.
    """

    FEATURES = 64

    def __init__(self) -> None:
        super().__init__()
        # a vector: neither Muon, which takes matrices, nor mixed precision has a use for it
        self.weight = nn.Parameter(torch.zeros(self.FEATURES))

    def forward(self, timestep: Tensor) -> Tensor:
        """timestep: (B,), in 0 .. 1000. Returns u (B,) float32."""
        # Of length 1, so that the gradient is no longer than |1 - L / exp(u)|, as all weights are clipped together. The
        # slowest cosine is nearly 1 all along, which makes a bias needless.
        features = sinusoidal_embedding(timestep, self.FEATURES) * (2.0 / self.FEATURES) ** 0.5
        return (features * self.weight).sum(dim=1)

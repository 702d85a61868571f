"""What attention adds to somebody else's U-Net, measured on a small task: taking strong noise off sheets of icons.

    python scripts/denoise_with_attention.py data/icons-common [--steps 800]

Nine icons lie on a sheet, of two kinds only, so that what noise hides in one place can be read in another: things
recur in most pictures. MONAI's UNet with three levels sees a neighbourhood. The same network is trained as it is, with
a convolution of as many weights more at its lowest level, and with our attention there, on the same sheets and the same
noise; the error is that on icons held out.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from unet_attn.attention import SelfAttention2d
from unet_attn.attention_extras import ExtendedMultiHeadAttention, Residual, RotaryOverPixels

ICON, CELLS, KINDS = 16, 3, 2  # side of an icon in pixels; icons in a row and rows of a sheet; different ones on it
CHANNELS = (16, 32, 64)
LOWEST = CHANNELS[-1]
NOISE = 1.0  # standard deviation, as large as the range from grey to black
LEARNING_RATE = 3e-3

# each stands behind a GroupNorm and inside a residual at the lowest level; all three have some 17,000 weights
ADDITIONS: dict[str, Callable[[], nn.Module] | None] = {
    "as it is": None,
    "convolution": lambda: nn.Sequential(nn.Conv2d(LOWEST, 26, 3, padding=1), nn.SiLU(), nn.Conv2d(26, LOWEST, 1)),
    "SelfAttention2d": lambda: SelfAttention2d(LOWEST, heads=4, dim_head=16),
    "RotaryOverPixels": lambda: RotaryOverPixels(ExtendedMultiHeadAttention(LOWEST, heads=4, qk_norm=True)),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", metavar="DIR", type=Path, help="a folder of pictures")
    parser.add_argument("--steps", type=int, default=800, help="training steps of each network (800)")
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=2, help="runs of each network (2)")
    options = parser.parse_args()
    try:
        compare(options)
    except ModuleNotFoundError as error:
        print(f"error: {error.name} is not installed: pip install {error.name}", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def compare(options: argparse.Namespace) -> None:
    pictures = load_pictures(options.pictures)
    training, held_out = pictures[: len(pictures) * 5 // 6], pictures[len(pictures) * 5 // 6 :]
    print(
        f"{len(training)} pictures to train on, {len(held_out)} held out; {options.steps} steps of {options.batch_size}"
    )
    print(f"{'':18}{'weights':>9}{'seconds':>9}  mean squared error, seed by seed")
    for name in ADDITIONS:
        errors, seconds = [], []
        for seed in range(options.seeds):
            network = build_network(name, seed)
            start = time.perf_counter()
            train(network, training, steps=options.steps, batch_size=options.batch_size, seed=seed)
            seconds.append(time.perf_counter() - start)
            errors.append(held_out_error(network, held_out))
        weights = sum(parameter.numel() for parameter in network.parameters())
        found = "  ".join(f"{error:.4f}" for error in errors)
        print(
            f"{name:18}{weights:9}{statistics.median(seconds):9.1f}  {statistics.mean(errors):.4f} = mean of {found}",
            flush=True,
        )


def load_pictures(folder: Path) -> Tensor:
    """(N, 1, 16, 16) in [-1, 1], at most 3000 in a fixed random order. Raises ValueError if there are fewer than 12."""
    from unet_attn.images import load_image, resize_and_crop, to_tensor

    paths = sorted(folder.rglob("*.png"))
    if len(paths) < 12:
        raise ValueError(f"{folder} holds {len(paths)} PNG pictures; at least 12 are needed")
    order = torch.randperm(len(paths), generator=torch.Generator().manual_seed(0))[:3000].tolist()
    return torch.stack([to_tensor(resize_and_crop(load_image(paths[i], channels=1), ICON)) for i in order])


def make_sheets(pictures: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns `count` sheets, (B, 1, 48, 48), and the same under noise."""
    kinds = torch.randint(0, len(pictures), (count, KINDS), generator=generator)
    chosen = torch.randint(0, KINDS, (count, CELLS**2), generator=generator)
    cells = pictures[kinds.gather(1, chosen)]
    clean = rearrange(cells, "b (rows columns) 1 h w -> b 1 (rows h) (columns w)", rows=CELLS)
    return clean, clean + NOISE * torch.randn(clean.shape, generator=generator)


def build_network(addition: str, seed: int) -> nn.Module:
    """MONAI's UNet with one of ADDITIONS behind its lowest level."""
    from monai.networks.nets import UNet

    torch.manual_seed(seed)
    network = UNet(spatial_dims=2, in_channels=1, out_channels=1, channels=CHANNELS, strides=(2, 2), num_res_units=1)
    make = ADDITIONS[addition]
    if make is not None:
        skip = network.model[1].submodule[1]  # a level is (down, SkipConnection(level below), up)
        skip.submodule = nn.Sequential(skip.submodule, Residual(nn.Sequential(nn.GroupNorm(8, LOWEST), make())))
    return network


def train(network: nn.Module, pictures: Tensor, *, steps: int, batch_size: int, seed: int) -> list[float]:
    """Returns the loss of each step."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    losses = []
    for _ in range(steps):
        clean, noisy = make_sheets(pictures, batch_size, generator)
        loss = F.mse_loss(network(noisy), clean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def held_out_error(network: nn.Module, pictures: Tensor) -> float:
    """Mean squared error on 200 sheets, always the same ones."""
    clean, noisy = make_sheets(pictures, 200, torch.Generator().manual_seed(1))
    return F.mse_loss(network.eval()(noisy), clean).item()


if __name__ == "__main__":
    sys.exit(main())

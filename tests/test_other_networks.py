"""Our attention in networks that are not ours: it takes the place of theirs, or comes on top, and they train."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from unet_attn.attention import SelfAttention2d
from unet_attn.attention_extras import LinearAttention2d, RMSNorm2d
from unet_attn.convert import from_lucidrains

ROOT = Path(__file__).resolve().parent.parent


def lucidrains_unet() -> tuple[nn.Module, type[nn.Module]]:
    lucidrains = pytest.importorskip("denoising_diffusion_pytorch.denoising_diffusion_pytorch")
    torch.manual_seed(0)
    return lucidrains.Unet(8, dim_mults=(1, 2), attn_dim_head=5, attn_heads=3), lucidrains.Attention


def replace(network: nn.Module, old: type[nn.Module], make) -> int:
    """Puts make(module) in the place of every module of class `old`; returns how many there were."""
    found = [
        (parent, name) for parent in network.modules() for name, each in parent.named_children() if type(each) is old
    ]
    for parent, name in found:
        setattr(parent, name, make(getattr(parent, name)))
    return len(found)


def losses_of(network: nn.Module, *, steps: int = 12) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    clean, time = torch.randn(2, 3, 8, 8, generator=generator), torch.tensor([3, 700])
    noise = torch.randn(clean.shape, generator=generator)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        loss = (network(clean + noise, time) - noise).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_in_the_lucidrains_unet_it_predicts_the_same_with_their_weights_and_trains() -> None:
    network, attention = lucidrains_unet()
    x, time = torch.randn(2, 3, 8, 12), torch.tensor([3, 700])
    expected = network(x, time)
    assert replace(network, attention, from_lucidrains) == 3
    assert_close(network(x, time), expected, atol=1e-5, rtol=1e-5)

    losses = losses_of(network)
    assert losses[-1] < 0.7 * losses[0]


def test_in_the_lucidrains_unet_it_starts_from_nothing_as_well() -> None:
    network, attention = lucidrains_unet()

    def make(module: nn.Module) -> nn.Module:
        channels = module.to_out.out_channels
        return nn.Sequential(RMSNorm2d(channels), SelfAttention2d(channels, heads=3, dim_head=5))

    replace(network, attention, make)
    linear = type(network.downs[0][2])
    assert linear.__name__ == "LinearAttention"
    replace(network, linear, lambda module: LinearAttention2d(module.norm.g.shape[1], heads=3, dim_head=5))
    losses = losses_of(network)
    assert losses[-1] < 0.7 * losses[0]


def test_added_to_a_plain_monai_unet_it_trains_and_its_weights_move(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("monai")
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from denoise_with_attention import ADDITIONS, build_network, held_out_error, train

    pictures = torch.full((8, 1, 16, 16), 1.0)
    pictures[:4, :, 4:12, 4:12] = -1.0
    pictures[4:, :, 2:14, 7:9] = -1.0
    for addition in ADDITIONS:
        network = build_network(addition, seed=0)
        before = held_out_error(network, pictures)
        moved: list[Tensor] = [each.clone() for name, each in network.named_parameters() if "to_out" in name]
        losses = train(network.train(), pictures, steps=15, batch_size=4, seed=0)
        assert losses[-1] < 0.7 * losses[0]
        assert held_out_error(network, pictures) < before
        now = [each for name, each in network.named_parameters() if "to_out" in name]
        assert bool(now) == ("Over" in addition or "2d" in addition)
        assert not any(torch.equal(old, new) for old, new in zip(moved, now, strict=True))

"""The learning rate's curve, Muon against torch's own, and the optimizer's state as tensors."""

import math

import pytest
import torch
from torch import Tensor, nn

from unet_attn.optim import (
    MOMENTUM,
    Muon,
    build_optimizer,
    hidden_matrices,
    learning_rate_factor,
    load_optimizer_tensors,
    newton_schulz,
    optimizer_tensors,
    set_learning_rate,
)


def curve(steps: int, *, schedule: str = "constant", **options: float) -> list[float]:
    return [
        learning_rate_factor(step, (step - 1) / steps, schedule=schedule, **options) for step in range(1, steps + 1)
    ]


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 5, 3), nn.GroupNorm(1, 5), nn.Flatten(), nn.Linear(45, 7))


def gradient_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(2, 3, 7, 7, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def build(model: nn.Module, name: str) -> torch.optim.Optimizer:
    return build_optimizer(
        dict(model.named_parameters()),
        name,
        learning_rate=0.01,
        muon_learning_rate=0.02,
        matrices=hidden_matrices(model, ends=(model[0],)),
    )


def test_the_learning_rate_rises_stays_and_falls_to_zero_after_the_last_step() -> None:
    got = curve(100, warmup_steps=4, cooldown_fraction=0.05)

    assert got[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert got[94:] == pytest.approx([1.0, 1.0, 0.8, 0.6, 0.4, 0.2])
    assert learning_rate_factor(101, 1.0, warmup_steps=4, schedule="constant", cooldown_fraction=0.05) == 0


def test_a_warm_up_longer_than_the_run_ends_after_a_tenth_of_it() -> None:
    got = curve(20, warmup_steps=1000, cooldown_fraction=0.1)

    assert got[:4] == pytest.approx([0.001, 0.5, 1.0, 1.0])
    assert got[-2:] == pytest.approx([1.0, 0.5])


def test_without_warm_up_and_cool_down_the_rate_is_constant() -> None:
    assert curve(5, warmup_steps=0, cooldown_fraction=0.0) == [1.0] * 5


def test_cosine_falls_from_the_warm_up_on_whatever_the_cool_down() -> None:
    got = curve(40, schedule="cosine", warmup_steps=2, cooldown_fraction=0.5)

    assert got[:2] == pytest.approx([0.5, (1 + math.cos(math.pi / 40)) / 2])
    assert got[20] == pytest.approx(0.5)
    assert got[30] == pytest.approx((1 - math.sqrt(0.5)) / 2)
    assert learning_rate_factor(41, 1.0, warmup_steps=2, schedule="cosine", cooldown_fraction=0.5) == 0


@pytest.mark.parametrize("shape", [(3, 5, 11), (2, 11, 5), (1, 7, 7)])
def test_newton_schulz_makes_singular_values_about_one_and_keeps_the_directions(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    got = newton_schulz(matrices)
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)

    assert got.shape == shape
    # in the matrix' own singular basis the result is diagonal
    diagonal = left.mT @ got @ right.mT
    torch.testing.assert_close(diagonal, torch.diag_embed(diagonal.diagonal(dim1=-2, dim2=-1)), rtol=0, atol=1e-4)
    values = torch.linalg.svdvals(got)
    assert 0.6 < values.min() and values.max() < 1.25


def torch_muon(weight: Tensor, gradients: list[Tensor]) -> Tensor:
    """torch's own optimizer on the matrix, as reference; its Newton-Schulz runs in bfloat16."""
    parameter = nn.Parameter(weight.clone())
    optimizer = torch.optim.Muon([parameter], lr=0.02, weight_decay=0.0, momentum=MOMENTUM)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("shape", [(11, 5), (5, 11)])
def test_muon_moves_matrices_as_torchs_muon_does(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(shape, generator=generator) for _ in range(2)]  # two, to go through one batched product
    gradients = [[torch.randn(shape, generator=generator) for _ in range(3)] for _ in weights]
    parameters = [nn.Parameter(weight.clone()) for weight in weights]
    optimizer = Muon(parameters, [], lr=0.02, adam_lr=0.1)

    for step in range(3):
        for parameter, of_parameter in zip(parameters, gradients, strict=True):
            parameter.grad = of_parameter[step].clone()
        optimizer.step()

    for parameter, weight, of_parameter in zip(parameters, weights, gradients, strict=True):
        expected = torch_muon(weight, of_parameter) - weight
        difference = (parameter.detach() - weight - expected).norm() / expected.norm()
        assert difference < 0.03  # bfloat16 has three digits


def test_muon_treats_a_convolution_as_its_flattened_matrix_in_either_layout() -> None:
    generator = torch.Generator().manual_seed(2)
    weight, gradient = (torch.randn(5, 3, 2, 2, generator=generator) for _ in range(2))
    flat = nn.Parameter(weight.reshape(5, 12).clone())
    plain = nn.Parameter(weight.clone())
    last = nn.Parameter(weight.to(memory_format=torch.channels_last))
    for parameter in (flat, plain, last):
        parameter.grad = gradient.reshape(parameter.shape).clone()
        Muon([parameter], [], lr=0.02, adam_lr=0.1).step()

    torch.testing.assert_close(plain.detach().reshape(5, 12), flat.detach())
    torch.testing.assert_close(last.detach(), plain.detach())


def test_muon_moves_the_others_as_adamw_does() -> None:
    generator = torch.Generator().manual_seed(3)
    value = torch.randn(7, generator=generator)
    ours, reference = nn.Parameter(value.clone()), nn.Parameter(value.clone())
    optimizers = [
        Muon([], [ours], lr=1.0, adam_lr=0.01),
        torch.optim.AdamW([reference], lr=0.01, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0),
    ]
    for _ in range(3):
        gradient = torch.randn(7, generator=generator)
        for parameter, optimizer in zip((ours, reference), optimizers, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()

    torch.testing.assert_close(ours, reference, rtol=0, atol=0)


def test_muon_refuses_vectors() -> None:
    with pytest.raises(ValueError, match=r"two or more dimensions, got shape \(7,\)"):
        Muon([nn.Parameter(torch.zeros(7))], [], lr=1.0, adam_lr=1.0)


def test_hidden_matrices_are_linear_and_convolution_weights_but_not_the_ends() -> None:
    model = small_model()

    assert hidden_matrices(model) == {"0.weight", "1.weight", "4.weight"}
    assert hidden_matrices(model, ends=(model[0],)) == {"1.weight", "4.weight"}
    assert hidden_matrices(nn.Sequential(nn.Embedding(7, 3))) == set()


def test_every_parameter_is_optimized_once() -> None:
    model = small_model()

    for name in ("adamw", "muon"):
        optimized = [parameter for group in build(model, name).param_groups for parameter in group["params"]]
        assert sorted(map(id, optimized)) == sorted(map(id, model.parameters()))


def test_the_learning_rate_is_set_from_the_full_one_each_time() -> None:
    optimizer = build(small_model(), "muon")

    set_learning_rate(optimizer, 0.5)
    set_learning_rate(optimizer, 0.5)

    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.005]


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_training_with_a_restored_state_goes_on_bitwise(name: str) -> None:
    straight = small_model().to(memory_format=torch.channels_last)
    gradient_steps(straight, build(straight, name), range(6))

    first = small_model().to(memory_format=torch.channels_last)
    optimizer = build(first, name)
    gradient_steps(first, optimizer, range(3))
    saved = {
        key: value.clone().contiguous()
        for key, value in optimizer_tensors(optimizer, dict(first.named_parameters())).items()
    }
    resumed = build(first, name)
    load_optimizer_tensors(resumed, dict(first.named_parameters()), saved)
    gradient_steps(first, resumed, range(3, 6))

    for ours, expected in zip(first.parameters(), straight.parameters(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0)


def test_an_unknown_optimizer_is_refused() -> None:
    with pytest.raises(ValueError, match="adamw or muon, got 'sgd'"):
        build(small_model(), "sgd")

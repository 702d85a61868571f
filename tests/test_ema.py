"""Averaged weights: warm-up, no aliasing of the live weights, and their return."""

import pytest
import torch
from torch import nn

from unet_attn.ema import ExponentialMovingAverage, ema_decay, trainable


def model_with(value: float) -> nn.Linear:
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, value)
    nn.init.constant_(model.bias, value)
    return model


def test_the_decay_warms_up_to_its_limit() -> None:
    assert ema_decay(0.999, 0) == 0.1
    assert ema_decay(0.999, 90) == 0.91
    assert ema_decay(0.999, 10**6) == 0.999
    assert ema_decay(0.5, 90) == 0.5


def test_updates_average_and_are_counted() -> None:
    model = model_with(0.0)
    ema = ExponentialMovingAverage(model, 0.15)
    nn.init.constant_(model.weight, 1.0)

    ema.update(model)  # decay 0.1
    ema.update(model)  # decay 0.15, as 2/11 would be more

    torch.testing.assert_close(ema.averages["weight"], torch.full((2, 3), 1 - 0.1 * 0.15))
    assert ema.averages["bias"].abs().max() == 0
    assert ema.updates == 2


def test_averages_never_alias_live_weights() -> None:
    model = model_with(2.0)
    ema = ExponentialMovingAverage(model, 0.9)

    nn.init.constant_(model.weight, 5.0)

    assert ema.averages["weight"].max() == 2.0
    with ema.swapped(model):
        nn.init.constant_(model.weight, 7.0)
    assert ema.averages["weight"].max() == 2.0


def test_frozen_weights_are_left_out() -> None:
    model = model_with(2.0)
    model.weight.requires_grad_(False)

    assert list(ExponentialMovingAverage(model, 0.9).averages) == ["bias"]
    assert list(trainable(model)) == ["bias"]


def test_averages_of_half_precision_weights_are_float32() -> None:
    model = model_with(1.0).to(torch.bfloat16)
    ema = ExponentialMovingAverage(model, 0.9)

    ema.update(model)

    assert ema.averages["weight"].dtype == torch.float32


def test_live_weights_return_even_after_an_error() -> None:
    model = model_with(1.0)
    ema = ExponentialMovingAverage(model, 0.9)
    nn.init.constant_(model.weight, 3.0)
    live = model.weight

    with pytest.raises(RuntimeError, match="inside"), ema.swapped(model):
        assert model.weight.max() == 1.0
        raise RuntimeError("inside")

    assert model.weight is live
    assert model.weight.min() == 3.0


def test_loading_goes_on_with_averages_and_count() -> None:
    model = model_with(0.0)
    ema = ExponentialMovingAverage(model, 0.9)
    saved = {"weight": torch.full((2, 3), 4.0), "bias": torch.full((2,), 5.0)}

    ema.load(saved, updates=90)
    saved["weight"].zero_()

    assert ema.averages["weight"].min() == 4.0
    assert ema.updates == 90


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({"weight": torch.zeros(2, 3)}, "no weights for 'bias'"),
        (
            {"weight": torch.zeros(2, 5), "bias": torch.zeros(2)},
            r"'weight' has shape \(2, 5\), the model's is \(2, 3\)",
        ),
    ],
)
def test_loading_averages_of_another_model_is_refused(saved: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExponentialMovingAverage(model_with(0.0), 0.9).load(saved, updates=1)


def test_a_decay_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="below 1, got 1"):
        ExponentialMovingAverage(model_with(0.0), 1.0)

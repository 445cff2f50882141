"""The value loss by hand: mean squared error and Huber, with and without the clip of PPO."""

import math

import pytest
import torch

import fastrl


def run(values, **inputs):
    values = values.detach().requires_grad_()
    result = fastrl.value_loss(values, **inputs)
    result.loss.backward()
    return result, values.grad


# value, return, old value, clip, loss: what one token costs and its gradient, by hand
BY_HAND = [
    (3.0, 1.0, None, None, "mse", 2.0, 2.0),
    (1.5, 1.0, None, None, "huber", 0.125, 0.5),
    (4.0, 1.0, None, None, "huber", 2.5, 1.0),
    (-2.0, 1.0, None, None, "huber", 2.5, -1.0),
    (2.0, 1.0, None, None, "huber", 0.5, 1.0),  # the corner
    (1.0, 0.0, 2.0, 0.5, "mse", 1.125, 0.0),  # held at 1.5, which is worse
    (1.0, 3.0, 0.0, 0.5, "mse", 3.125, 0.0),  # held at 0.5: max(2, 3.125)
    (1.0, 0.0, 0.0, 0.5, "mse", 0.5, 1.0),  # held at 0.5, which is better: the larger counts
    (1.0, 3.0, 0.9, 0.5, "mse", 2.0, -2.0),  # within the clip
    (1.0, 5.0, 0.0, 0.5, "huber", 4.0, 0.0),  # held at 0.5: max(3.5, 4)
]


@pytest.mark.parametrize(("value", "ret", "old", "clip", "loss", "cost", "slope"), BY_HAND)
def test_numbers_by_hand(value, ret, old, clip, loss, cost, slope):
    old = {} if old is None else {"old_values": torch.tensor([[old]]), "clip": clip}
    result, gradient = run(
        torch.tensor([[value]]),
        returns=torch.tensor([[ret]]),
        mask=torch.ones(1, 1),
        loss=loss,
        **old,
    )
    assert result.loss.item() == pytest.approx(cost)
    assert gradient.item() == pytest.approx(slope)
    assert result.metrics["clip_fraction"].item() == (clip is not None and slope == 0)


def test_metrics_by_hand():
    # errors 2 0 1 against returns 0 2 4: var(R - V) / var(R) = (2/3) / (8/3)
    result = fastrl.value_loss(
        torch.tensor([-2.0, 2.0, 3.0, math.nan]),
        torch.tensor([0.0, 2.0, 4.0, math.nan]),
        torch.tensor([1, 1, 1, 0]),
    )
    came = {name: value.item() for name, value in result.metrics.items()}
    expected = {"value_mean": 1, "return_mean": 2, "clip_fraction": 0, "explained_variance": 0.75}
    assert came == pytest.approx(expected)
    assert not any(value.requires_grad for value in result.metrics.values())


@pytest.mark.parametrize("constant", [2.0, 0.1])
def test_explained_variance_of_constant_returns_is_zero(constant):
    # the rounded mean of a hundred times 0.1 is another number
    returns = torch.full((10, 10), constant)
    result = fastrl.value_loss(torch.randn(10, 10), returns, torch.ones(10, 10))
    assert result.metrics["explained_variance"].item() == 0

"""Exactly on a bound the slope is the one inside, whatever gradient torch gives `clamp` there."""

import math

import pytest
import torch

import fastrl
from fastrl import Objective

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("poisoned_memory")]

ONE = torch.ones(1, 1)


def slope_of(backend, objective, log_ratio=None, advantage=1.0, ref_distance=None):
    """dL/dlogprob of one token; on policy if `log_ratio` is None."""
    logprobs = torch.full((1, 1), -1.0, requires_grad=True)
    ref = None if ref_distance is None else logprobs.detach() + ref_distance
    fastrl.policy_loss(
        logprobs,
        torch.full((1,), advantage),
        ONE,
        old_logprobs=None if log_ratio is None else logprobs.detach() - log_ratio,
        ref_logprobs=ref,
        objective=objective,
        backend=backend,
    ).loss.backward()
    return logprobs.grad.item()


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("level", ["token", "sequence", "sequence-token"])
@pytest.mark.parametrize("bound", ["clip_low", "clip_high"])
def test_no_room_beside_the_ratio_of_one(backend, bound, level, advantage):
    o = Objective(**{bound: 0.0}, level=level)
    assert slope_of(backend, o, advantage=advantage) == -advantage
    assert slope_of(backend, o, log_ratio=0.0, advantage=advantage) == -advantage


def test_the_caps_of_the_ratio(backend):
    for o in (Objective(dual_clip=math.e), Objective(clip_high=0.0, delta=math.e)):
        assert slope_of(backend, o, 1.0, -1.0) == pytest.approx(math.e)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_gmpo(backend, advantage):
    for log_ratio in (0.5, -0.5):
        o = Objective.preset("gmpo", clip_low=0.5, clip_high=0.5)
        expected = -advantage * math.exp(log_ratio)
        assert slope_of(backend, o, log_ratio, advantage) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("clamp", [0.5, (-0.5, 0.5)])
@pytest.mark.parametrize("log_ratio", [0.5, -0.5])
def test_log_ratio_clamp(backend, clamp, log_ratio):
    o = Objective(log_ratio_clamp=clamp, clip_low=1.0, clip_high=2.0)
    assert slope_of(backend, o, log_ratio) == pytest.approx(-math.exp(log_ratio), rel=1e-6)
    assert slope_of(backend, o, 1.5 * log_ratio) == 0


def test_saturation(backend):
    o = Objective(clip_low=1.0)
    assert slope_of(backend, o, -80.0) == pytest.approx(-math.exp(-80), rel=1e-5)
    assert slope_of(backend, o, -81.0) == 0
    o = Objective(kl_coef=1.0, kl_estimator="k1")
    for distance in (80.0, -80.0):
        assert slope_of(backend, o, advantage=0.0, ref_distance=distance) == 1
        assert slope_of(backend, o, advantage=0.0, ref_distance=1.25 * distance) == 0


@pytest.mark.parametrize(
    ("estimator", "distance", "bound", "slope"),
    [
        ("k1", 0.5, 0.5, 1.0),
        ("k1", -0.5, 0.5, 1.0),
        ("k2", 1.0, 0.5, -1.0),
        ("k2", -1.0, 0.5, 1.0),
        ("abs", 0.5, 0.5, -1.0),
        ("abs", -0.5, 0.5, 1.0),
    ],
)
def test_kl_clamp(backend, estimator, distance, bound, slope):
    o = Objective(kl_coef=1.0, kl_estimator=estimator, kl_clamp=bound)
    assert slope_of(backend, o, advantage=0.0, ref_distance=distance) == slope
    logprobs = torch.tensor([-1.0], requires_grad=True)
    ref = logprobs.detach() + distance
    fastrl.kl_divergence(logprobs, ref, estimator=estimator, clamp=bound).sum().backward()
    assert logprobs.grad.item() == slope


def value_slope(value, returns, old=None, loss="mse"):
    """Loss and dL/dvalue of one token; the change is clipped at 0.5 if there is an old value."""
    values = torch.tensor([[value]], requires_grad=True)
    given = {} if old is None else {"old_values": torch.tensor([[old]]), "clip": 0.5}
    result = fastrl.value_loss(values, torch.tensor([[returns]]), ONE, loss=loss, **given)
    result.loss.backward()
    return result.loss.item(), values.grad.item()


@pytest.mark.parametrize("loss", ["mse", "huber"])
@pytest.mark.parametrize("returns", [0.0, 4.0])
@pytest.mark.parametrize("old", [0.5, 1.0, 1.5])
def test_value_loss(loss, returns, old):
    """Where both branches are equal, on the bound and inside, either slope is accepted."""
    difference = 1.0 - returns
    expected = difference if loss == "mse" else math.copysign(1, difference)
    assert value_slope(1.0, returns, old, loss)[1] == expected


def test_a_value_whose_two_branches_are_equal_has_the_slope_of_the_free_one():
    assert value_slope(1.0, 0.75, old=0.0)[1] == 0.25  # held at 0.5, as far from 0.75 as 1


def test_a_broken_old_value_breaks_the_value_loss():
    assert all(map(math.isnan, value_slope(1.0, 1.0, old=math.nan)))


@pytest.mark.parametrize("old", [None, 1.0])
def test_a_broken_number_and_the_huber_slope(old):
    assert math.isnan(value_slope(math.nan, 1.0, old, "huber")[1])
    assert value_slope(1.0, math.inf, old, "huber")[1] == -1
    assert value_slope(1.0, -math.inf, old, "huber")[1] == 1


@pytest.mark.parametrize("old", [None, 1.0])
@pytest.mark.parametrize("returns", [math.inf, 3e38])
def test_returns_beyond_any_square_have_the_slope_of_the_free_branch(returns, old):
    assert value_slope(1.0, returns, old)[1] == -math.inf

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


E, HALF = math.e, 0.5
NO_ROOM = [
    Objective(**{bound: 0.0}, level=level)
    for level in ("token", "sequence", "sequence-token")
    for bound in ("clip_low", "clip_high")
]
OF_GMPO = Objective.preset("gmpo", clip_low=HALF, clip_high=HALF)
OF_CLAMPS = [
    Objective(log_ratio_clamp=clamp, clip_low=1.0, clip_high=2.0) for clamp in (HALF, (-HALF, HALF))
]
#: Objective, log-ratio (None on policy), advantage, slope.
SLOPES = [
    *((o, ratio, A, -A) for o in NO_ROOM for ratio in (None, 0.0) for A in (1.0, -1.0)),
    (Objective(dual_clip=E), 1.0, -1.0, E),
    (Objective(clip_high=0.0, delta=E), 1.0, -1.0, E),
    *((OF_GMPO, x, A, -A * math.exp(x)) for x in (HALF, -HALF) for A in (1.0, -1.0)),
    *((o, x, 1.0, -math.exp(x)) for o in OF_CLAMPS for x in (HALF, -HALF)),
    *((o, 1.5 * x, 1.0, 0.0) for o in OF_CLAMPS for x in (HALF, -HALF)),
    (Objective(clip_low=1.0), -80.0, 1.0, -math.exp(-80)),
    (Objective(clip_low=1.0), -81.0, 1.0, 0.0),
]


@pytest.mark.parametrize(("objective", "log_ratio", "advantage", "slope"), SLOPES)
def test_the_policy_term(backend, objective, log_ratio, advantage, slope):
    found = slope_of(backend, objective, log_ratio, advantage)
    assert found == (slope and pytest.approx(slope, rel=1e-5, abs=0))


#: Estimator, distance to the reference, bound of the KL, slope.
SLOPES_OF_KL = [
    *(("k1", x, None, 1.0) for x in (80.0, -80.0)),
    *(("k1", x, None, 0.0) for x in (100.0, -100.0)),
    *(("k1", x, HALF, 1.0) for x in (HALF, -HALF)),
    *(("k2", x, HALF, -x) for x in (1.0, -1.0)),
    *(("abs", x, HALF, -2 * x) for x in (HALF, -HALF)),
]


@pytest.mark.parametrize(("estimator", "distance", "bound", "slope"), SLOPES_OF_KL)
def test_kl(backend, estimator, distance, bound, slope):
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

"""KL estimates per token: numbers by hand, properties, saturation, gradients."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastrl
from tests.ops.closeness import assert_within_budget
from tests.ops.inputs import FLOAT_DTYPES, make_logprobs

ESTIMATORS = ("k1", "k2", "k3", "abs")
differences = st.floats(-90, 90, width=32)


def exact(estimator, d):
    """The estimate and its derivative w.r.t. the policy's log-probability; d = ref - logprob."""
    x = min(max(d, -80.0), 80.0)
    value, slope = {
        "k1": (-x, 1.0),
        "k2": (x * x / 2, -x),
        "k3": (math.expm1(x) - x, -math.expm1(x)),
        "abs": (abs(x), -math.copysign(1.0, x) if x else 0.0),
    }[estimator]
    return value, slope if abs(d) <= 80 else 0.0


def estimate(estimator, d, **options):
    """The estimate of one token at `ref - logprob = d`, and its gradients to both."""
    logprob = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([d], dtype=torch.float64, requires_grad=True)
    kl = fastrl.kl_divergence(logprob, ref, estimator=estimator, **options)
    return kl.item(), *(g.item() for g in torch.autograd.grad(kl.sum(), (logprob, ref)))


# log-probabilities -1 and -2: d = -1, e^-1 = 0.3678794
BY_HAND = [("k1", 1.0, 1.0), ("k2", 0.5, 1.0), ("k3", 0.3678794, 0.6321206), ("abs", 1.0, 1.0)]


@pytest.mark.parametrize(("estimator", "value", "slope"), BY_HAND)
def test_numbers_by_hand(estimator, value, slope):
    logprobs = torch.tensor([-1.0], requires_grad=True)
    kl = fastrl.kl_divergence(logprobs, torch.tensor([-2.0]), estimator=estimator)
    kl.sum().backward()
    assert kl.item() == pytest.approx(value, rel=1e-6)
    assert logprobs.grad.item() == pytest.approx(slope, rel=1e-6)


def test_k3_is_the_default():
    logprobs, ref = make_logprobs(5), make_logprobs(5)
    expected = fastrl.kl_divergence(logprobs, ref, estimator="k3")
    assert torch.equal(fastrl.kl_divergence(logprobs, ref), expected)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(d=differences)
def test_value_and_gradients_at_any_difference(estimator, d):
    value, slope, ref_slope = estimate(estimator, d)
    expected, expected_slope = exact(estimator, d)
    assert value == pytest.approx(expected, rel=1e-12)
    assert slope == pytest.approx(expected_slope, rel=1e-12)
    assert ref_slope == -slope


@pytest.mark.parametrize("d", [1e-4, -1e-4, 1e-3])
def test_k3_of_close_policies_keeps_its_digits_in_float32(d):
    # exp(d) - d - 1 by subtraction would be rounding noise: d^2 / 2 is 5e-9
    logprobs = torch.zeros(1)
    kl = fastrl.kl_divergence(logprobs, torch.tensor([d]))
    wanted = torch.tensor([math.expm1(kl_d := float(torch.tensor(d))) - kl_d]).double()
    assert_within_budget(kl, wanted, ulps=2, size=abs(d))
    assert kl.item() >= 0


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("d", [200.0, -200.0, math.inf, -math.inf])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_far_policies_saturate(estimator, d, dtype):
    logprobs = torch.tensor([-1.0, -1.0], dtype=dtype, requires_grad=True)
    ref = torch.tensor([-1.0 + d, -1.5], dtype=dtype)
    kl = fastrl.kl_divergence(logprobs, ref, estimator=estimator)
    kl.sum().backward()
    assert kl[0].item() == pytest.approx(exact(estimator, d)[0])
    assert logprobs.grad[0] == 0
    assert logprobs.grad[1].item() == pytest.approx(exact(estimator, -0.5)[1], rel=1e-2)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("d", [0.3, -0.3, 3.0, -3.0])
def test_the_clamp_holds_the_value_and_stops_the_gradient(estimator, d):
    value, slope = exact(estimator, d)
    came = estimate(estimator, d, clamp=0.5)
    assert came[0] == pytest.approx(min(max(value, -0.5), 0.5))
    assert came[1] == pytest.approx(slope if abs(value) <= 0.5 else 0.0)


@pytest.mark.parametrize("dtype", [torch.float64, *FLOAT_DTYPES], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (2, 3), (2, 0, 4)], ids=str)
def test_shapes_and_dtypes(shape, dtype):
    logprobs, ref = (make_logprobs(*shape, dtype=dtype) for _ in range(2))
    for estimator in ESTIMATORS:
        kl = fastrl.kl_divergence(logprobs, ref, estimator=estimator)
        assert kl.shape == shape
        assert kl.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        pairs = zip(logprobs.flatten().tolist(), ref.flatten().tolist(), strict=True)
        wanted = [exact(estimator, r - lp)[0] for lp, r in pairs]
        assert_within_budget(
            kl, torch.tensor(wanted, dtype=torch.float64).reshape(shape), size=4 + abs(kl.double())
        )


def test_the_policy_loss_has_the_same_kl(backend):
    logprobs, ref = (make_logprobs(3, 4, dtype=torch.float32) for _ in range(2))
    for estimator in ESTIMATORS:
        result = fastrl.policy_loss(
            logprobs,
            torch.zeros(3),
            torch.ones(3, 4),
            ref_logprobs=ref,
            objective=fastrl.Objective(kl_coef=1.0, kl_estimator=estimator),
            backend=backend,
        )
        kl = fastrl.kl_divergence(logprobs, ref, estimator=estimator).mean()
        torch.testing.assert_close(result.loss, kl)
        torch.testing.assert_close(result.metrics["kl"], kl)

"""KL estimates per token: numbers by hand, and digits of close policies."""

import math

import pytest
import torch

import fastrl
from tests.ops.closeness import assert_within_budget
from tests.ops.inputs import make_logprobs

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


@pytest.mark.parametrize("d", [1e-4, -1e-4, 1e-3])
def test_k3_of_close_policies_keeps_its_digits_in_float32(d):
    # exp(d) - d - 1 by subtraction would be rounding noise: d^2 / 2 is 5e-9
    logprobs = torch.zeros(1)
    kl = fastrl.kl_divergence(logprobs, torch.tensor([d]))
    wanted = torch.tensor([math.expm1(kl_d := float(torch.tensor(d))) - kl_d]).double()
    assert_within_budget(kl, wanted, ulps=2, size=abs(d))
    assert kl.item() >= 0

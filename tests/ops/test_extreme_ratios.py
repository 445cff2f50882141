"""Log-ratios of +-200, masked or not, advantage 0, all kinks: gradients are never NaN."""

import itertools
import math

import pytest
import torch

import fastrl
from fastrl import Objective
from fastrl.contract import KL_ESTIMATORS, KL_GRADIENTS, SURROGATES

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("poisoned_memory")]

DISTANCES = (-200.0, -80.0, -20.0, -0.25, 0.0, 0.25, 20.0, 80.0, 200.0)
ADVANTAGES = (-2.0, 0.0, 2.0)
#: log-ratio to the old policy, to the reference, advantage
GRID = list(itertools.product(DISTANCES, DISTANCES, ADVANTAGES))

OBJECTIVES = [
    Objective(
        surrogate=surrogate,
        level=level,
        kl_coef=0.1,
        kl_estimator=estimator,
        kl_gradient=gradient,
        aggregation="token-sum",
        **({"dual_clip": 3.0, "delta": 4.0} if surrogate == "ppo_clip" else {}),
    )
    for surrogate in SURROGATES
    for level in (("sequence",) if surrogate == "gmpo" else ("token", "sequence", "sequence-token"))
    for estimator in KL_ESTIMATORS
    for gradient in KL_GRADIENTS
    if not (surrogate == "reinforce" and level != "token")
    if not (surrogate == "gmpo" and gradient == "bias-corrected")
]


INTERPRETED = [o for o in OBJECTIVES if o.level == "token"]  # one program for all, not for each


def runs(backend, o):
    if backend == "triton" and o not in INTERPRETED:
        pytest.skip("a program for every sequence takes the interpreter long")


def name_of(o):
    return f"{o.surrogate}-{o.level}-{o.kl_estimator}-{o.kl_gradient}"


def policy_loss(backend, o, dtype, mask):
    log_ratio, ref_distance, A = (
        torch.tensor(column).to(dtype) for column in zip(*GRID, strict=True)
    )
    logprobs = torch.full_like(log_ratio, -1.0)[:, None].requires_grad_()
    result = fastrl.policy_loss(
        logprobs,
        A,
        mask,
        old_logprobs=logprobs.detach() - log_ratio[:, None],
        ref_logprobs=logprobs.detach() + ref_distance[:, None],
        objective=o,
        backend=backend,
    )
    result.loss.backward()
    return result, logprobs.grad[:, 0]


@pytest.mark.parametrize("o", OBJECTIVES, ids=name_of)
def test_an_active_token_has_a_gradient(backend, o):
    runs(backend, o)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        mask = torch.ones(len(GRID), 1)
        result, gradient = policy_loss(backend, o, dtype, mask)
        assert result.loss.isfinite()
        assert not gradient.isnan().any()
        assert all(value.isfinite() for value in result.metrics.values())
        flat = torch.tensor([abs(d) > 80 and abs(k) > 80 for d, k, _ in GRID])
        if o.surrogate in ("ppo_clip", "sapo"):  # saturated on both sides: nothing moves
            assert (gradient[flat] == 0).all()


@pytest.mark.parametrize("o", OBJECTIVES[:: len(KL_GRADIENTS)], ids=name_of)
def test_a_masked_token_has_none(backend, o):
    runs(backend, o)
    result, gradient = policy_loss(backend, o, torch.float32, torch.zeros(len(GRID), 1))
    assert result.loss == 0
    assert (gradient == 0).all()
    assert all(value == 0 for value in result.metrics.values())


@pytest.mark.parametrize("o", OBJECTIVES, ids=name_of)
def test_float32_has_the_numbers_of_float64(backend, o):
    runs(backend, o)
    mask = torch.ones(len(GRID), 1)
    _, exact = policy_loss("reference", o, torch.float64, mask)
    _, came = policy_loss(backend, o, torch.float32, mask)
    inside = torch.tensor([abs(d) <= 20 and abs(k) <= 20 for d, k, _ in GRID])
    size = exact.abs() + 1e-3
    if o.kl_gradient == "bias-corrected":  # its two parts may cancel
        size = size + torch.tensor([2.718281828 ** (min(d, 40) + max(k, 0)) for d, k, _ in GRID])
    error = (came.double() - exact).abs() / size
    assert error[inside].max() < 1e-5


@pytest.mark.parametrize("level", ["token", "sequence", "sequence-token"])
@pytest.mark.parametrize("log_ratio", [0.0, -3.0])
@pytest.mark.parametrize("distance", [0.01, 1.0, 17.0, 30.0, 39.9, -17.0, -39.9])
def test_the_slope_of_the_bias_corrected_k3_is_the_distance(backend, distance, log_ratio, level):
    """d(r k3) = -r x for x = ref - logprob: subtracting its two parts of size e^x would cancel."""
    o = Objective(kl_coef=1.0, kl_gradient="bias-corrected", level=level)
    dtype = torch.float64 if backend == "reference" else torch.float32
    for kind in {torch.float32, dtype}:
        logprobs = torch.full((1, 2), -45.0, dtype=kind, requires_grad=True)
        ref, old = logprobs.detach() + distance, logprobs.detach() - log_ratio
        fastrl.policy_loss(
            logprobs,
            torch.zeros(1),
            torch.tensor([[0, 1]]),
            old_logprobs=old,
            ref_logprobs=ref,
            objective=o,
            backend=backend,
        ).loss.backward()
        expected = -math.exp(log_ratio) * (ref - logprobs.detach())[0, 1].item()
        assert logprobs.grad[0, 1].item() == pytest.approx(expected, rel=1e-6)

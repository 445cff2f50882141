"""Tokens whose log-probability is -inf: banned from the vocabulary, but sampled.

The difference of two equal infinite log-probabilities is 0. An infinite log-probability is a
constant without gradient.
"""

import dataclasses
import math

import pytest
import torch

import fastrl
from fastrl import RolloutCorrection
from fastrl.contract import KL_ESTIMATORS, KL_GRADIENTS

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("poisoned_memory")]

INF = math.inf
MASK = torch.ones(1, 3)
PRESETS = ("dapo", "gspo", "gmpo", "cispo", "sapo")


def loss_of(backend, objective, advantage=1.0, *, banned=True, old=True, ref=None):
    """Three tokens, the first of which is banned (or has the log-probability -2 everywhere)."""
    logprobs = torch.tensor([[-INF if banned else -2.0, -1.0, -0.5]], requires_grad=True)
    older = torch.tensor([[-INF if banned else -2.0, -1.125, -0.375]])
    result = fastrl.policy_loss(
        logprobs,
        torch.tensor([advantage]),
        MASK,
        old_logprobs=older if old else None,
        ref_logprobs=ref,
        objective=objective,
        backend=backend,
    )
    result.loss.backward()
    return result, logprobs.grad[0]


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("preset", PRESETS)
def test_the_ratio_is_one_and_the_slope_zero(backend, preset, advantage, old):
    result, slope = loss_of(backend, preset, advantage, old=old)
    expected, other_slope = loss_of(backend, preset, advantage, banned=False, old=old)
    assert slope[0] == 0
    assert torch.equal(slope[1:], other_slope[1:])
    for name in ("ratio_mean", "ratio_max", "ratio_min", "kl_old", "clip_fraction"):
        assert result.metrics[name] == expected.metrics[name], name
    if preset != "cispo":  # its loss is a multiple of the log-probability
        assert result.loss == expected.loss


@pytest.mark.parametrize("preset", ["cispo", "reinforce"])
def test_a_loss_that_multiplies_the_logprob_is_infinite_unless_the_advantage_is_zero(
    backend, preset
):
    for advantage, loss in ((1.0, INF), (-1.0, -INF), (0.0, 0.0)):
        result, slope = loss_of(backend, preset, advantage)
        assert result.loss == loss
        assert slope[0] == 0
        assert slope.isfinite().all()


@pytest.mark.parametrize("form", ["policy_loss", "logits_policy_loss"])
@pytest.mark.parametrize("gradient", KL_GRADIENTS)
@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
@pytest.mark.some_on("triton", "cuda")
def test_a_banned_token_has_no_kl_to_a_finite_reference(backend, form, estimator, gradient):
    """It would be 5e34 nats, without a gradient; the other tokens keep theirs."""
    logits = torch.tensor([[[-INF, 0.0], [0.5, 0.0], [0.0, 0.0]]])
    ids = torch.zeros(1, 3, dtype=torch.int64)
    logprobs = fastrl.token_logprobs(logits, ids, backend=backend)
    older, ref = torch.tensor([[-1.0, -0.5, -0.75]]), torch.tensor([[-1.0, -0.75, -0.5]])
    kl = {"kl_coef": 1.0, "kl_estimator": estimator, "kl_gradient": gradient}
    o = fastrl.Objective(aggregation="token-sum", **kl)

    def outcome(mask):
        x = (logprobs if form == "policy_loss" else logits).clone().requires_grad_()
        beside = [ids] * (form != "policy_loss")
        result = getattr(fastrl, form)(
            x,
            *beside,
            torch.zeros(1),
            mask,
            old_logprobs=older,
            ref_logprobs=ref,
            objective=o,
            backend=backend,
        )
        result.loss.backward()
        return result.loss.item(), (result.metrics["kl"] * mask.sum()).item(), x.grad

    found, wanted = outcome(MASK), outcome(torch.tensor([[0.0, 1.0, 1.0]]))
    assert found[:2] == pytest.approx(wanted[:2], rel=1e-6)
    assert torch.equal(found[2], wanted[2])


@pytest.mark.parametrize("objective", ["cispo", "reinforce"])
@pytest.mark.parametrize("drop", ["weight", "rollout", "off policy"])
def test_a_banned_token_that_is_dropped_costs_nothing(backend, objective, drop):
    logprobs = torch.tensor([[-1.0, -2.0], [-INF, -1.0]], requires_grad=True)
    o, options = fastrl.Objective.preset(objective), {}
    if drop == "weight":
        options = {"policy_weights": torch.tensor([[1.0, 1.0], [0.0, 0.0]])}
    elif drop == "rollout":
        correction = RolloutCorrection(kind="mask", low=0.5, high=2.0)
        o = dataclasses.replace(o, rollout_correction=correction)
        options = {
            "old_logprobs": torch.tensor([[-1.0, -2.0], [-9.0, -9.0]]),
            "rollout_logprobs": torch.tensor([[-1.0, -2.0], [-1.0, -1.0]]),
        }
    else:
        o = dataclasses.replace(o, off_policy_threshold=0.5)
        options = {"rollout_logprobs": torch.tensor([[-1.0, -2.0], [-1.0, -1.0]])}
    advantages = torch.tensor([1.0, -1.0])
    mask = torch.ones(2, 2)
    result = fastrl.policy_loss(logprobs, advantages, mask, objective=o, **options, backend=backend)
    result.loss.backward()
    assert result.loss == 0.75  # of the first sequence: 3 / 4
    assert logprobs.grad.tolist() == [[-0.25, -0.25], [0.0, 0.0]]


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_sum_over_a_row_of_banned_tokens_is_zero(backend, softcap):
    logits = torch.zeros(1, 3, 4200)
    logits[0, 0] = -INF
    logits[0, 1, 7] = math.nan
    stats = fastrl.token_stats(
        logits,
        torch.zeros(1, 3, dtype=torch.int64),
        outputs=("logsumexp", "logprobs"),
        logit_softcap=softcap,
        backend=backend,
    )
    assert stats.logsumexp[0, 0] == -INF
    assert stats.logsumexp[0, 1].isnan()
    torch.testing.assert_close(stats.logsumexp[0, 2], torch.tensor(math.log(4200)))
    assert stats.logprobs[0, :2].isnan().all()  # there is no distribution


BLOCK = 4096  # columns that the kernels of the CPU reduce at a time


def test_a_softcap_over_a_bias_that_bans_a_block(backend):
    hidden = torch.randn(2, 4, requires_grad=True)
    weight, ids = torch.randn(2 * BLOCK, 4), torch.tensor([0, 1])
    bias = torch.zeros(2 * BLOCK)
    bias[BLOCK:] = -INF
    linear = fastrl.linear_token_stats(
        hidden, weight, ids, bias=bias, logit_softcap=30.0, backend=backend
    )
    allowed = (hidden @ weight[:BLOCK].T).detach()
    expected = fastrl.token_stats(allowed, ids, logit_softcap=30.0, backend="reference")
    torch.testing.assert_close(linear.logprobs, expected.logprobs)
    torch.testing.assert_close(linear.entropy, expected.entropy)
    (linear.logprobs + linear.entropy).sum().backward()
    assert hidden.grad.isfinite().all()

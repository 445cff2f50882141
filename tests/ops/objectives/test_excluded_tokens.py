"""Tokens whose log-probability is -inf: banned from the vocabulary, but sampled.

The difference of two equal infinite log-probabilities is 0. An infinite log-probability is a
constant without gradient.
"""

import dataclasses
import math

import pytest
import torch

import fastrl
from fastrl import Objective, RolloutCorrection
from fastrl.contract import KL_ESTIMATORS, KL_GRADIENTS

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("poisoned_memory")]

INF = math.inf
MASK = torch.ones(1, 3)
PRESETS = ("dapo", "gspo", "gmpo", "cispo", "sapo")
LEVELS = ("token", "sequence", "sequence-token")


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


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("gradient", KL_GRADIENTS)
@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_the_kl_of_a_token_that_the_reference_bans_too_is_zero(backend, estimator, gradient, level):
    o = Objective(kl_coef=0.1, kl_estimator=estimator, kl_gradient=gradient, level=level)
    banned = torch.tensor([[-INF, -1.5, -0.75]])
    allowed = torch.tensor([[-2.0, -1.5, -0.75]])
    result, slope = loss_of(backend, o, ref=banned)
    expected, other_slope = loss_of(backend, o, banned=False, ref=allowed)
    torch.testing.assert_close(result.loss, expected.loss)
    torch.testing.assert_close(result.metrics["kl"], expected.metrics["kl"])
    assert slope[0] == 0
    torch.testing.assert_close(slope[1:], other_slope[1:])


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_kl_divergence_of_a_token_that_both_ban_is_zero(estimator):
    pair = [torch.tensor([-INF, -1.0], requires_grad=True) for _ in range(2)]
    kl = fastrl.kl_divergence(*pair, estimator=estimator)
    kl.sum().backward()
    assert kl.tolist() == [0.0, 0.0]
    assert all(x.grad[0] == 0 for x in pair)
    assert all(x.grad.isfinite().all() for x in pair)


@pytest.mark.parametrize("ref", [-INF, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("gradient", KL_GRADIENTS)
@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_a_token_that_the_reference_alone_bans_has_the_slope_of_its_policy(
    backend, estimator, gradient, ref
):
    """The KL is held at a bound: of its slope only what the ratio adds is left."""
    o = Objective(kl_coef=0.1, kl_estimator=estimator, kl_gradient=gradient)
    slopes = []
    for distance in (ref, -400.0):
        _, slope = loss_of(backend, o, banned=False, ref=torch.tensor([[distance, -1.5, -0.75]]))
        slopes.append(slope)
    assert slopes[0].isfinite().all()
    assert torch.equal(*slopes)


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


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("kind", ["truncate", "mask", "filter"])
def test_a_rollout_that_bans_the_token_too_weighs_it_by_one(backend, kind, level):
    rollout = torch.tensor([[-INF, -1.0, -1.0]])
    old = torch.tensor([[-INF, -1.0, -1.0]])
    o = Objective(rollout_correction=RolloutCorrection(kind=kind, level=level, high=4.0))
    result = fastrl.policy_loss(
        old.clone(), MASK[0, :1], MASK, old_logprobs=old, rollout_logprobs=rollout,
        objective=o, backend=backend,
    )  # fmt: skip
    assert result.loss == -1


@pytest.mark.parametrize("preset", ["dapo", "gspo", "gmpo", "sapo"])
@pytest.mark.parametrize("on_policy", [True, False])
def test_from_logits_only_the_other_tokens_have_a_gradient(backend, preset, on_policy):
    scores, ids, bias = torch.randn(1, 3, 7), torch.tensor([[2, 1, 0]]), torch.zeros(7)
    bias[2] = -INF
    old = None if on_policy else fastrl.token_logprobs(scores + bias, ids)
    options = {"old_logprobs": old, "objective": preset, "backend": backend}
    logits, hidden = ((scores + x).requires_grad_() for x in (bias, 0.0))
    losses = [
        fastrl.logits_policy_loss(logits, ids, MASK[0, :1], MASK, **options),
        fastrl.linear_policy_loss(
            hidden, torch.eye(7), ids, MASK[0, :1], MASK, bias=bias, **options
        ),
    ]
    for result, leaf in zip(losses, (logits, hidden), strict=True):
        result.loss.backward()
        assert result.loss.isfinite()
        assert all(value.isfinite() for value in result.metrics.values())
        assert (leaf.grad[0, 0] == 0).all()
        assert leaf.grad.isfinite().all()
        assert (leaf.grad[0, 1:] != 0).any()
    torch.testing.assert_close(losses[0].loss, losses[1].loss)
    torch.testing.assert_close(logits.grad, hidden.grad)


@pytest.mark.parametrize("preset", ["dapo", "gspo", "cispo", "reinforce"])
def test_a_broken_advantage_still_breaks_the_gradient_of_a_banned_token(backend, preset):
    result, slope = loss_of(backend, preset, math.nan)
    assert result.loss.isnan()
    assert slope.isnan().all()


def test_a_token_that_has_become_impossible_is_held_too(backend):
    logprobs = torch.tensor([[-1.0, -INF, -2.0]], requires_grad=True)
    old = torch.tensor([[-1.0, -1.0, -2.0]])
    result = fastrl.policy_loss(logprobs, -MASK[0, :1], MASK, old_logprobs=old, backend=backend)
    result.loss.backward()
    assert result.loss.isfinite()
    assert logprobs.grad.isfinite().all()
    assert logprobs.grad[0, 1] == 0


BLOCK = 4096  # columns that the kernels of the CPU reduce at a time


@pytest.mark.parametrize("vocabulary", [2 * BLOCK + 100])
@pytest.mark.parametrize("rows", [1, 40])  # few rows are shared out over the threads, many are not
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "banned", [slice(0, BLOCK), slice(BLOCK, 2 * BLOCK), slice(BLOCK, 2 * BLOCK + 100)]
)
def test_a_softcap_over_a_block_of_banned_tokens(backend, vocabulary, rows, dtype, banned):
    logits = torch.randn(1, rows, vocabulary).to(dtype)
    logits[..., banned] = -INF
    ids = torch.full((1, rows), BLOCK - 1 if banned.start else BLOCK)
    results = []
    for given, name in ((logits, backend), (logits.double(), "reference")):
        leaf = given.clone().requires_grad_()
        stats = fastrl.token_stats(leaf, ids, logit_softcap=30.0, backend=name)
        (stats.logprobs + stats.entropy).sum().backward()
        results.append([stats.logprobs.detach(), stats.entropy.detach(), leaf.grad])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=4e-3, atol=1e-5)


def test_a_softcap_over_a_banned_half_of_the_vocabulary(backend):
    logits = torch.zeros(1, 2 * BLOCK)
    logits[:, BLOCK:] = -INF
    logprob = fastrl.token_logprobs(logits, torch.tensor([0]), logit_softcap=30.0, backend=backend)
    torch.testing.assert_close(logprob, torch.tensor([-math.log(BLOCK)]))


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

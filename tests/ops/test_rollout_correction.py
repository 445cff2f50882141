"""Importance weights against the rollout engine: by hand, detached, within bounds."""

import itertools
import math

import pytest
import torch

import fastrl
from fastrl import Objective, RolloutCorrection
from tests.ops.inputs import cu_seqlens, packed, policy_inputs
from tests.ops.policy_loss_cases import assert_exact, run

KINDS = ("truncate", "mask")
LEVELS = ("token", "sequence", "geometric")


def weights_of(backend, differences, mask=None, lengths=None, **correction):
    """is_t of tokens with these log(old / rollout): minus the gradient at advantage 1."""
    old = torch.full_like(differences, -1.0)
    logprobs = old.clone().requires_grad_()
    mask = torch.ones_like(old) if mask is None else mask
    result = fastrl.policy_loss(
        logprobs,
        torch.ones_like(old),
        mask,
        old_logprobs=old,
        rollout_logprobs=old - differences,
        objective=Objective(
            aggregation="token-sum", rollout_correction=RolloutCorrection(**correction)
        ),
        cu_seqlens=None if lengths is None else cu_seqlens(lengths),
        backend=backend,
    )
    result.loss.backward()
    return -logprobs.grad


# log ratios ln 1, ln 4, ln 1/4, ln 2; product over the sequence 2, geometric mean 2^(1/4) = 1.1892
DIFFERENCES = torch.tensor([[1.0, 4.0, 0.25, 2.0]]).log()
MEAN = 2**0.25
BY_HAND = [
    ("truncate", "token", 0.5, 2.5, [1, 2.5, 0.5, 2]),
    ("mask", "token", 0.5, 2.5, [1, 0, 0, 2]),
    ("truncate", "sequence", 0.5, 2.5, [2, 2, 2, 2]),
    ("truncate", "sequence", 0.5, 1.5, [1.5] * 4),
    ("mask", "sequence", 0.5, 2.5, [2, 2, 2, 2]),
    ("mask", "sequence", 0.5, 1.5, [0] * 4),
    ("truncate", "geometric", 0.5, 2.5, [MEAN] * 4),
    ("truncate", "geometric", 1.25, 2.5, [1.25] * 4),
    ("mask", "geometric", 0.5, 2.5, [MEAN] * 4),
    ("mask", "geometric", 1.25, 2.5, [0] * 4),
]


@pytest.mark.parametrize(("kind", "level", "low", "high", "expected"), BY_HAND)
def test_weights_by_hand(backend, kind, level, low, high, expected):
    weights = weights_of(backend, DIFFERENCES, kind=kind, level=level, low=low, high=high)
    assert weights[0].tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", LEVELS)
def test_masked_tokens_do_not_enter_the_ratio_of_their_sequence(backend, kind, level):
    mask = torch.tensor([[1, 0, 1, 1]])
    options = {"kind": kind, "level": level, "low": 0.01, "high": 100.0}
    expected = weights_of(backend, DIFFERENCES[:, [0, 2, 3]], **options)
    for poison in (math.nan, 1e30, -math.inf):
        differences = DIFFERENCES.clone()
        differences[0, 1] = poison
        came = weights_of(backend, differences, mask, **options)
        assert came[0, 1] == 0
        assert torch.equal(came[:, [0, 2, 3]], expected)


@pytest.mark.parametrize("level", LEVELS)
def test_packed_sequences_have_separate_ratios(backend, level):
    differences, lengths = torch.randn(4, 6) / 2, [6, 1, 0, 3]
    rows = weights_of(
        backend, differences, torch.arange(6) < torch.tensor(lengths)[:, None], level=level
    )
    flat = weights_of(backend, packed(differences, lengths), lengths=lengths, level=level)
    torch.testing.assert_close(flat, packed(rows, lengths), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", LEVELS)
def test_on_policy_the_current_logprobs_are_compared_with_the_rollout(backend, kind, level):
    # the rollout engine sampled, the trainer is on policy: old_logprobs=None means logprobs
    dtype = torch.float64 if backend == "reference" else torch.float32
    o = Objective(rollout_correction=RolloutCorrection(kind=kind, level=level, low=0.6, high=1.4))
    inputs = policy_inputs(4, 5, dtype, "random")
    assert_exact(backend, o, inputs, use=("rollout_logprobs",))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("difference", [200.0, -200.0, math.inf, -math.inf])
def test_far_apart_engines_give_no_nan(backend, kind, level, difference):
    differences = torch.tensor([[0.0, difference, 0.1]])
    weights = weights_of(backend, differences, kind=kind, level=level, low=0.5, high=2.0)
    assert weights.isfinite().all()
    assert (weights >= 0).all()
    assert (weights <= 2).all()
    if kind == "mask":
        assert weights[0, 1] == 0


def test_the_weight_multiplies_policy_and_kl_but_not_the_entropy(backend):
    inputs = policy_inputs(1, 1, torch.float32, "all")
    inputs["rollout_logprobs"] = inputs["old_logprobs"] - math.log(2)
    use = ("old_logprobs", "ref_logprobs", "entropy")
    options = {"kl_coef": 0.5, "entropy_coef": 0.25}
    plain, gradient, bonus = run(backend, Objective(**options), inputs, use)
    o = Objective(**options, rollout_correction=RolloutCorrection(high=4.0))
    result, doubled, same_bonus = run(backend, o, inputs, (*use, "rollout_logprobs"))
    entropy = 0.25 * inputs["entropy"].sum()
    assert (result.loss + entropy).item() == pytest.approx(2 * (plain.loss + entropy).item())
    assert doubled.item() == pytest.approx(2 * gradient.item())
    assert torch.equal(bonus, same_bonus)


def test_equal_engines_change_nothing(backend):
    inputs = policy_inputs(3, 5, torch.float32)
    inputs["rollout_logprobs"] = inputs["old_logprobs"]
    bounds = ((1.0, 2.0), (0.5, 1.0))  # a bound is within the bounds
    for level, kind, (low, high) in itertools.product(LEVELS, KINDS, bounds):
        correction = RolloutCorrection(kind=kind, level=level, low=low, high=high)
        o = Objective(rollout_correction=correction)
        plain, gradient, _ = run(backend, Objective(), inputs)
        result, same, _ = run(backend, o, inputs, ("old_logprobs", "rollout_logprobs"))
        assert torch.equal(result.loss, plain.loss)
        assert torch.equal(gradient, same)


def test_a_token_dropped_by_the_mask_kind_still_counts_in_the_denominator(backend):
    # as in IcePop: its weight is 0, the mean is over all tokens
    differences = torch.tensor([[0.0, 5.0]])
    logprobs = torch.zeros(1, 2, requires_grad=True)
    result = fastrl.policy_loss(
        logprobs,
        torch.ones(1, 2),
        torch.ones(1, 2),
        rollout_logprobs=-differences,
        objective=Objective(rollout_correction=RolloutCorrection(kind="mask")),
        backend=backend,
    )
    result.loss.backward()
    assert logprobs.grad.tolist() == [[-0.5, 0.0]]
    assert result.metrics["active_tokens"].item() == 2
    assert result.metrics["zero_grad_fraction"].item() == 0.5


def test_the_defaults_are_truncated_importance_sampling():
    correction = RolloutCorrection()
    assert (correction.kind, correction.level) == ("truncate", "token")
    assert (correction.low, correction.high) == (0.0, 2.0)

"""The policy loss on policy, at its extremes, and known failures of others.

Values, also of every option of the objective, are in test_values.py.
"""

import dataclasses
import math

import pytest
import torch

import fastrl
from fastrl import Objective, RolloutCorrection
from fastrl.objective.presets import PRESETS
from tests.calls.entries import ENTRIES, outcome
from tests.ops.closeness import assert_same
from tests.ops.inputs import make_logprobs, widest

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("poisoned_memory")]


@pytest.mark.parametrize("preset", PRESETS)
def test_on_policy_needs_no_old_logprobs(backend, preset):
    entry = ENTRIES[f"policy_loss {preset}"]
    inputs = entry.draw(4, 5, widest(backend))
    inputs["old_logprobs"] = inputs["logprobs"]
    given = outcome(entry, backend, inputs)
    del inputs["old_logprobs"]
    assert_same(outcome(entry, backend, inputs), given)
    for name, value in {"ratio_mean": 1, "ratio_max": 1, "ratio_min": 1, "kl_old": 0}.items():
        assert given[f"metric {name}"] == value


def test_the_extreme_ratios_may_be_at_any_token(backend):
    old, advantages, mask = torch.full((1, 35), -1.0), torch.ones(1), torch.ones(1, 35)
    for at in range(35):
        for shift, name in ((0.5, "ratio_max"), (-0.5, "ratio_min")):
            logprobs = old.index_fill(1, torch.tensor([at]), shift - 1)
            result = fastrl.policy_loss(
                logprobs, advantages, mask, old_logprobs=old, backend=backend
            )
            assert result.metrics[name].item() == pytest.approx(math.exp(shift)), (at, name)


def test_logprobs_and_entropy_are_passed_on(backend):
    logprobs, entropy = make_logprobs(2, 3, dtype=torch.float32), torch.rand(2, 3)
    result = fastrl.policy_loss(
        logprobs, torch.ones(2), torch.ones(2, 3), entropy=entropy, backend=backend
    )
    assert torch.equal(result.logprobs, logprobs)
    assert torch.equal(result.entropy, entropy)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_token_without_advantage_is_not_clipped(backend, preset):
    entry = ENTRIES[f"policy_loss {preset}"]
    inputs = entry.draw(4, 5, torch.float32)
    inputs["logprobs"] = inputs["old_logprobs"] + 3 * torch.randn(4, 5)
    inputs["advantages"].zero_()
    assert outcome(entry, backend, inputs)["metric clip_fraction"] == 0


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        (Objective(), [[1, 0, -1, 0, 0]]),
        (Objective(dual_clip=3.0), [[1, 0, -1, 1, 0]]),
        (Objective(delta=3.0), [[1, 0, -1, 1, 0]]),
        (Objective(level="sequence", clip_high=0.1), [[1, 1, 0, 0, 0]]),
        (Objective(surrogate="cispo", clip_low=1.0, clip_high=1.0), [[0, 0, 0, 1, 0]]),
        (lambda logprobs, old, ref, advantages: logprobs, [[0, 0, 0, 0, 0]]),
    ],
)
def test_the_tokens_on_which_a_bound_acts(objective, expected):
    ratios = torch.tensor([[1.5, 0.5, 0.5, 5.0, float("nan")]])  # exp of their mean log is 1.17
    advantages, mask = torch.tensor([[1.0, 1.0, -1.0, -1.0, 1.0]]), torch.tensor([[1, 1, 1, 1, 0]])
    given = {"old_logprobs": torch.full_like(ratios, -2.0), "objective": objective}
    found = fastrl.clipped_tokens(ratios.log() - 2, advantages, mask, **given)
    assert found.dtype == torch.int8
    assert found.tolist() == expected
    with pytest.raises(ValueError, match=r"mask must be bool, integer or float 0/1, got 0.5"):
        fastrl.clipped_tokens(ratios, advantages, mask / 2)
    with pytest.raises(ValueError, match="cu_seqlens is needed for sequence-level ratios"):
        fastrl.clipped_tokens(ratios[0], advantages[0], mask[0], objective="gspo")


def test_an_objective_that_overwrites_what_its_gradient_needs_is_refused():
    def overwrites(logprobs, old, ref, advantages):
        ratio = (logprobs - old).exp()
        loss = ratio * advantages
        ratio.mul_(2)
        return loss

    inputs = [make_logprobs(2, 3).requires_grad_(), torch.ones(2), torch.ones(2, 3)]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        fastrl.policy_loss(*inputs, objective=Objective(surrogate=overwrites)).loss.backward()


@pytest.mark.not_on("triton")  # long
def test_a_long_batch_is_as_exact_as_a_short_one(backend):
    # sums in double: a million tokens must not cost digits
    logprobs = make_logprobs(8, 131072, dtype=torch.float32)
    advantages = torch.full((8,), 0.1)
    result = fastrl.policy_loss(
        logprobs, advantages, torch.ones_like(logprobs), objective="ppo", backend=backend
    )
    assert result.loss.item() == pytest.approx(-0.1, rel=2e-6)
    exact = -logprobs.double().mean()
    assert result.metrics["entropy"].item() == pytest.approx(float(exact), rel=2e-6)


@pytest.mark.parametrize("name", ["logprobs", "old_logprobs", "ref_logprobs", "rollout_logprobs"])
def test_what_is_no_log_probability_is_refused(name):
    """Negative log-likelihoods and probabilities, of enough tokens that count."""
    correction = RolloutCorrection() if name == "rollout_logprobs" else None
    objective = Objective(kl_coef=0.1, rollout_correction=correction)
    mask = torch.ones(4, 6)
    mask[:, 5] = 0
    given = dict.fromkeys(("logprobs", "old_logprobs", "ref_logprobs"), make_logprobs(4, 6))
    given |= {"advantages": torch.ones(4), "mask": mask, "objective": objective}
    given |= {"rollout_logprobs": given["logprobs"]} if correction else {}
    usual = given["logprobs"].masked_fill(mask == 0, 7.0)

    def loss(values, mask=mask):
        return fastrl.policy_loss(**{**given, name: values, "mask": mask}).loss

    for wrong in (-usual, usual.exp()):
        with pytest.raises(ValueError, match=f"^{name} must be log-probabilities .* from 0\\."):
            loss(wrong)
    one_below = (-usual).index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(-0.01).double())
    few = torch.where(torch.arange(24).view(4, 6) < 17, mask, 0)  # 15 that count
    for accepted in (usual, one_below, 0 * usual + 0.05):
        loss(accepted)
    loss(-usual, few)


def test_an_objective_is_frozen_and_equal_by_value():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Objective().clip_low = 0.1
    assert Objective.preset("ppo", clip_low=0.3) == Objective(clip_low=0.3)
    assert dataclasses.replace(Objective(), kl_coef=0.1).kl_coef == 0.1

"""The policy loss on policy, at its extremes, and known failures of others.

Values are in test_values.py, options of the objective in objectives/.
"""

import math

import pytest
import torch

import fastrl
from fastrl import Objective
from fastrl.objective.presets import PRESETS
from tests.ops.closeness import assert_same
from tests.ops.entry_points import ENTRIES, outcome
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
    old, advantages, mask = torch.zeros(1, 35), torch.ones(1), torch.ones(1, 35)
    for at in range(35):
        for shift, name in ((0.5, "ratio_max"), (-0.5, "ratio_min")):
            logprobs = old.index_fill(1, torch.tensor([at]), shift)
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

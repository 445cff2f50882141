"""The policy loss against the oracle: every preset, layout and dtype, and known failures of others.

Options of the objective are in test_objective_options.py, weights in test_term_weights.py.
"""

import math

import pytest
import torch
from hypothesis import given

import fastrl
from fastrl import Objective
from fastrl.objective.presets import PRESETS
from tests.ops.inputs import (
    FLOAT_DTYPES,
    MASKS,
    dtypes,
    filled_shapes,
    in_layout,
    layouts,
    make_logprobs,
    mask_kinds,
    policy_inputs,
    seeds,
)
from tests.ops.policy_loss_cases import assert_exact, pack, run, widest

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("poisoned_memory")]


@pytest.mark.parametrize("dtype", [torch.float64, *FLOAT_DTYPES], ids=str)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_exact_in_every_dtype(backend, preset, dtype):
    if backend != "reference" and dtype == torch.float64:
        pytest.skip("compiled backends take no float64")
    # gspo and luspo clip at 3e-4: noise of that size puts ratios on both sides
    noise = 5e-4 if preset in ("gspo", "luspo") and dtype.itemsize > 2 else 0.4
    assert_exact(backend, preset, policy_inputs(5, 6, dtype, noise=noise))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_exact_under_every_mask(backend, preset, mask):
    assert_exact(backend, preset, policy_inputs(4, 5, widest(backend), mask))


@pytest.mark.parametrize("preset", PRESETS)
def test_on_policy_needs_no_old_logprobs(backend, preset):
    inputs = policy_inputs(4, 5, widest(backend))
    result = assert_exact(backend, preset, inputs, use=())
    for name, value in {"ratio_mean": 1, "ratio_max": 1, "ratio_min": 1, "kl_old": 0}.items():
        assert result.metrics[name].item() == value
    given_old, gradient, _ = run(backend, preset, {**inputs, "old_logprobs": inputs["logprobs"]})
    absent, same_gradient, _ = run(backend, preset, inputs, use=())
    assert torch.equal(given_old.loss, absent.loss)
    assert torch.equal(gradient, same_gradient)


@pytest.mark.parametrize("lengths", [None, [3, 7, 1, 5], [0, 7, 0, 2]], ids=str)
@pytest.mark.parametrize("per", ["sequence", "token"])
@pytest.mark.parametrize("preset", ["grpo", "gspo", "gmpo"])
def test_advantages_per_sequence_and_per_token(backend, preset, per, lengths):
    inputs = policy_inputs(4, 7, widest(backend), "random")
    if per == "sequence":
        inputs["advantages"] = inputs["advantages"][:, 0]
    inputs = inputs if lengths is None else pack(inputs, lengths)
    assert_exact(backend, preset, inputs, lengths=lengths)


@given(filled_shapes, layouts, layouts, mask_kinds, dtypes, seeds)
def test_any_shape_layout_mask_and_dtype(backend, shape, layout, other, mask, dtype, seed):
    torch.manual_seed(seed)
    inputs = policy_inputs(*shape, dtype, mask)
    for name in ("old_logprobs", "ref_logprobs", "mask"):
        inputs[name] = in_layout(inputs[name], layout)
    for name in ("logprobs", "advantages"):
        inputs[name] = in_layout(inputs[name], other)
    assert_exact(backend, Objective(kl_coef=0.1, aggregation="seq-mean-token-mean"), inputs)


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
    inputs = policy_inputs(2, 3, torch.float32)
    result, _, _ = run(backend, Objective(entropy_coef=0.1), inputs, ("entropy",))
    assert torch.equal(result.logprobs, inputs["logprobs"])
    assert torch.equal(result.entropy, inputs["entropy"])


@pytest.mark.parametrize("preset", PRESETS)
def test_a_token_without_advantage_is_not_clipped(backend, preset):
    inputs = policy_inputs(4, 5, torch.float32)
    inputs["logprobs"] = inputs["old_logprobs"] + 3 * torch.randn(4, 5)
    inputs["advantages"] = torch.zeros(4)
    result, _, _ = run(backend, preset, inputs)
    assert result.metrics["clip_fraction"] == 0


def test_an_objective_that_overwrites_what_its_gradient_needs_is_refused():
    def overwrites(logprobs, old, ref, advantages):
        ratio = (logprobs - old).exp()
        loss = ratio * advantages
        ratio.mul_(2)
        return loss

    inputs = policy_inputs(2, 3, torch.float32)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run("auto", Objective(surrogate=overwrites), inputs)


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

"""Masked tokens are inert in the policy loss, and extreme log-ratios never give NaN."""

import math

import pytest
import torch
from hypothesis import given

import fastrl
from fastrl import Objective, RolloutCorrection
from fastrl.contract import AGGREGATIONS
from fastrl.objective.presets import PRESETS
from tests.ops.inputs import (
    POISONS,
    cu_seqlens,
    filled_shapes,
    poisons,
    policy_inputs,
    seeds,
)
from tests.ops.policy_loss_cases import needed, pack, run

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.not_on("triton"),
    pytest.mark.usefixtures("poisoned_memory"),
]

EVERYTHING = {
    "kl_coef": 0.1,
    "entropy_coef": 0.05,
    "rollout_correction": RolloutCorrection(level="geometric"),
}
FLOATS = ("logprobs", "old_logprobs", "ref_logprobs", "rollout_logprobs", "entropy", "advantages")


def assert_same_to_the_bit(one, other):
    for a, b in zip(one[1:], other[1:], strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    assert torch.equal(one[0].loss, other[0].loss)
    assert one[0].metrics.keys() == other[0].metrics.keys()
    assert all(torch.equal(one[0].metrics[name], other[0].metrics[name]) for name in one[0].metrics)


def grouping(o, sequences):
    return {"group_size": sequences} if o.aggregation == "prompt-mean" else {}


@pytest.mark.parametrize("poison", POISONS, ids=str)
@pytest.mark.parametrize("preset", PRESETS)
def test_values_at_masked_tokens_change_no_bit(backend, preset, poison):
    o = Objective.preset(preset, **EVERYTHING)
    inputs = policy_inputs(4, 6, torch.float32, "random")
    inputs["mask"][1] = False
    clean = run(backend, o, inputs, needed(o))
    for name in FLOATS:
        inputs[name] = inputs[name].masked_fill(~inputs["mask"], poison)
    dirty = run(backend, o, inputs, needed(o))
    assert_same_to_the_bit(clean, dirty)
    for gradient in dirty[1:]:
        assert (gradient[~inputs["mask"]] == 0).all()


@given(filled_shapes, poisons, seeds)
def test_one_poisoned_input_at_a_time_changes_no_bit(backend, shape, poison, seed):
    torch.manual_seed(seed)
    o = Objective(level="sequence", **EVERYTHING)
    inputs = policy_inputs(*shape, torch.float32, "random")
    clean = run(backend, o, inputs, needed(o))
    for name in FLOATS:
        dirty = {**inputs, name: inputs[name].masked_fill(~inputs["mask"], poison)}
        assert_same_to_the_bit(clean, run(backend, o, dirty, needed(o)))


def test_the_advantage_of_a_masked_sequence_may_be_nan(backend):
    inputs = policy_inputs(4, 5, torch.float32, "one-row-masked")
    inputs["advantages"] = torch.tensor([1.0, -1.0, 0.5, 2.0])
    clean = run(backend, "grpo", inputs)
    inputs["advantages"][2] = math.nan
    assert_same_to_the_bit(clean, run(backend, "grpo", inputs))


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("options", [{}, EVERYTHING, {"level": "sequence"}], ids=[*"abc"])
def test_an_all_masked_batch_has_loss_and_gradient_zero(backend, options, aggregation, packing):
    norm = {"length_norm": 8.0} if aggregation == "seq-mean-token-sum-norm" else {}
    o = Objective(**options, aggregation=aggregation, **norm)
    inputs = policy_inputs(4, 5, torch.float32, "none")
    for name in FLOATS:
        inputs[name] = torch.full_like(inputs[name], math.nan)
    bounds = {}
    if packing:
        inputs, bounds = pack(inputs, [5, 0, 2, 3]), {"cu_seqlens": cu_seqlens([5, 0, 2, 3])}
    for normalizer in (None, 3.0) if aggregation != "token-sum" else (None,):
        result, *gradients = run(
            backend, o, inputs, needed(o), normalizer=normalizer, **grouping(o, 4), **bounds
        )
        assert result.loss.item() == 0
        assert all((g == 0).all() for g in gradients if g is not None)
        assert all(value.item() == 0 for value in result.metrics.values())


@pytest.mark.parametrize("preset", PRESETS)
def test_a_masked_sequence_counts_for_nothing(backend, preset):
    inputs = policy_inputs(4, 5, torch.float32, "all")
    inputs["mask"][2] = False
    with_it, gradient, _ = run(backend, preset, inputs)
    others = {name: x[[0, 1, 3]] for name, x in inputs.items()}
    without, expected, _ = run(backend, preset, others)
    torch.testing.assert_close(with_it.loss, without.loss, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(gradient[[0, 1, 3]], expected, rtol=1e-6, atol=1e-9)
    assert (gradient[2] == 0).all()
    for name, value in without.metrics.items():
        torch.testing.assert_close(with_it.metrics[name], value, rtol=1e-6, atol=1e-7)


def test_a_masked_sequence_in_a_prompt_group(backend):
    # the numerator and the denominator use the same mask
    o = Objective(aggregation="prompt-mean")
    inputs = policy_inputs(4, 5, torch.float32, "all")
    inputs["mask"][:2] = False
    _, gradient, _ = run(backend, o, inputs, group_size=2)
    rest = {name: x[2:] for name, x in inputs.items()}
    _, expected, _ = run(backend, o, rest, group_size=2)
    assert torch.equal(gradient[2:], expected)


def test_loss_matrix_with_masked_columns(backend):
    # losses [[1, 100], [1, -50]] under the mask [[1, 0], [1, 0]]: 1, never 26
    logprobs = torch.tensor([[-1.0, -100.0], [-1.0, 50.0]], requires_grad=True)
    result = fastrl.policy_loss(
        logprobs,
        torch.ones(2),
        torch.tensor([[1, 0], [1, 0]]),
        objective="reinforce",
        backend=backend,
    )
    result.loss.backward()
    assert result.loss.item() == 1.0
    assert logprobs.grad.tolist() == [[-0.5, 0.0], [-0.5, 0.0]]


def test_nan_under_the_mask_of_the_old_logprobs(backend):
    logprobs = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    result = fastrl.policy_loss(
        logprobs,
        torch.ones(1),
        torch.tensor([[1, 0]]),
        old_logprobs=torch.tensor([[0.0, math.nan]]),
        backend=backend,
    )
    result.loss.backward()
    assert result.loss.item() == pytest.approx(-math.exp(-1))
    assert logprobs.grad.tolist() == [pytest.approx([-math.exp(-1), 0])]


def gradient_at_far_ratios(backend, o, dtype, log_ratio, advantage, active):
    logprobs = torch.full((1, 4), -1.0, dtype=dtype, requires_grad=True)
    far = logprobs.detach().clone()
    far[0, 2] -= log_ratio
    mask = torch.tensor([[True, True, active, True]])
    result = fastrl.policy_loss(
        logprobs,
        torch.tensor([advantage]),
        mask,
        old_logprobs=far,
        ref_logprobs=far,
        objective=o,
        backend=backend,
    )
    result.loss.backward()
    assert result.loss.isfinite()
    assert all(value.isfinite() for value in result.metrics.values())
    return logprobs.grad


@pytest.mark.parametrize("active", [True, False])
@pytest.mark.parametrize("log_ratio", [200.0, -200.0])
@pytest.mark.parametrize("preset", PRESETS)
def test_far_log_ratios_stay_finite(backend, preset, log_ratio, active):
    for kl_estimator in ("k1", "k2", "k3", "abs"):
        o = Objective.preset(preset, kl_coef=0.1, kl_estimator=kl_estimator)
        for advantage in (1.0, -1.0, 0.0):
            case = (log_ratio, advantage, active)
            gradient = gradient_at_far_ratios(backend, o, torch.float32, *case)
            assert gradient.isfinite().all()
            assert active or gradient[0, 2] == 0
            for dtype in (torch.bfloat16, torch.float16):
                rounded = gradient_at_far_ratios(backend, o, dtype, *case)
                assert torch.equal(rounded, gradient.to(dtype))


def test_a_token_that_has_become_impossible_is_held_too(backend):
    inputs = {
        "logprobs": torch.tensor([[-1.0, -math.inf, -2.0]]),
        "old_logprobs": torch.tensor([[-1.0, -1.0, -2.0]]),
        "advantages": torch.tensor([-1.0]),
        "mask": torch.ones(1, 3),
    }
    result, gradient, _ = run(backend, "grpo", inputs)
    assert result.loss.isfinite()
    assert gradient.isfinite().all()
    assert gradient[0, 1] == 0


@pytest.mark.parametrize("preset", PRESETS)
def test_nan_at_an_active_token_shows_in_the_loss_and_harms_no_other_sequence(backend, preset):
    inputs = policy_inputs(2, 4, torch.float32, "all")
    inputs["logprobs"][0, 1] = math.nan
    result, gradient, _ = run(backend, preset, inputs)
    assert result.loss.isnan()
    assert gradient[1].isfinite().all()


def test_a_bool_mask_of_other_bytes_means_what_torch_reads(backend):
    mask = torch.frombuffer(bytearray([2, 2, 0, 255]), dtype=torch.bool)[None]
    result = fastrl.policy_loss(
        torch.zeros(1, 4), torch.ones(1), mask, objective="ppo", backend=backend
    )
    assert result.loss.item() == -1.0
    assert result.metrics["active_tokens"].item() == 3
    logprobs = fastrl.token_logprobs(
        torch.zeros(1, 4, 3), torch.zeros(1, 4, dtype=torch.int64), mask=mask, backend=backend
    )
    assert ((logprobs != 0) == mask).all()


def test_a_count_of_zero_weighs_nothing_also_where_empty_sequences_count(backend):
    o = Objective.preset("grpo", convention="trl")
    empty = torch.zeros(2, 3)
    result = fastrl.policy_loss(
        empty, torch.ones(2), empty, normalizer=torch.tensor(0.0), objective=o, backend=backend
    )
    assert result.loss.item() == 0

"""The policy loss: every preset, layout and dtype against the truth, and known failures of others.

Options of the objective are in test_objective_options.py, masks in test_policy_loss_masks.py,
autograd in test_policy_loss_gradients.py.
"""

import math

import pytest
import torch
from hypothesis import given

import fastrl
from fastrl.objective.presets import PRESETS
from tests.ops.closeness import assert_within_budget
from tests.ops.inputs import (
    FLOAT_DTYPES,
    LENGTHS,
    MASKS,
    cu_seqlens,
    dtypes,
    filled_shapes,
    in_layout,
    layouts,
    make_logprobs,
    mask_kinds,
    policy_inputs,
    seeds,
)
from tests.ops.policy_loss_cases import assert_exact, pack, run

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("poisoned_memory")]

DTYPES = (torch.float64, *FLOAT_DTYPES)
METRICS = (
    "policy_loss kl kl_old entropy ratio_mean ratio_max ratio_min clip_low clip_high "
    "clip_fraction active_tokens zero_grad_fraction"
)


def takes(backend, dtype):
    if backend != "reference" and dtype == torch.float64:
        pytest.skip("compiled backends take no float64")


def widest(backend):
    """The widest dtype that a backend takes."""
    return torch.float64 if backend == "reference" else torch.float32


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_exact_in_every_dtype(backend, preset, dtype):
    takes(backend, dtype)
    # gspo and luspo clip at 3e-4: noise of that size puts ratios on both sides
    noise = 5e-4 if preset in ("gspo", "luspo") and dtype.itemsize > 2 else 0.4
    result = assert_exact(backend, preset, policy_inputs(5, 6, dtype, noise=noise))
    assert result.loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


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
    detached = {**inputs, "old_logprobs": inputs["logprobs"]}
    given_old, gradient, _ = run(backend, preset, detached)
    absent, same_gradient, _ = run(backend, preset, detached, use=())
    assert torch.equal(given_old.loss, absent.loss)
    assert torch.equal(gradient, same_gradient)


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("per", ["sequence", "token"])
@pytest.mark.parametrize("preset", ["grpo", "gspo", "gmpo"])
def test_advantages_per_sequence_and_per_token(backend, preset, per, packing):
    inputs, lengths = policy_inputs(4, 7, widest(backend), "random"), None
    if per == "sequence":
        inputs["advantages"] = inputs["advantages"][:, 0]
    if packing:
        lengths = [3, 7, 1, 5]
        inputs = pack(inputs, lengths)
    assert_exact(backend, preset, inputs, lengths=lengths)


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "dr_grpo"])
def test_packed_sequences_give_the_same_as_padded_ones(backend, preset):
    lengths = [3, 5, 1, 7]
    inputs = policy_inputs(4, 7, widest(backend), "random")
    inputs["mask"] &= torch.arange(inputs["mask"].shape[1]) < torch.tensor(lengths)[:, None]
    padded, gradient, _ = run(backend, preset, inputs)
    flat, flat_gradient, _ = run(
        backend, preset, pack(inputs, lengths), cu_seqlens=cu_seqlens(lengths)
    )
    assert_within_budget(flat.loss, padded.loss)
    expected = pack({**inputs, "logprobs": gradient}, lengths)["logprobs"]
    assert_within_budget(flat_gradient, expected, size=expected.abs().max())
    for name, value in padded.metrics.items():
        assert_within_budget(flat.metrics[name], value, size=1 + value.abs())


@pytest.mark.parametrize("preset", ["grpo", "luspo", "gmpo"])
def test_packed_sequences_give_the_same_as_each_alone(backend, preset):
    lengths = [3, 5, 1, 7]
    inputs = policy_inputs(4, 7, widest(backend), "all")
    _, together, _ = run(
        backend, preset, pack(inputs, lengths), cu_seqlens=cu_seqlens(lengths), normalizer=4
    )
    for s, (piece, length) in enumerate(zip(together.split(lengths), lengths, strict=True)):
        one = {name: value[s : s + 1, :length] for name, value in inputs.items()}
        _, alone, _ = run(backend, preset, one, normalizer=4)
        assert_within_budget(piece, alone[0], size=alone.abs().max())


def test_packed_sequences_may_be_empty(backend):
    lengths = [0, 3, 0, 0, 4, 0]
    inputs = pack(policy_inputs(6, 4, widest(backend), "all"), lengths)
    for preset in ("grpo", "gspo", "gmpo"):
        assert_exact(backend, preset, inputs, lengths=lengths)
    inputs["advantages"] = torch.randn(6).to(inputs["logprobs"].dtype)
    assert_exact(backend, "grpo", inputs, lengths=lengths)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0), (0,)], ids=str)
@pytest.mark.parametrize("preset", ["ppo", "reinforce"])
def test_a_batch_without_tokens_has_loss_zero(backend, shape, preset):
    empty = {name: torch.zeros(shape) for name in ("logprobs", "old_logprobs", "advantages")}
    result, gradient, _ = run(backend, preset, {**empty, "mask": torch.ones(shape)})
    assert result.loss.item() == 0
    assert gradient.shape == shape
    assert all(value.item() == 0 for value in result.metrics.values())


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.float32])
def test_masks_are_bool_integer_or_float(backend, dtype):
    inputs = policy_inputs(3, 5, torch.float32)
    expected, gradient, _ = run(backend, "grpo", inputs)
    mask = inputs["mask"].to(dtype)
    if dtype.is_floating_point:
        mask[mask == 0] = -0.0
    result, same, _ = run(backend, "grpo", {**inputs, "mask": mask})
    assert torch.equal(result.loss, expected.loss)
    assert torch.equal(gradient, same)


def test_metrics_have_fixed_names_and_order(backend):
    result, _, _ = run(backend, "grpo", policy_inputs(2, 3, torch.float32))
    assert list(result.metrics) == METRICS.split()


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
    result, _, _ = run(backend, fastrl.Objective(entropy_coef=0.1), inputs, ("entropy",))
    assert torch.equal(result.logprobs, inputs["logprobs"])
    assert torch.equal(result.entropy, inputs["entropy"])


@pytest.mark.parametrize("preset", PRESETS)
def test_a_token_without_advantage_is_not_clipped(backend, preset):
    inputs = policy_inputs(4, 5, torch.float32)
    inputs["logprobs"] = inputs["old_logprobs"] + 3 * torch.randn(4, 5)
    inputs["advantages"] = torch.zeros(4)
    result, _, _ = run(backend, preset, inputs)
    assert result.metrics["clip_fraction"] == 0


def test_nothing_is_mutated(backend):
    inputs = policy_inputs(3, 5, torch.float32)
    before = {name: value.clone() for name, value in inputs.items()}
    objective = fastrl.Objective(
        kl_coef=0.1, entropy_coef=0.1, rollout_correction=fastrl.RolloutCorrection()
    )
    use = ("old_logprobs", "ref_logprobs", "entropy", "rollout_logprobs")
    run(backend, objective, inputs, use)
    assert all(torch.equal(before[name], value) for name, value in inputs.items())


@pytest.mark.parametrize("preset", PRESETS)
def test_two_runs_are_bit_equal(backend, preset):
    inputs = policy_inputs(64, 200, torch.float32, "random")
    (first, one, _), (second, two, _) = (run(backend, preset, inputs) for _ in range(2))
    assert torch.equal(first.loss, second.loss)
    assert torch.equal(one, two)
    assert all(torch.equal(first.metrics[name], second.metrics[name]) for name in first.metrics)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("preset", ["dapo", "grpo", "luspo", "gmpo", "sapo", "reinforce"])
def test_with_a_global_normalizer_the_split_into_micro_batches_does_not_matter(
    backend, preset, size
):
    dtype = widest(backend)
    inputs = policy_inputs(len(LENGTHS), max(LENGTHS), dtype, "all", noise=0.1)
    inputs["mask"] = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    normalizer = sum(LENGTHS) if preset in ("dapo", "reinforce") else len(LENGTHS)
    _, whole, _ = run(backend, preset, inputs)
    parts = []
    for start in range(0, len(LENGTHS), size):
        width = max(LENGTHS[start : start + size])  # each micro-batch padded to its own length
        part = {name: x[start : start + size, :width] for name, x in inputs.items()}
        _, gradient, _ = run(backend, preset, part, normalizer=torch.tensor(float(normalizer)))
        parts.append(torch.nn.functional.pad(gradient, (0, max(LENGTHS) - width)))
    rtol = 1e-6 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(torch.cat(parts), whole, rtol=rtol, atol=1e-12)


@given(filled_shapes, layouts, layouts, mask_kinds, dtypes, seeds)
def test_any_shape_layout_mask_and_dtype(backend, shape, layout, other, mask, dtype, seed):
    torch.manual_seed(seed)
    inputs = policy_inputs(*shape, dtype, mask)
    for name in ("old_logprobs", "ref_logprobs", "mask"):
        inputs[name] = in_layout(inputs[name], layout)
    for name in ("logprobs", "advantages"):
        inputs[name] = in_layout(inputs[name], other)
    assert_exact(backend, fastrl.Objective(kl_coef=0.1, aggregation="seq-mean-token-mean"), inputs)


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

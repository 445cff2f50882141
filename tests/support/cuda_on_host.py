"""The operators of the CUDA backend on CPU tensors: its kernels in their host build.

Registers them under the CPU key of `fastrl_cuda`, so that `backend="cuda"` goes the whole way from
the public function to the kernel.
"""

import ctypes

import pytest
import torch

import fastrl
from fastrl.contract import (
    AGGREGATIONS,
    AggregationArguments,
    Coefficients,
    LossArguments,
    Metrics,
    ObjectiveArguments,
    RowArguments,
    RowStats,
)
from tests.support import cuda_structs as structs
from tests.support import cuda_vocabulary as vocabulary
from tests.support.cuda_host import call, library


def integers(*numbers):
    return map(ctypes.c_int64, numbers)


def sequence_weights(mask, token_ids, ignore_index, cu_seqlens, *others):
    how = AggregationArguments._make(others)
    assert how.group_ids is None
    sequences = structs.Sequences.of(mask, cu_seqlens)
    weights = torch.full((sequences.count,), float("nan"))
    merged = token_ids is not None or mask.dtype != torch.bool
    active = torch.empty(mask.shape if merged else 0, dtype=torch.bool)
    params = structs.SequenceWeightsParams(
        mask=structs.Mask.of(mask),
        token_ids=token_ids,
        ignore_index=ignore_index,
        sequences=sequences,
        aggregation=how.aggregation,
        normalizer=how.normalizer,
        normalizer_tensor=structs.DeviceNumber.of(how.normalizer_tensor),
        length_norm=how.length_norm or max(mask.shape[1], 1),
        count_empty=how.count_empty,
        group_size=how.group_size,
        weights=weights,
        active=active if merged else None,
    )
    assert AGGREGATIONS[how.aggregation] != "prompt-mean" or how.group_size
    call("sequence_weights", "sequence_weights", params)
    return weights, active


def policy_loss_fwd(logprobs, entropy, mask, *others, per_block=0, ranks=1):
    """With `per_block` tokens or sequences the grid is of many blocks on small inputs, too."""
    count = len(LossArguments._fields)
    arguments = LossArguments._make(others[:count])
    objective = ObjectiveArguments._make(others[count:])
    entropy_coef = Coefficients._make(objective.coefficients).entropy_coef
    loss, slope = logprobs.new_empty(()), torch.empty_like(logprobs)
    entropy_slope = torch.empty_like(logprobs) if entropy_coef else logprobs.new_empty(0)
    metrics = logprobs.new_empty(len(Metrics._fields))
    params = structs.PolicyLossParams(
        logprobs=logprobs,
        entropy=entropy,
        mask=mask,
        constants=structs.LossConstants.of(arguments),
        objective=structs.Objective.of(objective),
        sequences=structs.Sequences.of(logprobs, arguments.cu_seqlens),
        loss=loss,
        slope=slope,
        entropy_slope=entropy_slope if entropy_coef else None,
        metrics=metrics,
    )
    call("policy_loss", "policy_loss", params, *integers(per_block, ranks))
    return loss, slope, entropy_slope, metrics


def gae_fwd(rewards, values, mask, terminated, truncated, bootstrap_values, cu_seqlens, gamma, lam):
    advantages, returns = torch.empty_like(rewards), torch.empty_like(rewards)
    inputs = structs.GaeInputs(
        rewards=rewards,
        values=values,
        bootstrap_values=bootstrap_values,
        mask=mask,
        terminated=terminated,
        truncated=truncated,
        # none, per sequence [S], per token [B, T]
        bootstrap=0 if bootstrap_values is None else bootstrap_values.dim(),
    )
    params = structs.GaeParams(
        **{"in": inputs},
        sequences=structs.Sequences.of(rewards, cu_seqlens),
        advantages=advantages,
        returns=returns,
        gamma=gamma,
        decay=gamma * lam,
    )
    call("gae", "gae", params)
    return advantages, returns


def group_advantages_fwd(
    rewards, group_ids, group_size, baseline, scale, correction, eps, singleton
):
    results = {name: torch.empty_like(rewards) for name in ("advantages", "mean", "std")}
    results["informative"] = torch.empty_like(rewards, dtype=torch.bool)
    params = structs.GroupAdvantagesParams(
        rewards=rewards,
        group_ids=group_ids,
        count=rewards.numel(),
        group_size=group_size,
        baseline=baseline,
        scale=scale,
        singleton=singleton,
        correction=correction,
        eps=eps,
        **results,
    )
    call("group_advantages", "group_advantages", params)
    return tuple(results.values())


def rows_and_rest(arguments):
    count = len(RowArguments._fields)
    return RowArguments._make(arguments[:count]), arguments[count:]


def token_stats_fwd(logits, *arguments):
    rows, (with_entropy, with_sum_sq_probs) = rows_and_rest(arguments)
    return vocabulary.token_stats(
        logits, rows, with_entropy=with_entropy, with_sum_sq_probs=with_sum_sq_probs
    )


def token_stats_bwd_(logits, *arguments, grad=None):
    rows, (row_max, log_sum, entropy, *grads, narrow) = rows_and_rest(arguments)
    grad = vocabulary.narrow_half(logits) if narrow else grad
    saved = RowStats._make([None] * len(RowStats._fields))
    saved = saved._replace(row_max=row_max, log_sum=log_sum, entropy=entropy)
    vocabulary.token_stats_backward(logits, rows, saved, grads, grad)


def token_stats_bwd(logits, *arguments):
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    token_stats_bwd_(logits, *arguments, False, grad=grad)
    return grad


def logits_policy_loss_fwd_(logits, *arguments, grad=None):
    rows, others = rows_and_rest(arguments)
    count = len(LossArguments._fields)
    loss = LossArguments._make(others[:count])
    objective = ObjectiveArguments._make(others[count:-1])
    grad = vocabulary.narrow_half(logits) if others[-1] else grad
    return vocabulary.logits_policy_loss(logits, rows, loss, objective, grad, clusters=True)


def logits_policy_loss_fwd(logits, *arguments):
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    return *logits_policy_loss_fwd_(logits, *arguments, False, grad=grad), grad


def scale_(gradient, factor):
    assert factor.numel() == 1
    assert factor.is_floating_point()
    params = structs.ScaleParams(
        type=structs.LogitsParams.DTYPES.index(gradient.dtype),
        gradient=gradient,
        factor=structs.DeviceNumber.of(factor),
    )
    sizes, strides = (
        (ctypes.c_int64 * gradient.dim())(*x) for x in (gradient.shape, gradient.stride())
    )
    found = library("scale").segments_of(gradient.dim(), sizes, strides, ctypes.byref(params))
    if not found & 1:
        raise RuntimeError("gradient must consist of contiguous segments at a constant distance")
    call("scale", "scale", params)


@pytest.fixture(scope="module")
def registered():
    """The operators, for as long as the tests of one file run."""
    operators = register()
    yield
    operators._destroy()


def register():
    """Register the operators, for as long as what this returns exists."""
    operators = torch.library.Library("fastrl_cuda", "IMPL")
    small = (sequence_weights, policy_loss_fwd, gae_fwd, group_advantages_fwd, scale_)
    stats = (token_stats_fwd, token_stats_bwd, token_stats_bwd_)
    for implementation in (*small, *stats, logits_policy_loss_fwd, logits_policy_loss_fwd_):
        operators.impl(implementation.__name__, implementation, "CPU")
    return operators


@pytest.fixture
def backend(registered, monkeypatch):
    """Takes the place of the fixture of this name in conftest.py."""
    allow_on_a_cpu(monkeypatch.setitem, monkeypatch.setattr)
    return "cuda"


def allow_on_a_cpu(put_item, put_attribute):
    """Let CPU tensors use the backend `cuda`; the functions put a value in its place."""
    put_item(fastrl.backend._DEVICES, "cuda", ("cpu",))
    unavailable = fastrl.backend.unavailable
    put_attribute(
        fastrl.backend, "unavailable", lambda name: None if name == "cuda" else unavailable(name)
    )

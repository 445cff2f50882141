"""The vocabulary kernels of the CUDA backend on the host machine, as functions of tensors."""

import ctypes

import torch

from fastrl import Objective
from fastrl.contract import (
    KL_ESTIMATORS,
    KL_GRADIENTS,
    LEVELS,
    SURROGATES,
    ObjectiveArguments,
    RowArguments,
    RowStats,
)
from tests.support import cuda_structs as structs
from tests.support.cuda_host import call


def rows_of(
    token_ids,
    mask=None,
    temperatures=None,
    temperature=1.0,
    logit_scale=1.0,
    logit_softcap=0.0,
    ignore_index=-100,
):
    """Return what accompanies logits; `ignore_index` is none of the ids unless it is given."""
    scaling = (temperatures, temperature, logit_scale, logit_softcap)
    return RowArguments(token_ids, mask, ignore_index, *scaling)


def nan_like(x):
    return torch.full_like(x, float("nan"))


def narrow_half(logits):
    """Return where the narrow mode puts the gradient: the second half of each row of float32."""
    stride_b, stride_t, _ = logits.stride()
    halves = logits.view(torch.bfloat16)
    place = halves.storage_offset() + stride_t
    return halves.as_strided(logits.shape, (2 * stride_b, 2 * stride_t, 1), place)


def token_stats(logits, rows, *, with_entropy=True, with_sum_sq_probs=True, clusters=True):
    """Return what `token_stats_fwd` does."""
    floats = [torch.full(rows.token_ids.shape, float("nan")) for _ in RowStats._fields]
    stats = RowStats._make(floats)._replace(is_top1=torch.zeros(floats[0].shape, dtype=torch.bool))
    params = structs.TokenStatsParams(
        **{"in": structs.LogitsParams.of(logits, rows)},
        with_entropy=with_entropy,
        with_sum_sq_probs=with_sum_sq_probs,
        **stats._asdict(),
    )
    call("vocabulary", "token_stats", params, ctypes.c_bool(clusters))
    return stats


def token_stats_backward(logits, rows, stats, grads, grad=None):
    """Write the gradient to `grad`, or over the logits where that is None."""
    names = ("grad_logprobs", "grad_entropy", "grad_logsumexp")
    params = structs.TokenStatsBackwardParams(
        **{"in": structs.LogitsParams.of(logits, rows)},
        out=structs.GradientParams.of(logits if grad is None else grad),
        row_max=stats.row_max,
        log_sum=stats.log_sum,
        entropy=stats.entropy,
        **dict(zip(names, grads, strict=True)),
    )
    call("vocabulary", "token_stats_backward", params)


def logits_policy_loss(logits, rows, arguments, objective, grad=None, *, clusters):
    """Return logprobs and entropy; the gradient goes to `grad`, or over the logits."""
    logprobs, entropy = (torch.full(rows.token_ids.shape, float("nan")) for _ in range(2))
    ticket = torch.zeros(1, dtype=torch.int32)
    params = structs.LogitsPolicyLossParams(
        **{"in": structs.LogitsParams.of(logits, rows)},
        out=structs.GradientParams.of(logits if grad is None else grad),
        constants=structs.LossConstants.of(arguments),
        objective=structs.Objective.of(objective),
        sequences=structs.Sequences.of(rows.token_ids, arguments.cu_seqlens),
        logprobs=logprobs,
        entropy=entropy,
        ticket=ticket,
    )
    call("vocabulary", "logits_policy_loss", params, ctypes.c_bool(clusters))
    return logprobs, entropy


def objective_of(
    surrogate="ppo_clip", level="token", kl_estimator="k3", kl_gradient="exact", **scalars
):
    """Return an objective as the operators take it; a bound that is not given is not set."""
    return ObjectiveArguments(
        surrogate=SURROGATES.index(surrogate),
        level=LEVELS.index(level),
        kl_estimator=KL_ESTIMATORS.index(kl_estimator),
        kl_gradient=KL_GRADIENTS.index(kl_gradient),
        coefficients=Objective().arguments.coefficients._replace(**scalars),
    )

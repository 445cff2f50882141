"""The policy loss from logits in one pass: statistics of a row, slope of its loss, gradient."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrl.triton.objectives import (
    KL,
    POLICIES,
    Coefficients,
    difference_of,
    kl_terms,
    objective_terms,
    token_slope,
    weighted,
)
from fastrl.triton.runtime.target import Target
from fastrl.triton.vocabulary.row_gradient import row_gradient
from fastrl.triton.vocabulary.row_sums import (
    row_statistics,
    row_sums,
    sums_of_blocks,
    token_logprob,
)
from fastrl.triton.vocabulary.rows import (
    PER_TOKEN,
    RUN_TIME,
    VARIANTS,
    parts_of,
    plan,
    row_arguments,
    row_offset,
    row_slope,
    row_target,
    token_logit,
)

_PER_TOKEN = (
    "advantages",
    "weights",
    "kl_weights",
    "entropy_weights",
    "old_logprobs",
    "ref_logprobs",
)


@triton.jit
def _slopes(
    index, logprob, advantages, weights, kl_weights, entropy_weights, old_logprobs, ref_logprobs, c,
    POLICY: tl.constexpr, KL_ESTIMATOR: tl.constexpr, KL_GRADIENT: tl.constexpr,
):  # fmt: skip
    """Return dL/dlogprob and dL/dentropy of a row; this is all that depends on the loss."""
    weight = tl.load(weights + index)
    old = logprob if old_logprobs is None else tl.load(old_logprobs + index)
    difference = difference_of(logprob, old)  # on policy the ratio is 1, but NaN stays NaN
    advantage = tl.load(advantages + index)
    _, policy_slope, _, _, _ = objective_terms(POLICY, difference, advantage, logprob, c)
    slope = weighted(weight, policy_slope)
    if KL_ESTIMATOR is not None:
        ref_minus_logprob = difference_of(tl.load(ref_logprobs + index), logprob)
        _, _, _, kl_slope = kl_terms(KL_ESTIMATOR, KL_GRADIENT, ref_minus_logprob, difference, c)
        kl_weight = weight if kl_weights is None else tl.load(kl_weights + index)
        slope += c.kl_coef * kl_weight * kl_slope
    entropy_weight = weight if entropy_weights is None else tl.load(entropy_weights + index)
    return token_slope(logprob, slope), -c.entropy_coef * entropy_weight


@triton.jit(do_not_specialize=RUN_TIME, do_not_specialize_on_alignment=PER_TOKEN)
def _logits_policy_loss(
    logits, token_ids, active, temperatures, scale, squash,
    length, stride_b: tl.int64, stride_t: tl.int64, vocabulary, partials, chosen,
    advantages, weights, kl_weights, entropy_weights, old_logprobs, ref_logprobs, c,
    logprobs, entropies, grad, grad_stride_b: tl.int64, grad_stride_t: tl.int64, parts,
    POLICY: tl.constexpr, KL_ESTIMATOR: tl.constexpr, KL_GRADIENT: tl.constexpr,
    PLAN: tl.constexpr, GRADIENT_PLAN: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    index = program // parts
    part = (program - index * parts).to(tl.int32)
    row = logits + row_offset(index, length, stride_b, stride_t, PLAN)
    grad_row = grad + row_offset(index, length, grad_stride_b, grad_stride_t, PLAN)
    is_active = tl.load(active + index)
    token_id = tl.load(token_ids + index)
    slope, multiplier = row_slope(index, temperatures, scale, is_active)
    if partials is None:
        x = token_logit(row, token_id, vocabulary, is_active)
    else:
        x = tl.load(chosen + index, mask=is_active, other=0.0)
    logprob, entropy, largest, log_sum, of_logprob, of_entropy = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    if is_active:
        sums = row_sums(row, partials, index, vocabulary, multiplier, squash, PLAN)
        largest = sums[0]
        log_sum, entropy, _ = row_statistics(sums, multiplier, squash, PLAN)
        logprob = token_logprob(x, largest, log_sum, slope, squash, PLAN)
        of_logprob, of_entropy = _slopes(
            index, logprob, advantages, weights, kl_weights, entropy_weights,
            old_logprobs, ref_logprobs, c, POLICY, KL_ESTIMATOR, KL_GRADIENT,
        )  # fmt: skip
    if part == 0:
        tl.store(logprobs + index, logprob)
        tl.store(entropies + index, entropy)
    moves = is_active & ((of_logprob != 0) | (of_entropy != 0))
    stats, flow = (largest, log_sum, entropy), (of_logprob, of_entropy, 0.0)
    row_gradient(
        row, grad_row, moves, token_id, x, stats, flow, vocabulary, slope, multiplier, squash,
        part, parts, GRADIENT_PLAN,
    )  # fmt: skip


def _one_pass(grad: Tensor, logits: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    token_ids, *_, softcap = rows = arguments[:6]
    per_token = dict(zip(_PER_TOKEN, arguments[6:12], strict=True))
    ratio, kl_estimator, kl_gradient, coefficients = arguments[12:]
    c = Coefficients(*coefficients)
    logprobs = torch.empty_like(token_ids, dtype=torch.float32)
    entropies = torch.empty_like(token_ids, dtype=torch.float32)
    if not token_ids.numel():
        return logprobs, entropies
    of_rows = row_arguments(logits, *rows)
    launch = plan(logits, grad, softcap=softcap, entropy=True)
    partials, chosen, parts = None, None, parts_of(logits)
    if parts > 1:
        partials, chosen = sums_of_blocks(of_rows, launch)
    _logits_policy_loss[(token_ids.numel() * parts,)](
        **of_rows,
        partials=partials,
        chosen=chosen,
        **per_token,
        c=c,
        logprobs=logprobs,
        entropies=entropies,
        grad=grad,
        grad_stride_b=grad.stride(0),
        grad_stride_t=grad.stride(1),
        parts=parts,
        POLICY=POLICIES[ratio],
        KL_ESTIMATOR=KL[kl_estimator] if c.kl_coef else None,
        KL_GRADIENT=kl_gradient,
        GRADIENT_PLAN=launch["PLAN"]._replace(entropy=c.entropy_coef != 0),
        **launch,
    )
    return logprobs, entropies


def logits_policy_loss_fwd(logits: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    return *_one_pass(grad, logits, *arguments), grad


def logits_policy_loss_fwd_(logits: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    return _one_pass(logits, logits, *arguments)


def targets() -> list[Target]:
    """Return what is compiled ahead of time."""
    per_token = dict.fromkeys(("advantages", "weights", "logprobs", "entropies"), "*fp32")
    grpo = per_token | dict.fromkeys(("old_logprobs", "ref_logprobs"), "*fp32")
    grpo["c"] = Coefficients._make(["fp32"] * len(Coefficients._fields))  # type: ignore[assignment]
    found = []
    for suffix, variant in {"_plain": VARIANTS[""], **VARIANTS}.items():
        regularized = suffix != "_plain"  # by KL and entropy
        target = row_target(
            f"logits_policy_loss{suffix}", _logits_policy_loss, types=grpo, **variant._asdict(),
            bytes_per_element=8 if variant.dtype == "fp32" else 4,
            instructions=36 if variant.softcap else 16,
            mufu=6.4 if variant.softcap else 2.4,
            spills={"3.8": 4, "3.9": 6} if variant.softcap else None,
            constants={
                "POLICY": POLICIES[0],
                "KL_ESTIMATOR": KL[2] if regularized else None,
                "KL_GRADIENT": 0,
            },
        )  # fmt: skip
        plan = target.constants["PLAN"]._replace(entropy=regularized)
        found.append(target._replace(constants=target.constants | {"GRADIENT_PLAN": plan}))
    return found

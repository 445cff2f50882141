"""Log-probability, entropy and kin of chosen tokens from their logits, and the gradient."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    exact_value,
    parts_of,
    plan,
    row_arguments,
    row_offset,
    row_slope,
    row_target,
    token_logit,
)


@triton.jit(do_not_specialize=RUN_TIME, do_not_specialize_on_alignment=PER_TOKEN)
def _token_stats_fwd(
    logits, token_ids, active, temperatures, scale, squash,
    length, stride_b: tl.int64, stride_t: tl.int64, vocabulary, partials, chosen,
    logprobs, entropy, logsumexp, sum_sq_probs, is_top1, row_max, log_sum, PLAN: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    if tl.load(active + index):
        slope, multiplier = row_slope(index, temperatures, scale, True)
        row = logits + row_offset(index, length, stride_b, stride_t, PLAN)
        if partials is None:
            x = token_logit(row, tl.load(token_ids + index), vocabulary, True)
        else:
            x = tl.load(chosen + index)
        sums = row_sums(row, partials, index, vocabulary, multiplier, squash, PLAN)
        found_log_sum, found_entropy, squares = row_statistics(sums, multiplier, squash, PLAN)
        largest = sums[0]
        top = exact_value(largest, squash, PLAN)
        logprob = token_logprob(x, largest, found_log_sum, slope, squash, PLAN)
        tl.store(logprobs + index, logprob)
        tl.store(entropy + index, found_entropy if PLAN.entropy else 0.0)
        found_logsumexp = tl.fma(top, slope, found_log_sum)
        tl.store(logsumexp + index, tl.where(sums[1] == 0, float("-inf"), found_logsumexp))
        tl.store(sum_sq_probs + index, squares if PLAN.squares else 0.0)
        tl.store(is_top1 + index, exact_value(x, squash, PLAN) >= top)
        tl.store(row_max + index, largest)
        tl.store(log_sum + index, found_log_sum)
    else:
        tl.store(logprobs + index, 0.0)
        tl.store(entropy + index, 0.0)
        tl.store(logsumexp + index, 0.0)
        tl.store(sum_sq_probs + index, 0.0)
        tl.store(is_top1 + index, False)
        tl.store(row_max + index, 0.0)
        tl.store(log_sum + index, 0.0)


def token_stats_fwd(
    logits: Tensor,
    token_ids: Tensor,
    active: Tensor,
    temperatures: Tensor | None,
    temperature: float,
    logit_scale: float,
    logit_softcap: float,
    with_entropy: bool,
    with_sum_sq_probs: bool,
) -> tuple[Tensor, ...]:
    floats = ("logprobs", "entropy", "logsumexp", "sum_sq_probs", "row_max", "log_sum")
    out = {name: torch.empty_like(token_ids, dtype=torch.float32) for name in floats}
    out["is_top1"] = torch.empty_like(token_ids, dtype=torch.bool)
    if token_ids.numel():
        arguments = row_arguments(
            logits, token_ids, active, temperatures, temperature, logit_scale, logit_softcap
        )
        launch = plan(
            logits, softcap=logit_softcap, entropy=with_entropy, squares=with_sum_sq_probs
        )
        partials = chosen = None
        if parts_of(logits) > 1:
            partials, chosen = sums_of_blocks(arguments, launch)
        _token_stats_fwd[(token_ids.numel(),)](
            **arguments, partials=partials, chosen=chosen, **out, **launch
        )
    order = ("logprobs", "entropy", "logsumexp", "sum_sq_probs", "is_top1", "row_max", "log_sum")
    return tuple(out[name] for name in order)


@triton.jit(do_not_specialize=RUN_TIME, do_not_specialize_on_alignment=PER_TOKEN)
def _token_stats_bwd(
    logits, token_ids, active, temperatures, scale, squash,
    length, stride_b: tl.int64, stride_t: tl.int64, vocabulary,
    row_max, log_sum, entropy, grad_logprobs, grad_entropy, grad_logsumexp,
    grad, grad_stride_b: tl.int64, grad_stride_t: tl.int64, parts, PLAN: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    index = program // parts
    part = (program - index * parts).to(tl.int32)
    row = logits + row_offset(index, length, stride_b, stride_t, PLAN)
    grad_row = grad + row_offset(index, length, grad_stride_b, grad_stride_t, PLAN)
    is_active = tl.load(active + index)
    token_id = tl.load(token_ids + index)
    of_logprob, of_entropy, of_logsumexp = 0.0, 0.0, 0.0
    if grad_logprobs is not None:
        of_logprob = tl.load(grad_logprobs + index)
    if grad_entropy is not None:
        of_entropy = tl.load(grad_entropy + index)
    if grad_logsumexp is not None:
        of_logsumexp = tl.load(grad_logsumexp + index)
    flow = (of_logprob, of_entropy, of_logsumexp)
    moves = is_active & ((of_logprob != 0) | (of_entropy != 0) | (of_logsumexp != 0))
    slope, multiplier = row_slope(index, temperatures, scale, moves)
    stats = (tl.load(row_max + index), tl.load(log_sum + index), tl.load(entropy + index))
    x = token_logit(row, token_id, vocabulary, moves)
    row_gradient(
        row, grad_row, moves, token_id, x, stats, flow, vocabulary, slope, multiplier, squash,
        part, parts, PLAN,
    )  # fmt: skip


def _write_gradient(grad: Tensor, logits: Tensor, *arguments: Any) -> None:
    rows, saved = arguments[:6], dict(zip(_SAVED, arguments[6:], strict=True))
    if not grad.numel():
        return
    parts = parts_of(logits)
    _token_stats_bwd[(grad.shape[0] * grad.shape[1] * parts,)](
        **row_arguments(logits, *rows),
        **saved,
        grad=grad,
        grad_stride_b=grad.stride(0),
        grad_stride_t=grad.stride(1),
        parts=parts,
        **plan(logits, grad, softcap=rows[5], entropy=saved["grad_entropy"] is not None),
    )


_SAVED = ("row_max", "log_sum", "entropy", "grad_logprobs", "grad_entropy", "grad_logsumexp")


def token_stats_bwd(logits: Tensor, *arguments: Any) -> Tensor:
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    _write_gradient(grad, logits, *arguments)
    return grad


def token_stats_bwd_(logits: Tensor, *arguments: Any) -> None:
    _write_gradient(logits, logits, *arguments)


def targets() -> list[Target]:
    """Return what is compiled ahead of time."""
    floats = ("logprobs", "entropy", "logsumexp", "sum_sq_probs", "row_max", "log_sum")
    outputs = {**dict.fromkeys(floats, "*fp32"), "is_top1": "*i1"}
    saved = dict.fromkeys(_SAVED, "*fp32")
    only_logprobs = {name: saved[name] for name in _SAVED[:4]}
    found = [
        row_target(
            "token_logprobs_fwd", _token_stats_fwd, "bf16", outputs, entropy=False,
            bytes_per_element=2, instructions=9, mufu=1.2,
        ),
        row_target(
            "token_logprobs_bwd", _token_stats_bwd, "bf16", only_logprobs, entropy=False,
            bytes_per_element=4, instructions=7, mufu=1.2,
        ),
    ]  # fmt: skip
    for suffix, variant in VARIANTS.items():
        size, capped = 4 if variant.dtype == "fp32" else 2, variant.softcap
        options = variant._asdict()
        found += [
            row_target(
                f"token_stats_fwd{suffix}", _token_stats_fwd, types=outputs, **options,
                bytes_per_element=size, instructions=18 if capped else 9,
                mufu=3.4 if capped else 1.2,
            ),
            row_target(
                f"token_stats_bwd{suffix}", _token_stats_bwd, types=saved, **options,
                bytes_per_element=2 * size,
                instructions=18.5 if capped else 8 if variant.dtype == "fp16" else 7,
                mufu=3.4 if capped else 1.2,
            ),
        ]  # fmt: skip
    return found

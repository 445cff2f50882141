"""The loops of the linear forms over chunks of rows, registered as operators for every device.

    per chunk:  project -> statistics -> slope -> gradient over the logits -> two gradient GEMMs

Masked rows enter no GEMM; rows whose slope turns out 0 (clipped, no advantage) leave before the
gradient GEMMs where that is free, on a CPU. On a GPU it would take a synchronisation per chunk,
which costs more than the GEMM of the rows that it saves, so there they stay, holding zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.ops.linear_chunks import (
    ChunkStats,
    TokenRows,
    chunk_size,
    chunk_stats,
    chunks,
    keep_rows,
    plan_rows,
    write_chunk_gradient,
)
from fastrl.ops.linear_head import HeadGradients, LinearHead, arithmetic_dtype, stored_dtype
from fastrl.ops.slopes import kernel_slopes

#: (logprobs, entropy, rows) of a chunk -> dL/dlogprobs and dL/dentropy (None: 0)
SlopeOf = Callable[[Tensor, Tensor, Tensor | slice], tuple[Tensor, Tensor | None]]


class LinearGradients(NamedTuple):
    """Gradients of hidden states and parameters; those not needed are empty."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    lora_a: Tensor
    lora_b: Tensor


class LinearWalk:
    """Hidden states `[N, H]`, a head and per-row inputs, visited a chunk at a time."""

    def __init__(
        self,
        hidden: Tensor,
        head: LinearHead,
        rows: TokenRows,
        chunk: int | None,
        needs: list[bool],
    ) -> None:
        self.hidden, self.head, self.rows, self.needs = hidden, head, rows, needs
        self.total = hidden.shape[0]
        self.size = max(1, min(chunk_size(chunk, head, trained=needs[1]), self.total))
        self._logits = hidden.new_empty((self.size, head.vocabulary), dtype=head.dtype)
        self._states = hidden.new_empty((self.size, hidden.shape[1]), dtype=head.dtype)
        self.parameters = HeadGradients(head, tuple(needs[1:]))
        self.grad_hidden = (
            hidden.new_zeros(hidden.shape, dtype=stored_dtype(hidden))
            if needs[0]
            else hidden.new_empty(0)
        )

    def parts(self, rows: Tensor | None) -> Any:
        """Yield the rows of each chunk."""
        return chunks(rows, self.total, self.size)

    def project(self, part: Tensor | slice) -> tuple[Tensor, Tensor, TokenRows]:
        """Return hidden states, logits and per-row inputs of a chunk."""
        given = self.hidden[part]
        states = self._states[: given.shape[0]].copy_(given)
        logits = self._logits[: given.shape[0]]
        rows = self.rows.take(part)
        if isinstance(part, slice):  # nothing was left out, and 0 * NaN would reach the weight
            states.masked_fill_(~rows.active[:, None], 0.0)
        self.head.project(states, logits)
        return states, logits, rows

    def add_gradients(self, part: Tensor | slice, grad_logits: Tensor, states: Tensor) -> None:
        """Run the gradient GEMMs of a chunk."""
        grad_states = torch.empty_like(states) if self.needs[0] else None
        self.parameters.add(grad_logits, states, grad_states)
        if grad_states is not None:
            self.grad_hidden[part] = grad_states.to(self.grad_hidden.dtype)

    def gradients(self) -> LinearGradients:
        """Return what was summed."""
        return LinearGradients(self.grad_hidden, *self.parameters.results())


@torch.no_grad()
def linear_token_stats_fwd(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_a: Tensor | None,
    lora_b: Tensor | None,
    lora_scale: float,
    token_ids: Tensor,
    active: Tensor,
    temperatures: Tensor | None,
    temperature: float,
    logit_scale: float,
    logit_softcap: float,
    chunk_tokens: int | None,
    compact: bool,
    backend: str,
) -> tuple[Tensor, ...]:
    """Return the fields of `ChunkStats` for all rows, `[N]`; 0 at rows that are not active."""
    head = _head(hidden, weight, bias, lora_a, lora_b, lora_scale)
    rows = TokenRows(token_ids, active, temperatures, temperature, logit_scale, logit_softcap)
    walk = LinearWalk(hidden, head, rows, chunk_tokens, [False] * 5)
    stats = _no_stats(token_ids, head.dtype)
    plan = plan_rows(active, active, compact=compact)
    for part in walk.parts(plan.moving):
        _, logits, given = walk.project(part)
        _store(stats, part, chunk_stats(logits, given, backend))
    return tuple(stats)


@torch.no_grad()
def linear_token_stats_bwd(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_a: Tensor | None,
    lora_b: Tensor | None,
    lora_scale: float,
    token_ids: Tensor,
    active: Tensor,
    temperatures: Tensor | None,
    temperature: float,
    logit_scale: float,
    logit_softcap: float,
    chunk_tokens: int | None,
    compact: bool,
    backend: str,
    row_max: Tensor,
    log_sum: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    grad_logsumexp: Tensor | None,
    needs: list[bool],
) -> tuple[Tensor, ...]:
    """Project again, and return the gradients of hidden states and parameters."""
    head = _head(hidden, weight, bias, lora_a, lora_b, lora_scale)
    rows = TokenRows(token_ids, active, temperatures, temperature, logit_scale, logit_softcap)
    walk = LinearWalk(hidden, head, rows, chunk_tokens, needs)
    grads = (grad_logprobs, grad_entropy, grad_logsumexp)
    moves = torch.zeros_like(active)
    for grad in grads:
        moves = moves if grad is None else moves | (grad != 0)
    saved = _no_stats(token_ids, head.dtype)._replace(
        row_max=row_max, log_sum=log_sum, entropy=entropy
    )
    for part in walk.parts(plan_rows(active, moves, compact=compact).moving):
        states, logits, given = walk.project(part)
        lp, h, lse = (None if grad is None else grad[part] for grad in grads)
        known = ChunkStats._make(stat[part] for stat in saved)
        write_chunk_gradient(logits, given, known, (lp, h, lse), backend)
        walk.add_gradients(part, logits, states)
    return tuple(walk.gradients())


def linear_policy_loss_fwd(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_a: Tensor | None,
    lora_b: Tensor | None,
    lora_scale: float,
    token_ids: Tensor,
    active: Tensor,
    temperatures: Tensor | None,
    temperature: float,
    logit_scale: float,
    logit_softcap: float,
    chunk_tokens: int | None,
    compact: bool,
    backend: str,
    advantages: Tensor,
    weights: Tensor,
    old_logprobs: Tensor | None,
    ref_logprobs: Tensor | None,
    ratio: int,
    kl_estimator: int,
    coefficients: list[float],
    needs: list[bool],
    metrics: bool,
) -> tuple[Tensor, ...]:
    """Return logprobs, entropy and the gradients of the loss, one visit to every row."""
    head = _head(hidden, weight, bias, lora_a, lora_b, lora_scale)
    rows = TokenRows(token_ids, active, temperatures, temperature, logit_scale, logit_softcap)
    kl_coef, entropy_coef = coefficients[6], coefficients[9]
    moves = weights != 0
    if kl_coef == 0 and entropy_coef == 0:
        moves &= advantages != 0
    slope_of = kernel_slopes(
        active,
        advantages,
        weights,
        old_logprobs,
        ref_logprobs,
        ratio,
        kl_estimator,
        coefficients,
        backend,
    )
    return linear_loss_pass(
        hidden, head, rows, chunk_tokens, compact, backend, moves, slope_of, needs, metrics
    )


@torch.no_grad()
def linear_loss_pass(
    hidden: Tensor,
    head: LinearHead,
    rows: TokenRows,
    chunk_tokens: int | None,
    compact: bool,
    backend: str,
    moves: Tensor,
    slope_of: SlopeOf,
    needs: list[bool],
    metrics: bool,
) -> tuple[Tensor, ...]:
    """The single pass: statistics of every row, gradients through the rows that `moves` names."""
    walk = LinearWalk(hidden, head, rows, chunk_tokens, needs)
    trains = any(needs)
    plan = plan_rows(rows.active, moves, compact=compact)
    stats = _no_stats(rows.token_ids, head.dtype)
    for part in walk.parts(plan.moving):
        states, logits, given = walk.project(part)
        found = chunk_stats(logits, given, backend)
        _store(stats, part, found)
        if not trains:
            continue
        slope, entropy_slope = slope_of(found.logprobs, found.entropy, part)
        if compact and logits.device.type == "cpu":
            moving = slope != 0 if entropy_slope is None else (slope != 0) | (entropy_slope != 0)
            kept = moving.nonzero()[:, 0]
            if kept.shape[0] < logits.shape[0]:
                part = part[kept]
                logits, states, given = keep_rows(logits, kept), states[kept], given.take(kept)
                found = ChunkStats._make(stat[kept] for stat in found)
                slope = slope[kept]
                entropy_slope = None if entropy_slope is None else entropy_slope[kept]
        if logits.shape[0]:
            write_chunk_gradient(logits, given, found, (slope, entropy_slope, None), backend)
            walk.add_gradients(part, logits, states)
    if plan.resting is not None and metrics:
        for part in walk.parts(plan.resting):
            _, logits, given = walk.project(part)
            _store(stats, part, chunk_stats(logits, given, backend))
    return (stats.logprobs, stats.entropy, *walk.gradients())


def _head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_a: Tensor | None,
    lora_b: Tensor | None,
    lora_scale: float,
) -> LinearHead:
    dtype = arithmetic_dtype(hidden, weight)
    return LinearHead(weight, bias, lora_a, lora_b, lora_scale, dtype)


def _no_stats(token_ids: Tensor, dtype: torch.dtype) -> ChunkStats:
    zeros = [token_ids.new_zeros(token_ids.shape, dtype=dtype) for _ in range(7)]
    zeros[4] = zeros[4].to(torch.bool)
    return ChunkStats._make(zeros)


def _store(stats: ChunkStats, part: Tensor | slice, found: ChunkStats) -> None:
    for whole, piece in zip(stats, found, strict=True):
        whole[part] = piece


def _with_autograd_inside(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Let the reference backend differentiate inside an operator that a compiled graph calls."""
    key = torch._C.DispatchKey.AutogradFunctionality

    @functools.wraps(operator)
    def run(*arguments: Any) -> Any:
        excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(key)
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
        try:
            return operator(*arguments)
        finally:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, excluded)

    return run


for _operator in (linear_token_stats_fwd, linear_token_stats_bwd, linear_policy_loss_fwd):
    torch.library.impl(
        f"fastrl::{_operator.__name__}",
        "CompositeExplicitAutograd",
        _with_autograd_inside(_operator),
    )

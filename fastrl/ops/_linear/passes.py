"""The loops of the linear forms over chunks of rows, registered as operators for every device.

    per chunk:  project -> statistics -> slope -> gradient over the logits -> two gradient GEMMs

Masked rows enter no GEMM; rows whose slope turns out 0 (clipped, no advantage) leave before the
gradient GEMMs where that is free, on a CPU. On a GPU it would take a synchronisation per chunk,
which costs more than the GEMM of the rows that it saves, so there they stay, holding zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, get_type_hints

import torch
from torch import Tensor

from fastrl import native
from fastrl.contract import (
    Coefficients,
    LossArguments,
    ObjectiveArguments,
    RowArguments,
    RowStats,
)
from fastrl.library import arithmetic_dtype, stored_dtype
from fastrl.ops._linear.chunks import (
    chunk_size,
    chunk_stats,
    chunks,
    keep_rows,
    order_rows,
    take_rows,
    write_chunk_gradient,
)
from fastrl.ops._linear.head import HeadGradients, LinearHead
from fastrl.ops._linear.products import choose_products
from fastrl.ops._loss.slopes import TokenSlopes

Taken = TypeVar("Taken")


class LinearGradients(NamedTuple):
    """Gradients of hidden states and parameters; those not needed are empty."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    lora_a: Tensor
    lora_b: Tensor


def _without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run in the dtypes that are given: autocast would round what is meant to be exact."""

    @functools.wraps(function)
    def run(*arguments: Any, **options: Any) -> Any:
        first = arguments[0]
        device = (first.hidden if isinstance(first, LinearCall) else first).device.type
        with torch.autocast(device, enabled=False):
            return function(*arguments, **options)

    return run


class LinearCall(NamedTuple):
    """What every operator of the linear forms begins with; the rows are `[N]`."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    lora_a: Tensor | None
    lora_b: Tensor | None
    lora_scale: float
    rows: RowArguments
    chunk_tokens: int | None
    compact: bool
    backend: str

    def head(self) -> LinearHead:
        """Return the LM head."""
        dtype = arithmetic_dtype(self.hidden, self.weight)
        products = choose_products(self.hidden, self.weight, dtype, self.backend)
        return LinearHead(
            self.weight, self.bias, self.lora_a, self.lora_b, self.lora_scale, products
        )

    def active(self) -> Tensor:
        """Return which rows count."""
        assert self.rows.mask is not None
        return self.rows.mask


@functools.cache
def _kinds(fields: type) -> tuple[Any, ...]:
    return tuple(get_type_hints(fields).values())


class Arguments:
    """The flat arguments of an operator, taken from the front."""

    def __init__(self, arguments: Sequence[Any]) -> None:
        """The arguments in the order of the schema."""
        self._left = list(arguments)

    def take(self, fields: type[Taken]) -> Taken:
        """Return the next ones as a named tuple, those of named tuples inside it, too."""
        values = []
        for kind in _kinds(fields):  # type: ignore[arg-type]
            nested = isinstance(kind, type) and hasattr(kind, "_fields")
            if nested and kind is not Coefficients:
                values.append(self.take(kind))
            else:
                value = self._left.pop(0)
                values.append(Coefficients._make(value) if kind is Coefficients else value)
        return fields(*values)

    def rest(self) -> list[Any]:
        """Return what is left."""
        return self._left


class LinearWalk:
    """The rows of a call, visited a chunk at a time in one workspace."""

    def __init__(self, call: LinearCall, needs: list[bool]) -> None:
        """`needs` says whether hidden, weight, bias, lora_a, lora_b want a gradient."""
        hidden, head = call.hidden, call.head()
        self.hidden, self.head, self.rows, self.needs = hidden, head, call.rows, needs
        self.total = hidden.shape[0]
        size = chunk_size(call.chunk_tokens, head, trained=needs[1])
        self.size = max(1, min(size, self.total))
        self._logits = native.new_large(hidden, (self.size, head.vocabulary), head.dtype)
        self._states = hidden.new_empty(
            (self.size, hidden.shape[1]), dtype=head.products.operand_dtype
        )
        self.parameters = HeadGradients(head, tuple(needs[1:]))
        self.grad_hidden = (
            hidden.new_zeros(hidden.shape, dtype=stored_dtype(hidden))
            if needs[0]
            else hidden.new_empty(0)
        )

    def parts(self, rows: Tensor | None) -> Any:
        """Yield the rows of each chunk."""
        return chunks(rows, self.total, self.size)

    def project(self, part: Tensor | slice) -> tuple[Tensor, Tensor, RowArguments]:
        """Return hidden states, logits and per-row inputs of a chunk."""
        given = self.hidden[part]
        states = self._states[: given.shape[0]].copy_(given)
        logits = self._logits[: given.shape[0]]
        rows = take_rows(self.rows, part)
        if isinstance(part, slice):  # nothing was left out, and 0 * NaN would reach the weight
            assert rows.mask is not None
            states.masked_fill_(~rows.mask[:, None], 0.0)
        self.head.project(states, logits)
        return states, logits, rows

    def add_gradients(self, part: Tensor | slice, grad_logits: Tensor, states: Tensor) -> None:
        """Run the gradient GEMMs of a chunk."""
        grad_states = torch.empty_like(states, dtype=self.head.dtype) if self.needs[0] else None
        self.parameters.add(grad_logits, states, grad_states)
        if grad_states is not None:
            self.grad_hidden[part] = grad_states.to(self.grad_hidden.dtype)

    def gradients(self) -> LinearGradients:
        """Return what was summed."""
        return LinearGradients(self.grad_hidden, *self.parameters.results())


@_without_autocast
@torch.no_grad()
def linear_token_stats_fwd(*arguments: Any) -> tuple[Tensor, ...]:
    """Return the fields of `RowStats` for all rows, `[N]`; 0 at rows that are not active."""
    call = Arguments(arguments).take(LinearCall)
    walk = LinearWalk(call, [False] * 5)
    stats, active = _no_stats(call), call.active()
    for part in walk.parts(order_rows(active, active, compact=call.compact).trained):
        _, logits, rows = walk.project(part)
        _store(stats, part, chunk_stats(logits, rows, call.backend))
    return tuple(stats)


@_without_autocast
@torch.no_grad()
def linear_token_stats_bwd(*arguments: Any) -> tuple[Tensor, ...]:
    """Project again, and return the gradients of hidden states and parameters.

    After the arguments of the forward come row_max, log_sum, entropy, the upstream gradients of
    logprobs, entropy and logsumexp, and which gradients are needed.
    """
    flat = Arguments(arguments)
    call = flat.take(LinearCall)
    row_max, log_sum, entropy, *grads, needs = flat.rest()
    walk, active = LinearWalk(call, needs), call.active()
    may_flow = torch.zeros_like(active)
    for grad in grads:
        may_flow = may_flow if grad is None else may_flow | (grad != 0)
    saved = _no_stats(call)._replace(row_max=row_max, log_sum=log_sum, entropy=entropy)
    for part in walk.parts(order_rows(active, may_flow, compact=call.compact).trained):
        states, logits, rows = walk.project(part)
        lp, h, lse = (None if grad is None else grad[part] for grad in grads)
        known = RowStats._make(stat[part] for stat in saved)
        write_chunk_gradient(logits, rows, known, (lp, h, lse), call.backend)
        walk.add_gradients(part, logits, states)
    return tuple(walk.gradients())


def linear_policy_loss_fwd(*arguments: Any) -> tuple[Tensor, ...]:
    """Return logprobs, entropy and the gradients of the loss, one visit to every row.

    After the arguments that the linear forms share come the loss and its objective, which
    gradients are needed, and whether rows without one are wanted for the metrics.
    """
    flat = Arguments(arguments)
    call = flat.take(LinearCall)
    loss, objective = flat.take(LossArguments), flat.take(ObjectiveArguments)
    needs, metrics = flat.rest()
    slopes = TokenSlopes(call.active(), loss, objective, None, call.backend)
    return tuple(linear_loss_pass(call, slopes, needs, metrics=metrics))


@_without_autocast
@torch.no_grad()
def linear_loss_pass(
    call: LinearCall, slopes: TokenSlopes, needs: list[bool], *, metrics: bool
) -> tuple[Tensor, ...]:
    """The single pass: statistics of every row, gradients through the rows that may have one."""
    walk = LinearWalk(call, needs)
    order = order_rows(call.active(), slopes.may_flow(), compact=call.compact)
    stats = _no_stats(call)
    selecting = call.compact and call.hidden.device.type == "cpu"
    scored = [] if order.scored is None or not metrics else walk.parts(order.scored)
    for trained, part in [
        *((any(needs), part) for part in walk.parts(order.trained)),
        # a row without advantage has slope 0, unless it is broken: NaN must reach the gradient
        *((any(needs) and selecting, part) for part in scored),
    ]:
        states, logits, rows = walk.project(part)
        found = chunk_stats(logits, rows, call.backend)
        _store(stats, part, found)
        if not trained:
            continue
        slope, entropy_slope = slopes.of(found.logprobs, found.entropy, part)
        if selecting:
            flows = slope != 0 if entropy_slope is None else (slope != 0) | (entropy_slope != 0)
            if not bool(flows.all()):
                logits, kept = keep_rows(logits, flows)
                part, states, rows = part[kept], states[kept], take_rows(rows, kept)
                found = RowStats._make(stat[kept] for stat in found)
                slope = slope[kept]
                entropy_slope = None if entropy_slope is None else entropy_slope[kept]
        if logits.shape[0]:
            write_chunk_gradient(logits, rows, found, (slope, entropy_slope, None), call.backend)
            walk.add_gradients(part, logits, states)
    return (stats.logprobs, stats.entropy, *walk.gradients())


def _no_stats(call: LinearCall) -> RowStats:
    like, dtype = call.rows.token_ids, arithmetic_dtype(call.hidden, call.weight)
    zeros = RowStats._make(torch.zeros_like(like, dtype=dtype) for _ in RowStats._fields)
    return zeros._replace(is_top1=torch.zeros_like(like, dtype=torch.bool))


def _store(stats: RowStats, part: Tensor | slice, found: RowStats) -> None:
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

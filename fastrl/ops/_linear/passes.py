"""The loops of the linear forms over chunks of rows, registered as operators for every device.

    per chunk:  project -> statistics -> slopes -> dL/dlogits in place -> two gradient GEMMs

Masked rows are left out of all GEMMs, rows without advantage or weight out of the gradient GEMMs.
On a CPU the latter also skip rows whose slopes turn out to be 0 (clipped); on a GPU that takes a
synchronization per chunk and costs more than it saves, so there these rows remain as zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, get_type_hints

import torch
from torch import Tensor

from fastrl import native
from fastrl.contract import (
    LEVELS,
    SURROGATES,
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
    compact_rows,
    order_rows,
    take_rows,
    write_chunk_gradient,
)
from fastrl.ops._linear.head import HeadGradients, LinearHead
from fastrl.ops._linear.products import choose_products
from fastrl.ops._loss.slopes import TokenSlopes

Fields = TypeVar("Fields")


class LinearGradients(NamedTuple):
    """Gradients of hidden states and parameters, empty if not needed."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    lora_a: Tensor
    lora_b: Tensor


def _without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """Disable autocast, which would round operands to 16 bits."""

    @functools.wraps(function)
    def run(*arguments: Any, **options: Any) -> Any:
        first = arguments[0]
        device = (first.hidden if isinstance(first, LinearCall) else first).device.type
        with torch.autocast(device, enabled=False):
            return function(*arguments, **options)

    return run


class LinearCall(NamedTuple):
    """The arguments that all operators of the linear forms share; rows are `[N]`."""

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
        """Return which rows are active."""
        mask = self.rows.mask
        if mask is None or mask.dtype != torch.bool:
            came = "None" if mask is None else str(mask.dtype)
            raise ValueError(f"mask must be a bool tensor for a linear form, got {came}")
        return mask


@functools.cache
def _types(fields: type) -> tuple[Any, ...]:
    return tuple(get_type_hints(fields).values())


class Arguments:
    """The flat arguments of an operator, consumed from the front."""

    def __init__(self, arguments: Sequence[Any]) -> None:
        """`arguments`: in the order of the schema."""
        self._remaining = list(arguments)

    def take(self, fields: type[Fields]) -> Fields:
        """Return the next arguments as a named tuple, in which others may be nested."""
        values = []
        for kind in _types(fields):  # type: ignore[arg-type]
            nested = isinstance(kind, type) and hasattr(kind, "_fields")
            if nested and kind is not Coefficients:  # which are a single argument, a list
                values.append(self.take(kind))
            else:
                value = self._remaining.pop(0)
                values.append(Coefficients._make(value) if kind is Coefficients else value)
        return fields(*values)

    def rest(self) -> list[Any]:
        """Return the remaining arguments."""
        return self._remaining


class LinearWalk:
    """The rows of a call, processed chunk by chunk in the same buffers."""

    def __init__(self, call: LinearCall, needs: list[bool]) -> None:
        """`needs`: whether hidden, weight, bias, lora_a and lora_b need a gradient."""
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

    def chunks(self, rows: Tensor | None) -> Iterator[Tensor | slice]:
        """Yield chunks of `rows`; None means all rows."""
        return chunks(rows, self.total, self.size)

    def project(self, chunk: Tensor | slice) -> tuple[Tensor, Tensor, RowArguments]:
        """Return hidden states, logits and row arguments of a chunk."""
        hidden = self.hidden[chunk]
        states = self._states[: hidden.shape[0]].copy_(hidden)
        logits = self._logits[: hidden.shape[0]]
        rows = take_rows(self.rows, chunk)
        if isinstance(chunk, slice):  # includes masked rows: 0 * NaN would reach the weight
            assert rows.mask is not None
            states.masked_fill_(~rows.mask[:, None], 0.0)
        self.head.project(states, logits)
        return states, logits, rows

    def add_gradients(self, chunk: Tensor | slice, grad_logits: Tensor, states: Tensor) -> None:
        """Run the gradient GEMMs of a chunk."""
        grad_states = torch.empty_like(states, dtype=self.head.dtype) if self.needs[0] else None
        self.parameters.add(grad_logits, states, grad_states)
        if grad_states is not None:
            self.grad_hidden[chunk] = grad_states.to(self.grad_hidden.dtype)

    def gradients(self) -> LinearGradients:
        """Return the gradients, accumulated over all chunks."""
        return LinearGradients(self.grad_hidden, *self.parameters.results())


@_without_autocast
@torch.no_grad()
def linear_token_stats_fwd(*arguments: Any) -> tuple[Tensor, ...]:
    """Return the fields of `RowStats` for all rows, `[N]`; 0 at inactive rows."""
    call = Arguments(arguments).take(LinearCall)
    walk = LinearWalk(call, [False] * 5)
    stats, active = _no_stats(call), call.active()
    for chunk in walk.chunks(order_rows(active, active, compact=call.compact).trained):
        _, logits, rows = walk.project(chunk)
        _store(stats, chunk, chunk_stats(logits, rows, call.backend))
    return tuple(stats)


@_without_autocast
@torch.no_grad()
def linear_token_stats_bwd(*arguments: Any) -> tuple[Tensor, ...]:
    """Project all chunks again and return the gradients of hidden states and parameters.

    The arguments of the forward are followed by row_max, log_sum, entropy, the upstream gradients
    of logprobs, entropy and logsumexp, and which gradients are needed.
    """
    flat = Arguments(arguments)
    call = flat.take(LinearCall)
    row_max, log_sum, entropy, *grads, needs = flat.rest()
    walk, active = LinearWalk(call, needs), call.active()
    may_flow = torch.zeros_like(active)
    for grad in grads:
        may_flow = may_flow if grad is None else may_flow | (grad != 0)
    saved = _no_stats(call)._replace(row_max=row_max, log_sum=log_sum, entropy=entropy)
    for chunk in walk.chunks(order_rows(active, may_flow, compact=call.compact).trained):
        states, logits, rows = walk.project(chunk)
        grad_lp, grad_h, grad_lse = (None if grad is None else grad[chunk] for grad in grads)
        stats = RowStats._make(stat[chunk] for stat in saved)
        write_chunk_gradient(logits, rows, stats, (grad_lp, grad_h, grad_lse), call.backend)
        walk.add_gradients(chunk, logits, states)
    return tuple(walk.gradients())


def linear_policy_loss_fwd(*arguments: Any) -> tuple[Tensor, ...]:
    """Return logprobs, entropy and the gradients of the loss, in one pass over the rows.

    The arguments of `LinearCall` are followed by the loss and objective arguments, by which
    gradients are needed, and by whether rows without a gradient are needed for the metrics.
    """
    flat = Arguments(arguments)
    call = flat.take(LinearCall)
    loss, objective = flat.take(LossArguments), flat.take(ObjectiveArguments)
    needs, metrics = flat.rest()
    if LEVELS[objective.level] != "token" or SURROGATES[objective.surrogate] == "gmpo":
        raise ValueError("level must be token: the rows of a chunk are scored by themselves")
    slopes = TokenSlopes(call.active(), loss, objective, None, call.backend)
    return tuple(linear_loss_pass(call, slopes, needs, metrics=metrics))


@_without_autocast
@torch.no_grad()
def linear_loss_pass(
    call: LinearCall, slopes: TokenSlopes, needs: list[bool], *, metrics: bool
) -> tuple[Tensor, ...]:
    """Compute the statistics of every row and the gradients in a single pass."""
    walk = LinearWalk(call, needs)
    order = order_rows(call.active(), slopes.may_flow(), compact=call.compact)
    all_stats = _no_stats(call)
    compacting = call.compact and call.hidden.device.type == "cpu"
    scored = [] if order.scored is None or not metrics else walk.chunks(order.scored)
    for trained, chunk in [
        *((any(needs), chunk) for chunk in walk.chunks(order.trained)),
        # their slopes are 0 unless a log-probability is NaN, which must reach the gradient
        *((any(needs) and compacting, chunk) for chunk in scored),
    ]:
        states, logits, rows = walk.project(chunk)
        stats = chunk_stats(logits, rows, call.backend)
        _store(all_stats, chunk, stats)
        if not trained:
            continue
        slope, entropy_slope = slopes.of_chunk(stats.logprobs, stats.entropy, chunk)
        if compacting:
            has_gradient = slope != 0
            if entropy_slope is not None:
                has_gradient = has_gradient | (entropy_slope != 0)
            if not bool(has_gradient.all()):
                assert isinstance(chunk, Tensor)  # with `compact` no chunk is a slice
                logits, kept = compact_rows(logits, has_gradient)
                chunk, states, rows = chunk[kept], states[kept], take_rows(rows, kept)
                stats = RowStats._make(stat[kept] for stat in stats)
                slope = slope[kept]
                entropy_slope = None if entropy_slope is None else entropy_slope[kept]
        if logits.shape[0]:
            write_chunk_gradient(logits, rows, stats, (slope, entropy_slope, None), call.backend)
            walk.add_gradients(chunk, logits, states)
    return (all_stats.logprobs, all_stats.entropy, *walk.gradients())


def _no_stats(call: LinearCall) -> RowStats:
    like, dtype = call.rows.token_ids, arithmetic_dtype(call.hidden, call.weight)
    zeros = RowStats._make(torch.zeros_like(like, dtype=dtype) for _ in RowStats._fields)
    return zeros._replace(is_top1=torch.zeros_like(like, dtype=torch.bool))


def _store(all_stats: RowStats, chunk: Tensor | slice, stats: RowStats) -> None:
    for target, values in zip(all_stats, stats, strict=True):
        target[chunk] = values


def _with_autograd_inside(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Enable autograd inside an operator, for the reference backend in a compiled graph."""
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

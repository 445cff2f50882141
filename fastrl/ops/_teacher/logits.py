"""Differentiable statistics of logits that are compared with a teacher's.

A teacher's logits are read in place. Its hidden states are projected, and its K tokens are looked
up, a chunk of rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fastrl.contract import FLAGS, RowArguments, RowStats
from fastrl.library import arithmetic_dtype
from fastrl.ops._autograd.first_derivative import first_derivative_only
from fastrl.ops._autograd.saved_tensors import save, saved
from fastrl.ops._linear.call import Arguments, without_autocast
from fastrl.ops._linear.chunks import chunk_stats, flat_rows, in_batch, take_rows
from fastrl.ops._process_groups import gathered
from fastrl.ops._row_stats import public_stats, slopes_of, without_gradient
from fastrl.ops._rows import check_ids
from fastrl.ops._teacher.arguments import TeacherArguments
from fastrl.ops._teacher.chunks import Comparison, TeacherChunks
from fastrl.ops._teacher.rows import Pair, TeacherStats, pair_of
from fastrl.ops._vocabulary_parts.parts import VocabularyParts
from fastrl.ops._vocabulary_parts.statistics import PartRows, combined, part_stats
from fastrl.tracing import refuse_transforms

#: Bytes of a chunk's copied logits.
_CHUNK_BYTES = {False: 64 * 2**20, True: 256 * 2**20}


def compared_token_stats(
    logits: Tensor,
    rows: RowArguments,
    teacher: TeacherArguments,
    parts: VocabularyParts,
    backend: str,
    *,
    inplace_backward: bool,
) -> tuple[Tensor, ...]:
    """Return the fields of `TokenStats`, `[B, T]` and differentiable; `rows.mask` is set."""
    refuse_transforms("a function with a teacher")
    return cast(
        "tuple[Tensor, ...]",
        _ComparedTokenStats.apply(  # type: ignore[no-untyped-call]
            logits, rows, teacher, parts, inplace_backward, backend
        ),
    )


def refuse_shared_memory(logits: Tensor, teacher: TeacherArguments) -> None:
    """Raise if the gradient of a row would overwrite teacher logits of another row."""
    given = teacher.teacher_logits
    if given is None or torch.compiler.is_compiling():
        return
    if logits.stride(-1) != 1 and logits.shape[-1] > 1:  # the gradient overwrites a copy
        return
    if given.untyped_storage().data_ptr() != logits.untyped_storage().data_ptr():
        return
    pair = (logits, given)
    same = [(x.data_ptr(), x.dtype, x.shape, x.stride()) for x in pair]
    ends = []
    for x in pair:
        spans = ((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
        ends.append(x.data_ptr() + (sum(spans) + 1) * x.element_size())
    apart = ends[0] <= given.data_ptr() or ends[1] <= logits.data_ptr()
    if same[0] != same[1] and logits.numel() and not apart:
        raise ValueError(
            "teacher.logits must not share memory with other rows of the logits, which their "
            "gradient overwrites: clone them, or leave the gradient its own memory"
        )


class _ComparedTokenStats(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        rows: RowArguments,
        teacher: TeacherArguments,
        parts: VocabularyParts,
        inplace_backward: bool,
        backend: str,
    ) -> tuple[Tensor, ...]:
        outputs = torch.ops.fastrl.compared_token_stats_fwd(
            logits, *rows, *parts, *teacher.flat(), backend
        )
        stats = RowStats._make(outputs[: len(RowStats._fields)])
        compared = TeacherStats._make(outputs[len(RowStats._fields) :])
        row_tensors = (rows.token_ids, rows.mask, rows.temperatures)
        of_stats = (stats.row_max, stats.log_sum, stats.entropy, *compared.saved())
        save(ctx, logits, *row_tensors, *of_stats, *teacher.tensors())
        ctx.rows = rows._replace(token_ids=None, mask=None, temperatures=None)  # type: ignore[arg-type]
        ctx.teacher = teacher.with_tensors([None] * len(teacher.tensors()))
        ctx.parts, ctx.inplace_backward, ctx.backend = parts, inplace_backward, backend
        ctx.mark_non_differentiable(*without_gradient(stats), *compared.without_gradient())
        ctx.set_materialize_grads(False)
        return (*public_stats(stats), *compared.public())

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, token_ids, mask, temperatures, *others = saved(ctx)
        rows = ctx.rows._replace(token_ids=token_ids, mask=mask, temperatures=temperatures)
        stats, compared, teacher = others[:3], others[3:6], ctx.teacher.with_tensors(others[6:])
        *of_row, grad_divergence, _, _ = grads
        arguments = (logits, *rows, *ctx.parts, *teacher.flat(), ctx.backend, *stats)
        arguments = (*arguments, *slopes_of(of_row), *compared, grad_divergence)
        if ctx.inplace_backward and not torch.compiler.is_compiling():
            torch.ops.fastrl.compared_token_stats_bwd_(*arguments)
            # makes autograd raise if another node has saved the logits
            torch.autograd.graph.increment_version(logits)
            gradient = logits.detach()
        else:
            gradient = torch.ops.fastrl.compared_token_stats_bwd(*arguments)
        return (gradient, *([None] * 5))


class _Chunk(NamedTuple):
    """Rows of a chunk, and copies of their logits `[C, V]` to compare."""

    place: slice
    logits: Tensor
    rows: RowArguments
    part: PartRows | None
    comparison: Comparison

    def stats(self, backend: str, parts: VocabularyParts) -> RowStats:
        """Return the student's statistics, `[C]`."""
        if self.part is None:
            return chunk_stats(self.logits, self.rows, backend)
        batch = in_batch(self.part)
        local = part_stats(self.logits[None], batch, backend)
        whole = combined(gathered(local, parts.process_group()), batch)
        return RowStats._make(stat[0] for stat in whole)


class _Call(NamedTuple):
    """The arguments that the operators share; logits are `[B, T, V]`."""

    logits: Tensor
    rows: RowArguments
    parts: VocabularyParts
    teacher: TeacherArguments
    backend: str

    def check(self) -> None:
        """Raise for invalid values, which the trace of a function cannot check."""
        assert self.rows.mask is not None
        vocabulary = sum(self.parts.sizes) if self.parts.split() else self.logits.shape[-1]
        check_ids(self.rows, self.rows.mask, vocabulary)
        self.teacher.check_tokens(self.rows.mask.flatten(), vocabulary)

    def part(self) -> PartRows | None:
        """Return the rows of this rank's part, or None if the vocabulary is whole."""
        assert self.rows.mask is not None
        return PartRows.of(self.rows, self.rows.mask, self.parts) if self.parts.split() else None

    def pair(self, logits: Tensor) -> Pair | None:
        """Return all rows paired with the teacher's logits, or None if it has none."""
        given = self.teacher.teacher_logits
        if given is None:
            return None
        return pair_of(
            logits, given, self.rows, self.teacher, self.backend, self.part(), self.parts
        )

    def chunks(self) -> Iterator[_Chunk]:
        """Yield chunks of rows, with logits that may be overwritten."""
        B, T, V = self.logits.shape
        flat, rows, part = self.logits.reshape(B * T, V), flat_rows(self.rows), self.part()
        real = arithmetic_dtype(flat, flat)
        # the ranks of a split vocabulary exchange the same chunks
        widest = max(self.parts.sizes, default=V)
        size = max(1, _CHUNK_BYTES[flat.is_cuda] // (2 * widest * real.itemsize))
        teacher = self.teacher
        temperatures = teacher.scaling.teacher_temperatures
        if temperatures is not None:
            scaling = teacher.scaling._replace(teacher_temperatures=temperatures.reshape(-1))
            teacher = teacher._replace(scaling=scaling)
        if B * T == 0:
            return
        size = min(size, B * T)
        sides = TeacherChunks(teacher, None, size, real, self.backend, self.parts)
        for start in range(0, B * T, size):
            index = slice(start, min(start + size, B * T))
            logits, of_chunk = flat[index].clone(), take_rows(rows, index)
            local = None if part is None else part.flat().taken(index)
            yield _Chunk(
                index, logits, of_chunk, local, sides.beside(index, logits, of_chunk, local)
            )


@without_autocast
@torch.no_grad()
def compared_token_stats_fwd(*arguments: Any) -> tuple[Tensor, ...]:
    """Return the fields of `RowStats` and `TeacherStats`, `[B, T]`; 0 at inactive rows."""
    call = Arguments(arguments).take(_Call)
    call.check()
    pair = call.pair(call.logits)
    if pair is not None:
        stats = pair.student_stats()
        return (*stats, *pair.compare(stats))
    found = []
    for chunk in call.chunks():
        of_chunk = chunk.stats(call.backend, call.parts)
        found.append((*of_chunk, *chunk.comparison.compare(of_chunk)))
    ids = call.rows.token_ids
    if not found:
        real = arithmetic_dtype(call.logits, call.logits)
        names = (*RowStats._fields, *TeacherStats._fields)
        of_answers = (*FLAGS, "agrees")
        return tuple(ids.to(torch.bool if name in of_answers else real) for name in names)
    return tuple(torch.cat(each).reshape(ids.shape) for each in zip(*found, strict=True))


@without_autocast
@torch.no_grad()
def compared_token_stats_bwd(*arguments: Any) -> Tensor:
    """Return dL/dlogits.

    After the arguments of the forward come row_max, log_sum, entropy, the upstream gradients of
    logprobs, entropy and logsumexp, slope_mean, row_max and log_sum of the teacher, and the
    upstream gradient of the divergence.
    """
    call, stats, compared, grad_divergence, slopes = _backward(arguments)
    pair = call.pair(call.logits)
    if pair is not None:
        return pair.gradient(stats, compared, grad_divergence, slopes)
    gradient = torch.empty_like(call.logits, memory_format=torch.contiguous_format)
    _write_chunks(call, gradient, stats, compared, grad_divergence, slopes)
    return gradient


@without_autocast
@torch.no_grad()
def compared_token_stats_bwd_(*arguments: Any) -> None:
    """Overwrite the logits with dL/dlogits; takes the arguments of `compared_token_stats_bwd`."""
    call, stats, compared, grad_divergence, slopes = _backward(arguments)
    pair = call.pair(call.logits)
    if pair is not None:
        pair.write_gradient(stats, compared, grad_divergence, slopes)
        return
    _write_chunks(call, call.logits, stats, compared, grad_divergence, slopes)


def _write_chunks(
    call: _Call,
    target: Tensor,
    stats: RowStats,
    compared: TeacherStats,
    grad_divergence: Tensor,
    slopes: Sequence[Tensor | None],
) -> None:
    tokens = target.shape[1]
    flat_stats = RowStats._make(stat.reshape(-1) for stat in stats)
    flat_compared = TeacherStats._make(value.reshape(-1) for value in compared)
    for chunk in call.chunks():
        chunk.comparison.write_gradient(
            RowStats._make(stat[chunk.place] for stat in flat_stats),
            flat_compared.indexed(chunk.place),
            grad_divergence.reshape(-1)[chunk.place],
            [None if slope is None else slope.reshape(-1)[chunk.place] for slope in slopes],
            narrow=False,
        )
        row = torch.arange(chunk.place.start, chunk.place.stop, device=target.device)
        target[row // tokens, row % tokens] = chunk.logits


def _backward(
    arguments: Sequence[Any],
) -> tuple[_Call, RowStats, TeacherStats, Tensor, Sequence[Tensor | None]]:
    flat = Arguments(arguments)
    call = flat.take(_Call)
    row_max, log_sum, entropy, *slopes, slope_mean, of_row_max, of_log_sum, grad = flat.rest()
    none = torch.empty_like(row_max)
    stats = RowStats._make([none] * len(RowStats._fields))
    stats = stats._replace(row_max=row_max, log_sum=log_sum, entropy=entropy)
    compared = TeacherStats(none, none, none, slope_mean, of_row_max, of_log_sum)
    if grad is None:
        grad = torch.zeros_like(row_max)
    return call, stats, compared, grad, slopes


for _operator in (compared_token_stats_fwd, compared_token_stats_bwd, compared_token_stats_bwd_):
    torch.library.impl(f"fastrl::{_operator.__name__}", "CompositeExplicitAutograd", _operator)

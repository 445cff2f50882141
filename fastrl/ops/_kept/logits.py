"""Statistics of logits over the tokens that each row kept, and their gradient.

The kept logits of a chunk of rows are gathered, and the kernels for whole rows run on them. Rows
with the whole vocabulary go through the same kernels in place, selected by a mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fastrl.contract import RowArguments, RowStats
from fastrl.library import called, operators
from fastrl.ops._autograd.first_derivative import first_derivative_only
from fastrl.ops._kept.rows import (
    CHUNK_BYTES,
    COLUMN_BYTES,
    NO_ID,
    KeptArguments,
    KeptRows,
    check_kept,
    ids_of_part,
)
from fastrl.ops._linear.call import Arguments
from fastrl.ops._linear.chunks import (
    chunk_stats,
    flat_rows,
    in_batch,
    order_rows,
    take_rows,
    write_chunk_gradient,
)
from fastrl.ops._process_groups import gathered
from fastrl.ops._row_stats import public_stats, slopes_of, without_gradient
from fastrl.ops._rows import check_ids
from fastrl.ops._vocabulary_parts.parts import VocabularyParts
from fastrl.ops._vocabulary_parts.statistics import (
    PartRows,
    Slopes,
    combined,
    part_stats,
)
from fastrl.tracing import refuse_transforms


class Chunk(NamedTuple):
    """Rows with similar numbers of kept tokens, and their logits `[C, K]`."""

    place: tuple[Tensor, Tensor, Tensor]  # indices of these logits in `[B, T, V]`
    padding: Tensor  # bool [C, K]
    indices: Tensor  # [C], the rows among all rows
    logits: Tensor
    rows: RowArguments
    part: PartRows | None  # the rows of this rank's part of a split vocabulary


def kept_token_stats(
    logits: Tensor,
    rows: RowArguments,
    kept: KeptArguments,
    parts: VocabularyParts,
    backend: str,
    *,
    inplace_backward: bool,
) -> tuple[Tensor, ...]:
    """Return the fields of `TokenStats`, `[B, T]` and differentiable."""
    refuse_transforms("a function of kept tokens")
    return cast(
        "tuple[Tensor, ...]",
        _KeptTokenStats.apply(logits, rows, kept, parts, inplace_backward, backend),  # type: ignore[no-untyped-call]
    )


class _KeptTokenStats(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        rows: RowArguments,
        kept: KeptArguments,
        parts: VocabularyParts,
        inplace_backward: bool,
        backend: str,
    ) -> tuple[Tensor, ...]:
        stats = RowStats._make(
            torch.ops.fastrl.kept_token_stats_fwd(logits, *rows, *parts, *kept, backend)
        )
        row_tensors = (rows.token_ids, rows.mask, rows.temperatures)
        saved = (stats.row_max, stats.log_sum, stats.entropy)
        ctx.save_for_backward(logits, *row_tensors, *kept, *saved)
        ctx.rows = rows._replace(token_ids=None, mask=None, temperatures=None)  # type: ignore[arg-type]
        ctx.parts, ctx.inplace_backward, ctx.backend = parts, inplace_backward, backend
        ctx.mark_non_differentiable(*without_gradient(stats))
        ctx.set_materialize_grads(False)
        return public_stats(stats)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, token_ids, mask, temperatures, *others = ctx.saved_tensors
        rows = ctx.rows._replace(token_ids=token_ids, mask=mask, temperatures=temperatures)
        kept, stats = others[:2], others[2:]
        slopes = (None if slope is None else slope.contiguous() for slope in slopes_of(grads))
        arguments = (logits, *rows, *ctx.parts, *kept, ctx.backend, *stats, *slopes)
        if ctx.inplace_backward and not torch.compiler.is_compiling():
            torch.ops.fastrl.kept_token_stats_bwd_(*arguments)
            # makes autograd raise if another node has saved the logits
            torch.autograd.graph.increment_version(logits)
            gradient = logits.detach()
        else:
            gradient = torch.ops.fastrl.kept_token_stats_bwd(*arguments)
        return (gradient, *([None] * 5))


class KeptCall(NamedTuple):
    """The arguments that the operators share; logits are `[B, T, V]`."""

    logits: Tensor
    rows: RowArguments
    parts: VocabularyParts
    kept: KeptArguments
    backend: str

    def active(self) -> Tensor:
        """Return which rows are active, bool `[B, T]`."""
        assert self.rows.mask is not None
        return self.rows.mask

    def vocabulary(self) -> int:
        """Return the size of the whole vocabulary."""
        return sum(self.parts.sizes) if self.parts.split() else self.logits.shape[-1]

    def check(self) -> None:
        """Raise for invalid values, which the trace of a function cannot check."""
        check_ids(self.rows, self.active(), self.vocabulary())
        check_kept(self.kept, self.active().flatten(), self.vocabulary())

    def part(self) -> PartRows | None:
        """Return the rows of this rank's part, or None if the vocabulary is whole."""
        parts = self.parts
        return PartRows.of(self.rows, self.active(), parts) if parts.split() else None

    def whole(self) -> Tensor:
        """Return which rows are active and have the whole vocabulary, bool `[B, T]`."""
        assert self.kept.kept_offsets is not None
        counts = self.kept.kept_offsets.diff().reshape(self.active().shape)
        return self.active() & (counts == 0)

    def chunks(self) -> Iterator[Chunk]:
        """Yield the active rows that kept a part of the vocabulary, with their kept logits."""
        logits, tokens, part = self.logits, self.logits.shape[1], self.part()
        rows = flat_rows(self.rows)
        kept = KeptRows.of(self.kept, rows.token_ids, self.vocabulary())
        # the only synchronization on a GPU
        active = self.active().flatten()
        order = order_rows(active, active, compact=True, kept=kept)
        assert order.indices is not None
        for piece, width in order.pieces(0, order.trained):
            if width is None:
                continue
            at_once = max(1, CHUNK_BYTES[logits.is_cuda] // (COLUMN_BYTES * width))
            for indices in order.indices[piece].split(at_once):
                of_chunk = take_rows(rows, indices)
                columns = kept.taken(indices).columns(of_chunk.token_ids, width)
                ids = ids_of_part(columns, self.parts).to(torch.int64)
                place = (indices // tokens)[:, None], (indices % tokens)[:, None], ids.clamp(min=0)
                local = None if part is None else part.flat().taken(indices).at(columns.place)
                yield Chunk(
                    place,
                    ids < 0,
                    indices,
                    logits[place].masked_fill_(ids < 0, float("-inf")),
                    of_chunk._replace(token_ids=columns.place, ignore_index=NO_ID),
                    local,
                )

    def chunk_gradients(self, stats: Sequence[Tensor], slopes: Slopes) -> list[Chunk]:
        """Return all chunks with dL/dlogits in place of the logits."""
        row_max, log_sum, entropy = (stat.flatten() for stat in stats)
        chunks = list(self.chunks())
        for chunk in chunks:
            at = chunk.indices
            unused = torch.empty_like(row_max[at])
            saved = RowStats._make([unused] * len(RowStats._fields))
            saved = saved._replace(row_max=row_max[at], log_sum=log_sum[at], entropy=entropy[at])
            some = [None if slope is None else slope.flatten()[at] for slope in slopes]
            write_chunk_gradient(
                chunk.logits, chunk.rows, saved, some, self.backend, narrow=False, part=chunk.part
            )
            chunk.logits.masked_fill_(chunk.padding, 0.0)  # added to the first column, also by NaN
        return chunks

    def whole_rows(self, stats: Sequence[Tensor], slopes: Slopes) -> tuple[object, ...]:
        """Return the other arguments of `token_stats_bwd` for rows with the whole vocabulary."""
        part, rows = self.part(), self.rows._replace(mask=self.whole())
        if part is not None:
            rows, slopes = part.rows._replace(mask=self.whole()), part.slopes(slopes)
        return (*rows, *stats, *(None if x is None else x.contiguous() for x in slopes))


@torch.no_grad()
def kept_token_stats_fwd(*arguments: Any) -> tuple[Tensor, ...]:
    """Return the fields of `RowStats`, `[B, T]`; 0 at inactive rows."""
    call = Arguments(arguments).take(KeptCall)
    call.check()
    part, whole = call.part(), call.whole()
    if part is None:
        rows = call.rows._replace(mask=whole)
        forward = operators(call.backend).token_stats_fwd
        stats = called(forward, call.logits, *rows, True, True)
        for chunk in call.chunks():
            of_chunk = chunk_stats(chunk.logits, chunk.rows, call.backend)
            for values, some in zip(stats, of_chunk, strict=True):
                values.view(-1)[chunk.indices] = some
        return tuple(stats)
    local = part_stats(
        call.logits, part._replace(rows=part.rows._replace(mask=whole)), call.backend
    )
    for chunk in call.chunks():
        assert chunk.part is not None
        of_part = part_stats(chunk.logits[None], in_batch(chunk.part), call.backend)
        local.flatten(1)[:, chunk.indices] = of_part[:, 0]
    return tuple(combined(gathered(local, call.parts.process_group()), part))


@torch.no_grad()
def kept_token_stats_bwd(*arguments: Any) -> Tensor:
    """Return dL/dlogits, 0 at the tokens that a row has not kept.

    After the arguments of the forward come row_max, log_sum, entropy, and the upstream gradients of
    logprobs, entropy and logsumexp.
    """
    call, stats, slopes = _backward(arguments)
    gradient = operators(call.backend).token_stats_bwd(call.logits, *call.whole_rows(stats, slopes))
    for chunk in call.chunk_gradients(stats, slopes):
        gradient.index_put_(chunk.place, chunk.logits, accumulate=True)
    return cast("Tensor", gradient)


@torch.no_grad()
def kept_token_stats_bwd_(*arguments: Any) -> None:
    """Overwrite the logits with dL/dlogits; takes the arguments of `kept_token_stats_bwd`."""
    call, stats, slopes = _backward(arguments)
    chunks = call.chunk_gradients(stats, slopes)  # reads what the next line overwrites
    operators(call.backend).token_stats_bwd_(call.logits, *call.whole_rows(stats, slopes), False)
    for chunk in chunks:
        call.logits.index_put_(chunk.place, chunk.logits, accumulate=True)


def _backward(arguments: Sequence[Any]) -> tuple[KeptCall, Sequence[Tensor], Slopes]:
    flat = Arguments(arguments)
    call, rest = flat.take(KeptCall), flat.rest()
    return call, rest[:3], (rest[3], rest[4], rest[5])


for _operator in (kept_token_stats_fwd, kept_token_stats_bwd, kept_token_stats_bwd_):
    torch.library.impl(f"fastrl::{_operator.__name__}", "CompositeExplicitAutograd", _operator)

"""Chunks of rows in a linear form: which rows they contain, their statistics and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl import reference
from fastrl.contract import RowArguments, RowStats
from fastrl.library import operators
from fastrl.ops._linear.head import LinearHead

#: Most bytes of logits in a chunk on a CPU.
_CPU_CHUNK_BYTES = 192 * 2**20


def take_rows(rows: RowArguments, chunk: Tensor | slice) -> RowArguments:
    """Index rows `[N]` by a chunk."""
    return rows._replace(
        token_ids=rows.token_ids[chunk],
        mask=None if rows.mask is None else rows.mask[chunk],
        temperatures=None if rows.temperatures is None else rows.temperatures[chunk],
    )


def _as_batch(rows: RowArguments) -> RowArguments:
    """Reshape rows `[C]` to `[1, C]`, as the operators on logits take them."""
    return rows._replace(
        token_ids=rows.token_ids[None],
        mask=None if rows.mask is None else rows.mask[None],
        temperatures=None if rows.temperatures is None else rows.temperatures[None],
    )


class RowOrder(NamedTuple):
    """Indices of rows that may have a gradient, and of other active rows; None means all rows."""

    trained: Tensor | None
    scored: Tensor | None


def order_rows(active: Tensor, may_flow: Tensor, *, compact: bool) -> RowOrder:
    """Partition the rows `[N]` into active rows that may have a gradient, and other active rows.

    On a GPU this is the only synchronization of a call.
    """
    if not compact:
        return RowOrder(None, None)
    kind = torch.where(active, torch.where(may_flow, 0, 1), 2)
    order = kind.argsort(stable=True)
    counts = torch.stack([(kind == 0).sum(), (kind <= 1).sum()]).tolist()
    return RowOrder(order[: counts[0]], order[counts[0] : counts[1]])


def chunk_size(chunk_tokens: int | None, head: LinearHead, *, trained: bool) -> int:
    """Return the number of rows in a chunk: `chunk_tokens`, or a default.

    On a CPU the logits of a chunk and a block of converted weights take less than 256 MiB. On a GPU
    every chunk reads and writes the accumulated weight gradient once, which takes many rows to
    amortize; a frozen head needs fewer.
    """
    if chunk_tokens is not None:
        return chunk_tokens
    if head.weight.device.type != "cpu":
        return 4096 if trained else 1024
    rows = _CPU_CHUNK_BYTES // (head.vocabulary * head.dtype.itemsize)
    return max(16, min(rows, 4096))


def chunks(rows: Tensor | None, total: int, size: int) -> Iterator[Tensor | slice]:
    """Yield chunks of `rows` (None: of all `total` rows), of at most `size` rows."""
    count = total if rows is None else rows.shape[0]
    number = -(-count // size)
    for i in range(number):  # equal sizes: the GEMMs of a short last chunk would be inefficient
        bounds = slice(i * count // number, (i + 1) * count // number)
        yield bounds if rows is None else rows[bounds]


def chunk_stats(logits: Tensor, rows: RowArguments, backend: str) -> RowStats:
    """Return the statistics of the logits `[C, V]` of a chunk, `[C]` each."""
    if backend == "reference":
        stats = reference_stats(logits, rows)
        unused = torch.zeros_like(logits[:, 0])
        return RowStats(*stats, row_max=unused, log_sum=unused)  # type: ignore[misc]
    outputs = operators(backend).token_stats_fwd(logits[None], *_as_batch(rows), True, True)
    return RowStats._make(output[0] for output in outputs)


def write_chunk_gradient(
    logits: Tensor,
    rows: RowArguments,
    stats: RowStats,
    grads: tuple[Tensor | None, Tensor | None, Tensor | None],
    backend: str,
) -> None:
    """Overwrite the logits `[C, V]` with dL/dlogits; `grads`: of logprobs, entropy, logsumexp."""
    if backend == "reference":
        with torch.enable_grad():
            leaf = logits.detach().clone().requires_grad_()
            outputs = zip(reference_stats(leaf, rows)[:3], grads, strict=True)
            used = [(output, grad) for output, grad in outputs if grad is not None]
        outputs_used, upstream = zip(*used, strict=True)
        logits.copy_(torch.autograd.grad(outputs_used, leaf, upstream)[0])
        return
    operators(backend).token_stats_bwd_(
        logits[None],
        *_as_batch(rows),
        stats.row_max[None],
        stats.log_sum[None],
        stats.entropy[None],
        *(None if grad is None else grad[None].contiguous() for grad in grads),
        False,
    )


def reference_stats(logits: Tensor, rows: RowArguments) -> tuple[Tensor, ...]:
    """Return the fields of `TokenStats` from the reference backend."""
    active = rows.token_ids != rows.ignore_index
    return reference.token_stats(
        logits,
        rows.token_ids,
        active if rows.mask is None else active & rows.mask,
        temperature=rows.temperature if rows.temperatures is None else rows.temperatures,
        logit_scale=rows.logit_scale,
        logit_softcap=rows.logit_softcap or None,
    )


def compact_rows(logits: Tensor, has_gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Move the rows with a gradient to the front of a chunk; return them and their old indices.

    Rows from the end replace those without a gradient, so only as many rows are copied as are
    replaced.
    """
    count = int(has_gradient.sum())
    kept = torch.arange(count, device=has_gradient.device)
    gaps = (~has_gradient[:count]).nonzero()[:, 0]
    fillers = count + has_gradient[count:].nonzero()[:, 0]
    kept[gaps] = fillers
    for gap, filler in zip(gaps.tolist(), fillers.tolist(), strict=True):
        logits[gap].copy_(logits[filler])
    return logits[:count], kept

"""Which rows of a linear form enter which GEMM, and the statistics of a chunk of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl import reference
from fastrl.contract import RowArguments, RowStats
from fastrl.library import operators
from fastrl.ops._linear.head import LinearHead

#: Bytes of logits that a chunk may take on a CPU.
_CPU_CHUNK_BYTES = 192 * 2**20


def take_rows(rows: RowArguments, which: Tensor | slice) -> RowArguments:
    """Return the chosen ones of rows `[N]`."""
    heat = rows.temperatures
    return rows._replace(
        token_ids=rows.token_ids[which],
        mask=None if rows.mask is None else rows.mask[which],
        temperatures=None if heat is None else heat[which],
    )


def _as_batch(rows: RowArguments) -> RowArguments:
    """Return rows `[C]` as the operators on logits take them, `[1, C]`."""
    return rows._replace(
        token_ids=rows.token_ids[None],
        mask=None if rows.mask is None else rows.mask[None],
        temperatures=None if rows.temperatures is None else rows.temperatures[None],
    )


class RowOrder(NamedTuple):
    """Rows that may have a gradient, and rows that only have statistics; None means all rows."""

    trained: Tensor | None
    scored: Tensor | None


def order_rows(active: Tensor, may_flow: Tensor, *, compact: bool) -> RowOrder:
    """Sort the rows `[N]` into those that may have a gradient, and the other active ones.

    On a GPU this is the one synchronisation of a call.
    """
    if not compact:
        return RowOrder(None, None)
    kind = torch.where(active, torch.where(may_flow, 0, 1), 2)
    order = kind.argsort(stable=True)
    counts = torch.stack([(kind == 0).sum(), (kind <= 1).sum()]).tolist()
    return RowOrder(order[: counts[0]], order[counts[0] : counts[1]])


def chunk_size(chunk_tokens: int | None, head: LinearHead, *, trained: bool) -> int:
    """Return how many rows a chunk has: as asked, else from the vocabulary and the device.

    On a CPU a chunk of logits and a block of converted weights stay under 256 MiB. On a GPU each
    chunk reads and writes the summed weight gradient once, which wants many rows; with a frozen
    head few are enough.
    """
    if chunk_tokens is not None:
        return chunk_tokens
    if head.weight.device.type != "cpu":
        return 4096 if trained else 1024
    rows = _CPU_CHUNK_BYTES // (head.vocabulary * head.dtype.itemsize)
    return max(16, min(rows, 4096))


def chunks(rows: Tensor | None, total: int, size: int) -> Iterator[Tensor | slice]:
    """Yield the rows of each chunk: parts of `rows`, or slices of all `total` rows."""
    count = total if rows is None else rows.shape[0]
    parts = -(-count // size)
    for part in range(parts):  # equal parts: a short last chunk would waste its GEMM
        bounds = slice(part * count // parts, (part + 1) * count // parts)
        yield bounds if rows is None else rows[bounds]


def chunk_stats(logits: Tensor, rows: RowArguments, backend: str) -> RowStats:
    """Return the statistics of chunk logits `[C, V]`, `[C]` each."""
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
    """Write dL/dlogits over the logits `[C, V]`; `grads` are of logprobs, entropy, logsumexp."""
    if backend == "reference":
        with torch.enable_grad():
            leaf = logits.detach().clone().requires_grad_()
            outputs = zip(reference_stats(leaf, rows)[:3], grads, strict=True)
            asked = [(output, grad) for output, grad in outputs if grad is not None]
        differentiated, upstream = zip(*asked, strict=True)
        logits.copy_(torch.autograd.grad(differentiated, leaf, upstream)[0])
        return
    operators(backend).token_stats_bwd_(
        logits[None],
        *_as_batch(rows),
        stats.row_max[None],
        stats.log_sum[None],
        stats.entropy[None],
        *(None if grad is None else grad[None].contiguous() for grad in grads),
    )


def reference_stats(logits: Tensor, rows: RowArguments) -> tuple[Tensor, ...]:
    """Return the five statistics of `TokenStats` from the reference backend."""
    active = rows.token_ids != rows.ignore_index
    return reference.token_stats(
        logits,
        rows.token_ids,
        active if rows.mask is None else active & rows.mask,
        temperature=rows.temperature if rows.temperatures is None else rows.temperatures,
        logit_scale=rows.logit_scale,
        logit_softcap=rows.logit_softcap or None,
    )


def keep_rows(logits: Tensor, flows: Tensor) -> tuple[Tensor, Tensor]:
    """Bring the rows that `flows` marks to the front of a chunk; return them and which they are.

    Rows from the end fill the gaps, so that few rows to leave out cost few copies.
    """
    count = int(flows.sum())
    kept = torch.arange(count, device=flows.device)
    gaps, fillers = (~flows[:count]).nonzero()[:, 0], count + flows[count:].nonzero()[:, 0]
    kept[gaps] = fillers
    for gap, filler in zip(gaps.tolist(), fillers.tolist(), strict=True):
        logits[gap].copy_(logits[filler])
    return logits[:count], kept

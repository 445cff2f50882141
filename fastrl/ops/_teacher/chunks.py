"""A teacher's rows, chunk by chunk beside the student's rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastrl import native
from fastrl.contract import RowArguments, RowStats
from fastrl.ops._linear.chunks import as_batch, in_batch, row_stride
from fastrl.ops._linear.head import LinearHead
from fastrl.ops._linear.products import choose_products
from fastrl.ops._teacher.arguments import TeacherArguments
from fastrl.ops._teacher.rows import Pair, TeacherStats, pair_of
from fastrl.ops._teacher.top_k import TopKRows
from fastrl.ops._vocabulary_parts.parts import VocabularyParts
from fastrl.ops._vocabulary_parts.statistics import PartRows


def teacher_head(teacher: TeacherArguments, dtype: torch.dtype) -> LinearHead | None:
    """Return the teacher's head with logits in `dtype`, or None if it has none."""
    if teacher.teacher_weight is None:
        return None
    return LinearHead(
        teacher.teacher_weight,
        teacher.teacher_bias,
        teacher.teacher_lora_a,
        teacher.teacher_lora_b,
        teacher.teacher_lora_scale,
        dtype,
    )


class TeacherChunks:
    """The teacher's side of a call; each chunk overwrites the previous one."""

    def __init__(
        self,
        teacher: TeacherArguments,
        order: Tensor | None,
        size: int,
        dtype: torch.dtype,
        backend: str,
        parts: VocabularyParts,
    ) -> None:
        """Allocate the buffers.

        `order` has the indices of the processed rows, `size` is the number of rows in a chunk, and
        `dtype` the dtype of the student's logits.
        """
        self._teacher, self._order, self._backend, self._parts = teacher, order, backend, parts
        self._head = teacher_head(teacher, dtype)
        if self._head is not None:
            hidden = teacher.teacher_hidden
            assert hidden is not None
            on_gpu = backend in ("triton", "cuda")
            products = choose_products(
                hidden, self._head.weight, dtype, backend, teacher.teacher_operand_dtype
            )
            stride = row_stride(self._head.vocabulary, on_gpu=on_gpu)
            self._products = products
            self._logits = native.new_large(hidden, (size, stride), dtype)
            self._states = hidden.new_empty((size, hidden.shape[1]), dtype=products.operand_dtype)

    def beside(
        self, chunk: slice, logits: Tensor, rows: RowArguments, part: PartRows | None
    ) -> Comparison:
        """Return the comparison of a chunk of logits `[C, V]`, with rows `[C]`."""
        index = chunk if self._order is None else self._order[chunk]
        teacher, scaling = self._teacher, self._teacher.scaling
        temperatures = scaling.teacher_temperatures
        of_chunk = None if temperatures is None else temperatures[index]
        if teacher.teacher_logprobs is not None:
            assert teacher.teacher_ids is not None
            teacher = teacher._replace(
                teacher_ids=teacher.teacher_ids[index],
                teacher_logprobs=teacher.teacher_logprobs[index],
            )
            return TopKRows(logits, rows, teacher, self._backend, part, self._parts)
        batch_temperatures = None if of_chunk is None else of_chunk[None].contiguous()
        scaling = scaling._replace(teacher_temperatures=batch_temperatures)
        pair = pair_of(
            logits[None],
            self._logits_of(index, logits)[None],
            as_batch(rows),
            teacher._replace(scaling=scaling),
            self._backend,
            None if part is None else in_batch(part),
            self._parts,
        )
        return Dense(pair)

    def _logits_of(self, index: slice | Tensor, like: Tensor) -> Tensor:
        given = self._teacher.teacher_logits
        if given is not None and given.dim() == 2:
            return given[index]
        if given is not None:
            row = index
            if isinstance(row, slice):
                row = torch.arange(row.start, row.stop, device=given.device)
            return given[row // given.shape[1], row % given.shape[1]]
        hidden, head = self._teacher.teacher_hidden, self._head
        assert hidden is not None
        assert head is not None
        states = self._states[: like.shape[0]].copy_(hidden[index])
        logits = self._logits[: like.shape[0], : head.vocabulary]
        head.project(self._products, states, logits)
        return logits


class Dense:
    """A comparison of a chunk of whole rows, `[C]`, with the interface of `TopKRows`."""

    def __init__(self, pair: Pair) -> None:
        """Compare the rows `[1, C]` of `pair`."""
        self._pair = pair

    def compare(self, stats: RowStats) -> TeacherStats:
        """Return the comparison with a student of these statistics, `[C]` each."""
        return self._pair.compare(_batch(stats)).indexed(0)

    def write_gradient(
        self,
        stats: RowStats,
        compared: TeacherStats,
        grad_divergence: Tensor,
        slopes: Sequence[Tensor | None],
        *,
        narrow: bool,
    ) -> None:
        """Overwrite the logits with dL/dlogits; `slopes` are of logprob, entropy and logsumexp."""
        self._pair.write_gradient(
            _batch(stats),
            compared.indexed(None),
            grad_divergence[None],
            [None if slope is None else slope[None] for slope in slopes],
            narrow=narrow,
        )


def _batch(stats: RowStats) -> RowStats:
    return RowStats._make(stat[None] for stat in stats)


Comparison = Dense | TopKRows

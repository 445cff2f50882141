"""The arguments of the operators that loop over rows of logits.

They are checked once, by a public function, and passed on as one object. An operator takes its
fields as flat arguments, in the order in which `flat` lists them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeVar, cast, get_type_hints

import torch
from torch import Tensor

from fastrl.contract import Coefficients, RowArguments, ScalingArguments
from fastrl.library import arithmetic_dtype
from fastrl.ops._vocabulary_parts.parts import VocabularyParts

Fields = TypeVar("Fields")

#: An id that no token has.
NO_ID = -2


class Source(NamedTuple):
    """Where rows of logits come from: they are given, or projected from hidden states."""

    logits: Tensor | None  # [B, T, V]
    hidden: Tensor | None  # [N, H]
    weight: Tensor | None  # [V, H]
    bias: Tensor | None
    lora_a: Tensor | None
    lora_b: Tensor | None
    lora_scale: float
    operand_dtype: torch.dtype | None  # of GEMMs on a GPU; None: the dtype of the results

    # methods, not properties: torch.compile in torch 2.10 cannot trace properties of a NamedTuple
    def given(self) -> bool:
        """Return whether there are rows."""
        return self.logits is not None or self.hidden is not None

    def trainable(self) -> tuple[Tensor | None, ...]:
        """Return what may need a gradient: logits, or hidden states and parameters."""
        return self[:1] if self.logits is not None else self[1:6]

    def with_trainable(self, tensors: Sequence[Tensor | None]) -> Source:
        """Return the source with these instead."""
        names = self._fields[:1] if self.logits is not None else self._fields[1:6]
        return self._replace(**dict(zip(names, tensors, strict=True)))  # type: ignore[arg-type]

    def vocabulary(self) -> int:
        """Return the number of columns here."""
        if self.logits is not None:
            return self.logits.shape[-1]
        assert self.weight is not None
        return self.weight.shape[0]

    def dtype(self) -> torch.dtype:
        """Return the dtype of statistics, and of projected logits."""
        if self.logits is not None:
            return arithmetic_dtype(self.logits, self.logits)
        assert self.hidden is not None
        assert self.weight is not None
        return arithmetic_dtype(self.hidden, self.weight)


class KeptArguments(NamedTuple):
    """`KeptTokens` in the form that operators take; None means the whole vocabulary."""

    ids: Tensor | None  # integers [M]
    offsets: Tensor | None  # integers [N + 1]


class TeacherArguments(NamedTuple):
    """A teacher's rows of logits, or its log-probabilities of K tokens of each row."""

    source: Source
    token_ids: Tensor | None  # int64 [N, K]
    logprobs: Tensor | None  # [N, K]
    has_tail: bool  # all other tokens together are one more event
    scaling: ScalingArguments
    beta: float

    def given(self) -> bool:
        """Return whether there is a teacher."""
        return self.source.given() or self.logprobs is not None


class SamplerArguments(NamedTuple):
    """`TopKLogprobs` in the form that operators take, and the weights that depend on p / q."""

    token_ids: Tensor | None  # int64 [N, K]; -1: none
    logprobs: Tensor | None  # [N, K]
    weights: list[float]  # see `sampler_weights`

    def given(self) -> bool:
        """Return whether the sampler's score is subtracted."""
        return self.token_ids is not None


NO_SOURCE = Source(None, None, None, None, None, None, 1.0, None)
ALL_TOKENS = KeptArguments(None, None)
NO_TEACHER = TeacherArguments(
    NO_SOURCE, None, None, False, ScalingArguments(None, 1.0, 1.0, 0.0), 0.0
)
NO_SAMPLER = SamplerArguments(None, None, [])


class RowInputs(NamedTuple):
    """Rows of logits, with all that belongs to them.

    Rows are `[B, T]` like given logits; those of hidden states are packed, `[1, N]`.
    """

    source: Source
    token_ids: Tensor  # int64
    active: Tensor  # bool; all other rows have no effect, whatever their values
    scaling: ScalingArguments
    with_entropy: bool
    with_sum_sq_probs: bool
    chunk_tokens: int | None
    compact: bool
    backend: str
    parts: VocabularyParts
    kept: KeptArguments
    teacher: TeacherArguments
    sampler: SamplerArguments

    def vocabulary(self) -> int:
        """Return the size of the whole vocabulary."""
        return self.parts.total(self.source.vocabulary())

    def on_gpu(self) -> bool:
        """Return whether GPU kernels process the rows; tests run these kernels on a CPU."""
        return self.backend in ("triton", "cuda")

    def alone(self) -> bool:
        """Return whether a gradient depends on nothing but the row's own statistics."""
        return not (self.parts.split() or self.teacher.given() or self.sampler.given())

    def row_arguments(self) -> RowArguments:
        """Return the arguments of the kernels for whole rows."""
        return RowArguments(self.token_ids, self.active, NO_ID, *self.scaling)


def flat(fields: tuple[Any, ...]) -> list[Any]:
    """Return the values of a named tuple, and of those nested in it, in the order of a schema."""
    values: list[Any] = []
    for value in fields:
        values += flat(value) if isinstance(value, tuple) else [value]
    return values


def restored(kind: type[Fields], values: Iterator[Any]) -> Fields:
    """Return the named tuple whose `flat` values come next."""
    nested = _nested(kind)  # type: ignore[arg-type]
    if not any(nested):
        return kind(*islice(values, len(nested)))
    return kind(*(next(values) if one is None else restored(one, values) for one in nested))


@functools.cache
def _nested(kind: type) -> list[type | None]:
    """Return which fields of a named tuple are others, in several arguments."""
    hints = get_type_hints(kind).values()
    return [
        hint if hasattr(hint, "_fields") and hint is not Coefficients else None for hint in hints
    ]


def each_tensor(change: Callable[[Tensor], Tensor], fields: Fields) -> Fields:
    """Change all tensors in a tuple and in those nested in it."""
    values: Any = fields
    if isinstance(values, Tensor):
        return cast("Fields", change(values))
    kinds = (Tensor, tuple)
    changed = [each_tensor(change, x) if isinstance(x, kinds) else x for x in values]
    named = hasattr(values, "_make")
    return cast("Fields", values._make(changed) if named else tuple(changed))


def split_tensors(values: Sequence[Any]) -> tuple[list[Tensor | None], list[Any]]:
    """Return the tensors among values, and the others, with None in place of the rest."""
    tensors = [x if isinstance(x, Tensor) else None for x in values]
    pairs = zip(values, tensors, strict=True)
    return tensors, [value if x is None else None for value, x in pairs]

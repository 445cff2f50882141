"""The arguments of the linear operators, restored from their flat form."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, get_type_hints

import torch
from torch import Tensor

from fastrl.contract import Coefficients, RowArguments
from fastrl.library import arithmetic_dtype
from fastrl.ops._kept.rows import KeptArguments, KeptRows, check_kept
from fastrl.ops._linear.head import LinearHead
from fastrl.ops._rows import check_ids
from fastrl.ops._teacher.arguments import TeacherArguments
from fastrl.ops._vocabulary_parts.parts import VocabularyParts

Fields = TypeVar("Fields")


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
    operand_dtype: torch.dtype | None
    parts: VocabularyParts
    kept: KeptArguments
    teacher: TeacherArguments

    def head(self) -> LinearHead:
        """Return the LM head."""
        dtype = arithmetic_dtype(self.hidden, self.weight)
        return LinearHead(self.weight, self.bias, self.lora_a, self.lora_b, self.lora_scale, dtype)

    def active(self) -> Tensor:
        """Return which rows are active."""
        mask = self.rows.mask
        if mask is None or mask.dtype != torch.bool:
            came = "None" if mask is None else str(mask.dtype)
            raise ValueError(f"mask must be a bool tensor for a linear form, got {came}")
        return mask

    def check_teacher(self) -> None:
        """Raise if a teacher has invalid values, which no trace of a function can check."""
        vocabulary = sum(self.parts.sizes) if self.parts.split() else self.weight.shape[0]
        self.teacher.check_tokens(self.active(), vocabulary)

    def kept_rows(self, *, checked: bool = False) -> KeptRows | None:
        """Return the kept tokens of the rows, or None if all have the whole vocabulary.

        With `checked`, raise for invalid values, which the trace of a function cannot check.
        """
        if self.kept.kept_ids is None:
            return None
        vocabulary = sum(self.parts.sizes) if self.parts.split() else self.weight.shape[0]
        if checked:
            check_ids(self.rows, self.active(), vocabulary)
            check_kept(self.kept, self.active(), vocabulary)
        return KeptRows.of(self.kept, self.rows.token_ids, vocabulary)

    def on_gpu(self) -> bool:
        """Return whether GPU kernels process the chunks; tests run these kernels on a CPU."""
        return self.backend in ("triton", "cuda")


@functools.cache
def _types(fields: type) -> tuple[Any, ...]:
    return tuple(get_type_hints(fields).values())


class Arguments:
    """The flat arguments of an operator, consumed from the front."""

    def __init__(self, arguments: Sequence[Any]) -> None:
        """Take the arguments in the order of the schema."""
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


def without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """Disable autocast in a function, which gets the dtype as an argument wherever it matters."""

    @functools.wraps(function)
    def run(*arguments: Any, **options: Any) -> Any:
        first = arguments[0]
        device = (first.hidden if isinstance(first, LinearCall) else first).device.type
        if not torch.amp.is_autocast_available(device):
            return function(*arguments, **options)
        with torch.autocast(device, enabled=False):
            return function(*arguments, **options)

    return run

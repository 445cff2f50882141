"""The loops over rows as registered operators, with flat arguments, for traces.

They call the operators of the backends (`fastrl/library.py`), with the backend as an argument.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastrl.contract import (
    LEVELS,
    SURROGATES,
    CenteringStats,
    Coefficients,
    LossArguments,
    ObjectiveArguments,
    RowStats,
    SavedStats,
    TeacherStats,
)
from fastrl.library import declared, define, stored_dtype
from fastrl.ops._arguments import RowInputs, restored
from fastrl.ops._companions.pair import SavedComparison
from fastrl.ops._loss.slopes import TokenSlopes
from fastrl.ops._rows.loops import dtypes_of, row_gradients, row_losses, row_stats

_ROWS = declared(RowInputs)
_LOSS = f"{declared(LossArguments)}, {declared(ObjectiveArguments)}"
#: Without a teacher or a sampler there is nothing of it, and the list is empty.
_BACKWARD = (
    f"{declared(SavedStats)}, Tensor[] comparison, Tensor? grad_divergence, "
    "Tensor? grad_centering, bool[] needs"
)
_COMPARED = "Tensor[] of_teacher, Tensor[] comparison, Tensor[] of_sampler"
_SCHEMAS = {
    "rows_stats_fwd": f"({_ROWS}) -> ({declared(RowStats)}, {_COMPARED})",
    "rows_stats_bwd": f"({_ROWS}, {_BACKWARD}) -> Tensor[]",
    # given logits, which the gradient replaces
    "rows_stats_bwd_": f"({_ROWS}, {_BACKWARD}) -> ()".replace("Tensor?", "Tensor(a!)?", 1),
    "rows_loss_fwd": (
        f"({_ROWS}, {_LOSS}, Tensor? divergence_weights, Tensor? centering_weights, "
        "bool[] needs, bool metrics) -> "
        "(Tensor logprobs, Tensor entropy, Tensor[] of_teacher, Tensor[] of_sampler, "
        "Tensor[] gradients)"
    ),
}


def stats_fwd(*arguments: Any) -> tuple[Any, ...]:
    stats, *compared = row_stats(restored(RowInputs, iter(arguments)))
    return (*stats, *([*(x or ())] for x in compared))


def stats_bwd(*arguments: Any, overwrite: bool = False) -> list[Tensor]:
    values = iter(arguments)
    inputs, saved = restored(RowInputs, values), restored(SavedStats, values)
    comparison, *others = values
    compared = SavedComparison._make(comparison) if comparison else None
    gradients: list[Tensor] = row_gradients(inputs, saved, compared, *others, overwrite=overwrite)
    return gradients


def stats_bwd_(*arguments: Any) -> None:
    stats_bwd(*arguments, overwrite=True)


def loss_fwd(*arguments: Any) -> tuple[Any, ...]:
    values = iter(arguments)
    inputs, loss = restored(RowInputs, values), restored(LossArguments, values)
    objective = restored(ObjectiveArguments, values)
    coefficients = Coefficients._make(objective.coefficients)  # an operator takes them as a list
    objective = objective._replace(coefficients=coefficients)
    *weights, needs, metrics = values
    if LEVELS[objective.level] != "token" or SURROGATES[objective.surrogate] == "gmpo":
        raise ValueError("level must be token: the rows of a chunk are scored by themselves")
    slopes = TokenSlopes(inputs.active, loss, objective, None, inputs.backend)
    *stats, of_teacher, of_sampler, gradients = row_losses(
        inputs, slopes, *weights, needs, metrics=metrics
    )
    return (*stats, [*(of_teacher or ())], [*(of_sampler or ())], gradients)


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


# --- shapes and dtypes of the results


def _values(inputs: RowInputs, *names: str) -> list[Tensor]:
    like = inputs.token_ids
    return [like.new_empty(like.shape, dtype=dtype) for dtype in dtypes_of(inputs, *names)]


def _gradients(inputs: RowInputs, needs: list[bool]) -> list[Tensor]:
    found = []
    for x, need in zip(inputs.source.trainable(), needs, strict=True):
        if x is not None and need:
            dtype = x.dtype if inputs.source.logits is not None else stored_dtype(x)
            contiguous = torch.contiguous_format
            found.append(torch.empty_like(x, dtype=dtype, memory_format=contiguous))
    return found


def _stats_shapes(*arguments: Any) -> tuple[Any, ...]:
    inputs = restored(RowInputs, iter(arguments))
    return (*_values(inputs, *RowStats._fields), *_companions(inputs, with_saved=True))


def _companions(inputs: RowInputs, *, with_saved: bool) -> list[list[Tensor]]:
    """Return the statistics of a teacher and of the sampler."""
    of_teacher = (TeacherStats, SavedComparison) if with_saved else (TeacherStats,)
    found = [
        _values(inputs, *kind._fields) if inputs.teacher.given() else [] for kind in of_teacher
    ]
    names = CenteringStats._fields if inputs.sampler.given() else ()
    return [*found, _values(inputs, *names)]


def _gradient_shapes(*arguments: Any) -> list[Tensor]:
    return _gradients(restored(RowInputs, iter(arguments)), arguments[-1])


def _loss_shapes(*arguments: Any) -> tuple[Any, ...]:
    inputs, needs = restored(RowInputs, iter(arguments)), arguments[-2]
    of_rows = _values(inputs, "logprobs", "entropy")
    companions = _companions(inputs, with_saved=False)
    return (*of_rows, *companions, _gradients(inputs, needs))


_LOOPS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "rows_stats_fwd": (stats_fwd, _stats_shapes),
    "rows_stats_bwd": (stats_bwd, _gradient_shapes),
    "rows_stats_bwd_": (stats_bwd_, lambda *_: None),
    "rows_loss_fwd": (loss_fwd, _loss_shapes),
}
for _name, (_loop, _shapes) in _LOOPS.items():
    define(f"fastrl::{_name}", _SCHEMAS[_name])
    torch.library.impl(
        f"fastrl::{_name}", "CompositeExplicitAutograd", _with_autograd_inside(_loop)
    )
    torch.library.register_fake(f"fastrl::{_name}", _shapes)

rows_stats_fwd = torch.ops.fastrl.rows_stats_fwd
rows_stats_bwd = torch.ops.fastrl.rows_stats_bwd
rows_stats_bwd_ = torch.ops.fastrl.rows_stats_bwd_
rows_loss_fwd = torch.ops.fastrl.rows_loss_fwd

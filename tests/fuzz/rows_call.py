"""`token_logprobs` and `token_stats`: arguments and expected results."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from .bounded import Bounded
from .case import Case
from .compare import Got, Part, part
from .logits_data import as_held, logits_of
from .oracle.rows import Rows
from .rows_data import LogitRows, ids_tensor, logits_tensor, rows_of, token_options
from .tensors import flat_tensor, laid_out, mask_tensor
from .trial import Trial

DIFFERENTIABLE = ("logprobs", "entropy", "logsumexp")


def examined(trial: Trial) -> tuple[dict[str, Got], dict[str, Part]]:
    """Return the results of the call and the expected ones."""
    case = trial.case
    rows = rows_of(case)
    logits = logits_of(case, rows.tokens, rows.ids)
    leaf = trial.leaf(logits_tensor(rows, logits))
    arguments = {"mask": mask_tensor(case, rows.tokens), **token_options(rows)}
    if case.function == "token_stats":
        arguments["outputs"] = case.outputs
    if case.inplace:
        arguments["inplace_backward"] = True
    given = leaf * 1 if case.inplace else leaf  # what is given away is no leaf
    result = trial.call(given, trial.moved(ids_tensor(rows)), **trial.moved(arguments))
    parts = parts_of(result)
    active = rows.active
    oracle = Rows(logits[active], rows.ids[active], rows.head(trial), rows.arithmetic)
    trial.doubts.add("unspecified: a row without distribution", oracle.undefined)
    got = {name: part(x) for name, x in parts.items()}
    want = expected_parts(rows, oracle)
    if trial.differentiates(leaf):
        differentiate(trial, rows, [leaf], parts)
        got["grad logits"] = part(leaf.grad)
        gradient = rows.placed(oracle.gradient(*upstreams_of(rows, oracle)))
        want["grad logits"] = Part(gradient, case.dtype)
    return got, want


def parts_of(result: Any) -> dict[str, Tensor]:
    """Return the requested outputs by name."""
    parts = {"logprobs": result} if isinstance(result, Tensor) else result._asdict()
    return {name: x for name, x in parts.items() if x is not None}


def outputs_of(case: Case) -> tuple[str, ...]:
    return case.outputs if case.function.endswith("stats") else ("logprobs",)


def expected_parts(rows: LogitRows, oracle: Rows) -> dict[str, Part]:
    """Return the expected outputs of a case."""
    dtype = oracle.arithmetic.name
    return {
        name: Part(rows.placed(getattr(oracle, name)), "bool" if name == "is_top1" else dtype)
        for name in outputs_of(rows.case)
    }


def upstream_of(rows: LogitRows, output: str) -> np.ndarray | None:
    """Return the upstream gradient `[N]` of an output; None is no gradient."""
    case, total = rows.case, rows.tokens.total
    random = case.random(f"upstream {output}")
    kind = case.upstream
    if kind == "first" and output != next(o for o in outputs_of(case) if o in DIFFERENTIABLE):
        return None
    if kind in ("ones", "zero", "expanded"):
        return np.full(total, {"ones": 1.0, "zero": 0.0, "expanded": -0.375}[kind])
    drawn = as_held(random.standard_normal(total), "float32")
    if kind == "some-zero":
        drawn = np.where(random.random(total) < 0.5, 0.0, drawn)
    elif kind == "nan":
        drawn = np.where(random.random(total) < 0.5, np.nan, drawn)
    elif kind == "large":
        drawn = drawn * 2.0**40
    return drawn


def upstream_tensor(rows: LogitRows, values: np.ndarray, dtype: str) -> Tensor:
    case, shape = rows.case, rows.tokens.shape
    if case.upstream == "expanded" and values.size:
        return flat_tensor(case, values[:1], dtype).view((1,) * len(shape)).expand(shape)
    result = flat_tensor(case, values, dtype).view(shape)
    return laid_out(result, "strided") if case.upstream == "strided" else result


def upstreams_of(rows: LogitRows, oracle: Rows) -> list[Bounded]:
    """Return the upstream gradients of the active rows, zeros for an output that has none."""
    found = []
    for name in DIFFERENTIABLE:
        values = upstream_of(rows, name) if name in outputs_of(rows.case) else None
        values = np.zeros(rows.tokens.total) if values is None else values
        found.append(Bounded(values[rows.active], 0.0, oracle.arithmetic))
    return found


def differentiate(
    trial: Trial, rows: LogitRows, leaves: list[Tensor], parts: dict[str, Tensor]
) -> None:
    """Differentiate the outputs with the upstream gradients of the case."""
    outputs, gradients = [], []
    for name in DIFFERENTIABLE:
        upstream = upstream_of(rows, name) if name in parts else None
        if upstream is not None:
            outputs.append(parts[name])
            dtype = str(parts[name].dtype).removeprefix("torch.")
            gradients.append(upstream_tensor(rows, upstream, dtype))
    trial.backward(leaves, outputs, gradients)

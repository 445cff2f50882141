"""`token_logprobs` and `token_stats`: arguments and expected results."""

from typing import Any

import numpy as np
from torch import Tensor

from .case import DIVERGENCES, Case
from .oracle.bounded import Bounded
from .oracle.rows import Rows
from .policy_call import inplace_option
from .rows_data import LogitRows, ids_tensor, logits_of, rows_of, token_options
from .tokens import as_held, flat_tensor, laid_out, mask_tensor
from .trial import Trial

STATISTICS = ("logprobs", "entropy", "logsumexp")
DIFFERENTIABLE = (*STATISTICS, "divergence")


def examine_rows(trial: Trial) -> None:
    case = trial.case
    rows = rows_of(case)
    logits, tensor = logits_of(rows)
    leaf = trial.leaf(tensor)
    given = leaf * 1 if case.inplace else leaf  # what is given away is no leaf
    arguments = {**row_arguments(rows), **inplace_option(case, "inplace_backward")}
    parts = parts_of(trial.call(given, ids_tensor(rows), **arguments))
    oracle = rows.oracle(trial, logits)
    expect_parts(trial, rows, parts, oracle)
    if trial.backward({"logits": leaf}, *differentiated(rows, parts)):
        gradient = oracle.gradient(*upstreams_of(rows, oracle))
        want = {"logits": rows.tokens.placed(gradient, rows.active)}
        trial.expect_gradients({"logits": leaf}, want)


def row_arguments(rows: LogitRows) -> dict[str, Any]:
    """Return the arguments of all functions of a row."""
    outputs = {"outputs": rows.case.outputs} if rows.case.function.endswith("stats") else {}
    return {"mask": mask_tensor(rows.case, rows.tokens), **token_options(rows), **outputs}


def parts_of(result: Any) -> dict[str, Tensor | None]:
    return {"logprobs": result} if isinstance(result, Tensor) else result._asdict()


def outputs_of(case: Case) -> tuple[str, ...]:
    if case.function in DIVERGENCES:
        return ("divergence",)
    return case.outputs if case.function.endswith("stats") else ("logprobs",)


def expect_parts(
    trial: Trial, rows: LogitRows, parts: dict[str, Tensor | None], oracle: Rows
) -> None:
    names, place = outputs_of(rows.case), rows.tokens.placed
    trial.expect(parts, {name: place(getattr(oracle, name), rows.active) for name in names})


def upstream_of(rows: LogitRows, output: str) -> np.ndarray | None:
    """Return the upstream gradient `[N]` of an output; None is no gradient."""
    case, total = rows.case, rows.tokens.total
    random = case.random(f"upstream {output}")
    kind = case.upstream
    asked = [name for name in outputs_of(case) if name in DIFFERENTIABLE]
    if output not in asked or (kind == "first" and output != asked[0]):
        return None
    if kind in ("ones", "zero", "expanded"):
        return np.full(total, {"ones": 1.0, "zero": 0.0, "expanded": -0.375}[kind])
    drawn = as_held(random.standard_normal(total), "float32")
    if kind in ("some-zero", "nan"):
        drawn = np.where(random.random(total) < 0.5, np.nan if kind == "nan" else 0.0, drawn)
    return drawn * 2.0**40 if kind == "large" else drawn


def upstreams_of(rows: LogitRows, oracle: Rows) -> list[Bounded]:
    """Return the upstream gradients of the active rows, zeros for an output that has none."""
    given = [upstream_of(rows, name) for name in STATISTICS]
    nothing = np.zeros(oracle.n)
    values = [nothing if g is None else g[rows.active] for g in given]
    return [Bounded(value, 0.0, oracle.arithmetic) for value in values]


def differentiated(
    rows: LogitRows, parts: dict[str, Tensor | None]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs that have an upstream gradient, and these."""
    case, shape = rows.case, rows.tokens.shape
    outputs, gradients = [], []
    for name in DIFFERENTIABLE:
        values = upstream_of(rows, name)
        if values is None:
            continue
        outputs.append(parts[name])
        dtype = str(parts[name].dtype).removeprefix("torch.")
        if case.upstream == "expanded" and values.size:
            one = flat_tensor(case, values[:1], dtype)
            gradients.append(one.view((1,) * len(shape)).expand(shape))
        else:
            layout = "strided" if case.upstream == "strided" else "contiguous"
            gradients.append(laid_out(flat_tensor(case, values, dtype).view(shape), layout))
    return outputs, gradients

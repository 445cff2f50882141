"""The token functions from logits: what a case gives them, what they gave, what they should."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fastrl

from .arithmetic import Arithmetic, of_results
from .bounded import Bounded, Decision, Doubts
from .case import Case
from .compare import Part
from .logits_data import as_held, ids_of, logits_of
from .oracle.rows import Head, Rows
from .tensors import flat_tensor, laid_out, mask_tensor, numbers, token_tensor
from .tokens import Tokens, tokens_of

DIFFERENTIABLE = ("logprobs", "entropy", "logsumexp")


@dataclasses.dataclass(frozen=True)
class LogitRows:
    """The rows of a case: its numbers, and which rows count."""

    case: Case
    tokens: Tokens
    ids: np.ndarray
    temperature: np.ndarray  # [N]
    active: np.ndarray  # [N]

    @property
    def arithmetic(self) -> Arithmetic:
        return of_results(self.case.dtype)

    @property
    def head(self) -> Head:
        case = self.case
        return Head(self.temperature[self.active], case.logit_scale, case.logit_softcap)

    def spread(self, value: np.ndarray) -> np.ndarray:
        """Return the values of active rows among zeros, `[N, ...]`."""
        full = np.zeros((self.tokens.total, *value.shape[1:]), value.dtype)
        full[self.active] = value
        return full

    def placed(self, of_active: Bounded | Decision) -> Bounded | Decision:
        """Return the statistics of all tokens, laid out as they are: 0 where not active."""
        shape = self.tokens.shape
        if isinstance(of_active, Decision):
            yes, doubtful = self.spread(of_active.yes), self.spread(of_active.doubtful)
            return Decision(yes.reshape(shape), doubtful.reshape(shape))
        value, error = self.spread(of_active.value), self.spread(of_active.error)
        shape += value.shape[1:]
        return Bounded(value.reshape(shape), error.reshape(shape), of_active.arithmetic)


def rows_of(case: Case) -> LogitRows:
    tokens = tokens_of(case)
    ids = ids_of(case, tokens)
    active = tokens.valid & (ids != case.ignore_index)
    return LogitRows(case, tokens, ids, _temperatures(case, tokens), active)


def _temperatures(case: Case, tokens: Tokens) -> np.ndarray:
    if not isinstance(case.temperature, str):
        return np.full(tokens.total, float(case.temperature))
    of_count = tokens.total if case.temperature == "per-token" else tokens.shape[0]
    drawn = case.random("temperature").choice([0.5, 0.7, 1.0, 1.3, 3.0, 10.0], of_count)
    drawn = as_held(drawn, "float32")
    return drawn if case.temperature == "per-token" else np.repeat(drawn, tokens.shape[1])


def token_options(rows: LogitRows) -> dict[str, Any]:
    """Return the options that every function with a vocabulary takes, but for the mask."""
    case, tokens = rows.case, rows.tokens
    temperature: float | Tensor = case.temperature
    if isinstance(temperature, str):
        held = rows.temperature
        if temperature == "per-token":
            temperature = token_tensor(case, tokens, held, "float32")
        else:
            column = (tokens.shape[0],) + (1,) * (temperature == "per-sequence-column")
            of_sequences = np.ones(tokens.shape[0])
            of_sequences[:] = held.reshape(tokens.shape)[:, 0] if held.size else 1.0
            temperature = flat_tensor(case, of_sequences, "float32")
            temperature = temperature.view(column)
    options = {
        "temperature": temperature,
        "logit_scale": case.logit_scale,
        "logit_softcap": case.logit_softcap,
        "ignore_index": case.ignore_index,
    }
    return {name: value for name, value in options.items() if _said(name, value)}


def _said(name: str, value: object) -> bool:
    usual = {"temperature": 1.0, "logit_scale": 1.0, "logit_softcap": None, "ignore_index": -100}
    return isinstance(value, Tensor) or value != usual[name]


def ids_tensor(rows: LogitRows) -> Tensor:
    case, tokens = rows.case, rows.tokens
    ids = rows.ids
    if case.masked_values != "usual":  # an id, too, may be anything under the mask
        garbage = case.random("garbage").choice([-1, 2**30, case.vocabulary], tokens.total)
        ids = np.where(tokens.valid, ids, garbage)
    return laid_out(flat_tensor(case, ids, case.ids_dtype).view(tokens.shape), case.token_layout)


def logits_tensor(rows: LogitRows, logits: np.ndarray) -> Tensor:
    case, tokens = rows.case, rows.tokens
    if case.masked_values != "usual" and case.logits_layout != "expanded":
        filler = np.full(tokens.total, 0.0)
        filler = token_tensor(case.changed(token_layout="contiguous"), tokens, filler, "float64")
        logits = np.where(tokens.valid[:, None], logits, numbers(filler).reshape(-1, 1))
    result = flat_tensor(case, logits, case.dtype).view(*tokens.shape, case.vocabulary)
    return laid_out(result, case.logits_layout)


def upstream_of(rows: LogitRows, output: str) -> np.ndarray | None:
    """Return the upstream gradient `[N]` of an output; None is no gradient."""
    case, total = rows.case, rows.tokens.total
    random = case.random(f"upstream {output}")
    kind = case.upstream
    if kind == "first" and output != next(o for o in case.outputs if o in DIFFERENTIABLE):
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


def call(rows: LogitRows, logits: np.ndarray, backend: str, device: str) -> dict[str, Any]:
    """Call the function of the case; return its parts and the gradient of the logits."""
    case = rows.case
    given = logits_tensor(rows, logits).to(device)
    leaf = given.requires_grad_(case.mode == "grad")
    arguments = {"mask": mask_tensor(case, rows.tokens), **token_options(rows)}
    if case.function == "token_stats":
        arguments["outputs"] = case.outputs
    if case.inplace:
        arguments["inplace_backward"] = True
        given = given * 1  # no leaf
    arguments = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }
    with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
        result = getattr(fastrl, case.function)(
            given, ids_tensor(rows).to(device), backend=backend, **arguments
        )
    parts = {"logprobs": result} if isinstance(result, Tensor) else result._asdict()
    got = {name: part(x) for name, x in parts.items() if x is not None}
    if case.mode == "grad":
        backward(rows, parts, device)
        got["grad logits"] = part(leaf.grad)
    return got


def part(x: Tensor | None) -> tuple[np.ndarray, str] | None:
    return None if x is None else (numbers(x), str(x.dtype).removeprefix("torch."))


def backward(rows: LogitRows, parts: dict[str, Tensor | None], device: str) -> None:
    outputs, gradients = [], []
    for name in DIFFERENTIABLE:
        upstream = upstream_of(rows, name) if parts.get(name) is not None else None
        if upstream is not None:
            outputs.append(parts[name])
            dtype = str(parts[name].dtype).removeprefix("torch.")
            gradients.append(upstream_tensor(rows, upstream, dtype).to(device))
    torch.autograd.backward(outputs, gradients)


def expected(rows: LogitRows, logits: np.ndarray, doubts: Doubts) -> dict[str, Part]:
    """Return what the docstrings say about the case."""
    case, active = rows.case, rows.active
    oracle = Rows(logits[active], rows.ids[active], rows.head, rows.arithmetic)
    outputs = case.outputs if case.function == "token_stats" else ("logprobs",)
    dtype = rows.arithmetic.name
    want = {
        name: Part(rows.placed(getattr(oracle, name)), "bool" if name == "is_top1" else dtype)
        for name in outputs
    }
    if case.mode == "grad":
        upstream = []
        for name in DIFFERENTIABLE:
            values = upstream_of(rows, name) if name in outputs else None
            values = np.zeros(active.sum()) if values is None else values[active]
            upstream.append(Bounded(values, 0.0, rows.arithmetic))
        gradient = rows.placed(oracle.gradient(*upstream))
        want["grad logits"] = Part(gradient, case.dtype)
    doubts.add("unsaid: a row without distribution", oracle.undefined)
    return want


def examined(case: Case, backend: str, device: str, doubts: Doubts) -> tuple[dict, dict]:
    """Return what the case gave, and what it should give."""
    rows = rows_of(case)
    logits = logits_of(case, rows.tokens, rows.ids)
    got = call(rows, logits, backend, device)
    return got, expected(rows, logits, doubts)

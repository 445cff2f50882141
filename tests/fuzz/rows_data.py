"""Rows of a vocabulary: which count, their ids and temperatures, and how logits are given."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from torch import Tensor

from .arithmetic import Arithmetic, of_results
from .bounded import Bounded, Decision
from .case import Case
from .logits_data import as_held, ids_of
from .oracle.rows import Head
from .tensors import flat_tensor, laid_out, numbers, token_tensor
from .tokens import Tokens, tokens_of
from .trial import Trial


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

    def head(self, trial: Trial) -> Head:
        case, heat = self.case, self.temperature[self.active]
        return Head(heat, case.logit_scale, case.logit_softcap, trial.on_gpu_kernels)

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
    counts = {"0-d": 1, "per-token": tokens.total}
    of_count = counts.get(case.temperature, tokens.shape[0])
    drawn = case.random("temperature").choice([0.5, 0.7, 1.0, 1.3, 3.0, 10.0], of_count)
    drawn = as_held(drawn, case.temperature_dtype)
    return np.repeat(drawn, tokens.total // max(of_count, 1))


def token_options(rows: LogitRows) -> dict[str, Any]:
    """Return the options that every function with a vocabulary takes, but for the mask."""
    case, tokens = rows.case, rows.tokens
    temperature: float | Tensor = case.temperature
    if isinstance(temperature, str):
        held = rows.temperature
        if temperature == "per-token":
            temperature = token_tensor(case, tokens, held, case.temperature_dtype)
        elif temperature == "0-d":
            one = held[:1] if held.size else np.ones(1)
            temperature = flat_tensor(case, one, case.temperature_dtype)[0]
        else:
            column = (tokens.shape[0],) + (1,) * (temperature == "per-sequence-column")
            of_sequences = np.ones(tokens.shape[0])
            of_sequences[:] = held.reshape(tokens.shape)[:, 0] if held.size else 1.0
            temperature = flat_tensor(case, of_sequences, case.temperature_dtype)
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

"""Rows of logits: which count, their ids, numbers and temperatures, and how they are given."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .case import Case
from .oracle.bounded import of_results
from .oracle.rows import Head, Rows
from .tokens import MASKED_VALUES, Tokens, as_held, flat_tensor, laid_out, token_tensor, tokens_of
from .trial import Trial

BLOCK = 4096  # columns that the CPU kernel reads at once


@dataclasses.dataclass(frozen=True)
class LogitRows:
    """The rows of a case: its numbers, and which rows count."""

    case: Case
    tokens: Tokens
    ids: np.ndarray
    temperature: np.ndarray  # [N]
    active: np.ndarray  # [N]

    def head(self, trial: Trial) -> Head:
        case, heat = self.case, self.temperature[self.active]
        return Head(heat, case.logit_scale, case.logit_softcap, trial.on_gpu_kernels)

    def oracle(self, trial: Trial, logits: np.ndarray) -> Rows:
        active, arithmetic = self.active, of_results(self.case.dtype)
        return noted(trial, Rows(logits[active], self.ids[active], self.head(trial), arithmetic))


def noted(trial: Trial, oracle: Rows) -> Rows:
    trial.doubts.add("unspecified: a row without distribution", oracle.undefined)
    return oracle


def rows_of(case: Case) -> LogitRows:
    tokens = tokens_of(case)
    random = case.random("ids")
    ids = random.integers(0, case.vocabulary, tokens.total)
    if case.has("ignored"):
        ids = np.where(random.random(tokens.total) < 0.3, case.ignore_index, ids)
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
    names = ("temperature", "logit_scale", "logit_softcap", "ignore_index")
    return {name: getattr(case, name) for name in names if name in case.options} | (
        {"temperature": temperature} if isinstance(temperature, Tensor) else {}
    )


def ids_tensor(rows: LogitRows) -> Tensor:
    case, tokens = rows.case, rows.tokens
    ids = rows.ids
    if case.masked_values != "usual":  # an id, too, may be anything under the mask
        garbage = case.random("garbage").choice([-1, 2**30, case.vocabulary], tokens.total)
        ids = np.where(tokens.valid, ids, garbage)
    return laid_out(flat_tensor(case, ids, case.ids_dtype).view(tokens.shape), case.token_layout)


def wide_tensor(rows: LogitRows, values: np.ndarray, *, garbage: bool = True) -> Tensor:
    """Return values `[N, K]` as a tensor, with the case's values where masked."""
    case, tokens = rows.case, rows.tokens
    if garbage and case.masked_values != "usual":
        values = np.where(tokens.valid[:, None], values, MASKED_VALUES[case.masked_values])
    result = flat_tensor(case, values, case.dtype).view(*tokens.shape, values.shape[1])
    return laid_out(result, case.logits_layout)


def logits_of(rows: LogitRows) -> tuple[np.ndarray, Tensor]:
    """Return logits `[N, V]` that are representable in the dtype of the case, and the tensor."""
    case, tokens = rows.case, rows.tokens
    n, v = tokens.total, case.vocabulary
    x = case.random("logits").standard_normal((n, v)) * case.spread
    for feature, change in _FEATURE.items():
        if case.has(feature) and n:
            x = change(x, rows.ids, case.random(feature), case)
    if case.logits_layout == "expanded" and not tokens.packed:
        x = np.tile(x.reshape(*tokens.shape, v)[:1], (tokens.shape[0], 1, 1)).reshape(n, v)
    x = as_held(x, case.dtype)
    return x, wide_tensor(rows, x, garbage=case.logits_layout != "expanded")


def _some_rows(x, random):
    """About half of the rows, at least one."""
    rows = random.random(len(x)) < 0.5
    rows[0] = True
    return rows


def _with_ids(x, ids, random):
    """Those of them that have a logit of their own, and its columns."""
    rows = _some_rows(x, random) & (ids >= 0) & (ids < x.shape[1])
    return rows, ids[rows]


def _offset(x, ids, random, case):
    return x + random.choice([-1e4, 1e4, 300.0])


def _ties(x, ids, random, case):
    return np.round(x)


def _inf_some(x, ids, random, case):
    places = random.random(x.shape) < random.choice([0.05, 0.5])
    return np.where(places & _some_rows(x, random)[:, None], -np.inf, x)


def _inf_block(x, ids, random, case):
    blocks = -(-x.shape[1] // BLOCK)
    for row in np.flatnonzero(_some_rows(x, random)):
        for block in np.flatnonzero(random.random(blocks) < 0.5):
            x[row, block * BLOCK : (block + 1) * BLOCK] = -np.inf
    return x


def _inf_first_block(x, ids, random, case):
    x[_some_rows(x, random), : min(BLOCK, max(x.shape[1] - 1, 0))] = -np.inf
    return x


def _inf_chosen(x, ids, random, case):
    x[_with_ids(x, ids, random)] = -np.inf
    return x


def _inf_but_chosen(x, ids, random, case):
    rows, columns = _with_ids(x, ids, random)
    kept = x[rows, columns]
    x[rows] = -np.inf
    x[rows, columns] = kept
    return x


def _whole_row(value):
    def fill(x, ids, random, case):
        x[_some_rows(x, random)] = value
        return x

    return fill


def _one(value):
    def fill(x, ids, random, case):
        columns = random.integers(0, x.shape[1], len(x))
        rows = _some_rows(x, random)
        x[rows, columns[rows]] = value
        return x

    return fill


def _beside(by):
    def move(x, ids, random, case):
        rows, columns = _with_ids(x, ids, random)
        x[rows, columns] = x.max(1, initial=0.0)[rows] + by
        return x

    return move


def _largest(x, ids, random, case):
    largest = min(float(torch.finfo(getattr(torch, case.dtype)).max), 3e38)
    return np.where(random.random(x.shape) < 0.2, largest * np.sign(x), x)


def _tiny(x, ids, random, case):
    return x * float(torch.finfo(getattr(torch, case.dtype)).tiny) / 4


def _unchanged(x, ids, random, case):
    return x


_FEATURE = {
    "offset": _offset,  # all logits far from 0
    "ties": _ties,  # few different values
    "inf-some": _inf_some,  # -inf logits here and there
    "inf-block": _inf_block,  # whole blocks of columns of -inf
    "inf-first-block": _inf_first_block,
    "inf-chosen": _inf_chosen,  # the token's own logit
    "inf-but-chosen": _inf_but_chosen,  # every other logit
    "inf-row": _whole_row(-np.inf),
    "nan-row": _whole_row(np.nan),
    "nan-one": _one(np.nan),
    "positive-inf": _one(np.inf),
    "far-chosen": _beside(-60.0),  # a token of next to no probability
    "sure-chosen": _beside(40.0),  # one of next to all
    "largest": _largest,  # of the dtype
    "tiny": _tiny,  # subnormal
    "ignored": _unchanged,  # the id to ignore here and there
}
FEATURES = tuple(_FEATURE)

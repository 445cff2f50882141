"""Rows of logits: which count, their ids, numbers and temperatures, and how they are given."""

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fastrl

from .call import Place
from .case import Case
from .oracle.rows import Head
from .tokens import MASKED_VALUES, Tokens, as_held, flat_tensor, laid_out, token_tensor, tokens_of

HEATS = [0.5, 0.7, 1.0, 1.3, 3.0, 10.0]  # temperatures of tokens
BLOCK = 4096  # columns that the CPU kernel reads at once


@dataclasses.dataclass(frozen=True)
class LogitRows:
    """The rows of a case: its numbers, and which rows count."""

    case: Case
    tokens: Tokens
    ids: np.ndarray
    temperature: np.ndarray  # [N]
    active: np.ndarray  # [N]
    sets: list[np.ndarray] | None  # the tokens that each row has kept

    def head(self, place: Place) -> Head:
        case, heat = self.case, self.temperature[self.active]
        return Head(heat, case.logit_scale, case.logit_softcap, place.on_gpu_kernels)

    def kept(self, x: np.ndarray, others: float = -np.inf) -> np.ndarray:
        """Return logits `[active, V]` with -inf for the tokens that a row has not kept."""
        if self.sets is None:
            return x
        members = np.zeros(x.shape, bool)
        for row, index in enumerate(np.flatnonzero(self.active)):
            tokens = self.sets[index]
            members[row, tokens if len(tokens) else slice(None)] = True
            members[row, self.ids[index]] = True
        return np.where(members, x, others)


def rows_of(case: Case) -> LogitRows:
    tokens = tokens_of(case)
    random = case.random("ids")
    ids = random.integers(0, case.vocabulary, tokens.total)
    if case.has("ignored"):
        ids = np.where(random.random(tokens.total) < 0.3, case.ignore_index, ids)
    active = tokens.valid & (ids != case.ignore_index)
    temperature, sets = _temperatures(case, tokens), _sets(case, ids, active)
    return LogitRows(case, tokens, ids, temperature, active, sets)


def _sets(case: Case, ids: np.ndarray, active: np.ndarray) -> list[np.ndarray] | None:
    """Return the tokens that each row has kept, often without its own one."""
    if case.kept is None:
        return None
    random, v = case.random("kept"), case.vocabulary
    low, high = {"one": (1, 1), "few": (0, 4), "ragged": (0, v), "all": (v, v)}[case.kept]
    sets = []
    for token, counts in zip(ids, active, strict=True):
        if not counts and case.masked_values != "usual":
            sets.append(np.array([v, v, -1]))  # a set, too, may be anything under the mask
            continue
        tokens = random.permutation(v)[: random.integers(low, min(high, v) + 1)]
        if len(tokens) and token not in tokens and random.random() < 0.7 and 0 <= token < v:
            tokens[0] = token
        sets.append(tokens)
    return sets


def _temperatures(case: Case, tokens: Tokens) -> np.ndarray:
    if not isinstance(case.temperature, str):
        return np.full(tokens.total, float(case.temperature))
    counts = {"0-d": 1, "per-token": tokens.total}
    of_count = counts.get(case.temperature, tokens.shape[0])
    drawn = case.random("temperature").choice(HEATS, of_count)
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
    kept = {} if rows.sets is None else {"kept": _kept_tokens(rows)}
    names = ("temperature", "logit_scale", "logit_softcap", "ignore_index")
    return {name: getattr(case, name) for name in names if name in case.options} | (
        kept | ({"temperature": temperature} if isinstance(temperature, Tensor) else {})
    )


def _kept_tokens(rows: LogitRows) -> fastrl.KeptTokens:
    assert rows.sets is not None
    ids = np.concatenate([np.zeros(0, np.int64), *rows.sets])
    offsets = np.cumsum([0, *map(len, rows.sets)])
    dtype = rows.case.ids_dtype
    return fastrl.KeptTokens(*(flat_tensor(rows.case, x, dtype) for x in (ids, offsets)))


def ids_tensor(rows: LogitRows) -> Tensor:
    case, tokens = rows.case, rows.tokens
    ids = rows.ids
    if case.masked_values != "usual":  # an id, too, may be anything under the mask
        garbage = case.random("garbage").choice([-1, 2**30, case.vocabulary], tokens.total)
        ids = np.where(tokens.valid, ids, garbage)
    return laid_out(flat_tensor(case, ids, case.ids_dtype).view(tokens.shape), case.token_layout)


def wide_tensor(rows: LogitRows, values: np.ndarray, *, garbage: bool = True) -> Tensor:
    """Return values `[N, K]` as a tensor, with the case's values in rows that do not count."""
    case, tokens = rows.case, rows.tokens
    if garbage and case.masked_values != "usual":
        values = np.where(rows.active[:, None], values, MASKED_VALUES[case.masked_values])
    result = flat_tensor(case, values, case.dtype).view(*tokens.shape, values.shape[1])
    return laid_out(result, case.logits_layout)


FEATURES = (
    "offset",  # all logits far from 0
    "ties",  # few different values
    "inf-some",  # -inf logits here and there
    "lowest-some",  # the lowest numbers of dtypes, which exclude, too
    "inf-block",  # whole blocks of columns of -inf
    "inf-first-block",
    "inf-chosen",  # the token's own logit
    "inf-but-chosen",  # every other logit
    "inf-row",  # a whole row
    "nan-row",
    "nan-one",
    "positive-inf",
    "far-chosen",  # a token of next to no probability
    "sure-chosen",  # one of next to all
    "largest",  # of the dtype
    "tiny",  # subnormal
    "ignored",  # the id to ignore here and there
)


def logits_of(rows: LogitRows) -> tuple[np.ndarray, Tensor]:
    """Return logits `[N, V]` that are representable in the dtype of the case, and the tensor."""
    case, tokens = rows.case, rows.tokens
    n, v = tokens.total, case.vocabulary
    x = case.random("logits").standard_normal((n, v)) * case.spread
    for feature in FEATURES:
        if case.has(feature) and n:
            x = _changed(feature, x, rows.ids, case.random(feature), case.dtype)
    if case.logits_layout == "expanded" and not tokens.packed:
        x = np.tile(x.reshape(*tokens.shape, v)[:1], (tokens.shape[0], 1, 1)).reshape(n, v)
    x = as_held(x, case.dtype)
    return x, wide_tensor(rows, x, garbage=case.logits_layout != "expanded")


def lowest_of(dtype, random):
    """Return the lowest number of a dtype, or a higher one that is the lowest of another."""
    names = (dtype, *(name for name in ("float32", "bfloat16", "float16") if name != dtype))
    limits = [torch.finfo(getattr(torch, name)).min for name in names]
    own = max(limits[0], torch.finfo(torch.float32).min)
    return random.choice([own, *(x for x in limits[1:] if x > own)])


def _changed(feature, x, ids, random, dtype):
    """Return the logits with a feature, in about half of the rows where it is one of rows."""
    n, v = x.shape
    limits = torch.finfo(getattr(torch, dtype))
    match feature:
        case "offset":
            return x + random.choice([-1e4, 1e4, 300.0])
        case "ties":
            return np.round(x)
        case "largest":
            return np.where(random.random(x.shape) < 0.2, min(limits.max, 3e38) * np.sign(x), x)
        case "tiny":
            return x * limits.tiny / 4
        case "ignored":
            return x
        case "inf-some" | "lowest-some":
            places = random.random(x.shape) < random.choice([0.05, 0.5])
        case "nan-one" | "positive-inf":
            columns = random.integers(0, v, n)
    rows = random.random(n) < 0.5
    rows[0] = True
    own = np.flatnonzero(rows & (ids >= 0) & (ids < v))  # rows with a logit of their own
    chosen = (own, ids[own])
    match feature:
        case "inf-some":
            x[places & rows[:, None]] = -np.inf
        case "lowest-some":
            x[places & rows[:, None]] = lowest_of(dtype, random)
        case "inf-block":
            for row in np.flatnonzero(rows):
                blocks = random.random(-(-v // BLOCK)) < 0.5
                x[row, np.repeat(blocks, BLOCK)[:v]] = -np.inf
        case "inf-first-block":
            x[rows, : min(BLOCK, v - 1)] = -np.inf
        case "inf-chosen":
            x[chosen] = -np.inf
        case "inf-but-chosen":
            kept = x[chosen]
            x[own] = -np.inf
            x[chosen] = kept
        case "far-chosen" | "sure-chosen":
            x[chosen] = x.max(1)[own].clip(0) + (-60.0 if feature == "far-chosen" else 40.0)
        case "inf-row" | "nan-row":
            x[rows] = -np.inf if feature == "inf-row" else np.nan
        case "nan-one" | "positive-inf":
            x[rows, columns[rows]] = np.nan if feature == "nan-one" else np.inf
    return x

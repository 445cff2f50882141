"""The logits and token ids of a case."""

from __future__ import annotations

import numpy as np
import torch

from .case import Case
from .tokens import Tokens

BLOCK = 4096  # columns that the CPU kernel reads at once

FEATURES = (
    "offset",  # all logits far from 0
    "ties",  # few different values
    "inf-some",  # -inf logits here and there
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
    "ignored",
)


def logits_of(case: Case, tokens: Tokens, ids: np.ndarray) -> np.ndarray:
    """Return float64 logits `[N, V]` that are representable in the dtype of the case."""
    n, v = tokens.total, case.vocabulary
    random = case.random("logits")
    x = random.standard_normal((n, v)) * case.spread
    for feature in FEATURES:
        if case.has(feature) and n:
            x = _FEATURE.get(feature, _unchanged)(x, ids, case.random(feature), case)
    if case.logits_layout == "expanded" and not tokens.packed:
        x = np.tile(x.reshape(*tokens.shape, v)[:1], (tokens.shape[0], 1, 1)).reshape(n, v)
    return as_held(x, case.dtype)


def as_held(x: np.ndarray, dtype: str) -> np.ndarray:
    """Return the float64 numbers that a tensor of this dtype holds."""
    return torch.from_numpy(x).to(getattr(torch, dtype)).to(torch.float64).numpy()


def ids_of(case: Case, tokens: Tokens) -> np.ndarray:
    """Return token ids `[N]`, some of them the one to ignore."""
    random = case.random("ids")
    ids = random.integers(0, case.vocabulary, tokens.total)
    if case.has("ignored"):
        ids = np.where(random.random(tokens.total) < 0.3, case.ignore_index, ids)
    return ids


def _unchanged(x, ids, random, case):
    return x


def _rows(x, random):
    """About half of the rows, at least one."""
    rows = random.random(len(x)) < 0.5
    rows[0] = True
    return rows


def _chosen(x, ids, rows, value):
    rows = rows & (ids >= 0) & (ids < x.shape[1])
    x[rows, ids[rows]] = value if np.ndim(value) == 0 else value[rows]
    return x


def _offset(x, ids, random, case):
    return x + random.choice([-1e4, 1e4, 300.0])


def _ties(x, ids, random, case):
    return np.round(x)


def _inf_some(x, ids, random, case):
    x[(random.random(x.shape) < random.choice([0.05, 0.5])) & _rows(x, random)[:, None]] = -np.inf
    return x


def _inf_block(x, ids, random, case):
    blocks = -(-x.shape[1] // BLOCK)
    for row in np.flatnonzero(_rows(x, random)):
        for block in np.flatnonzero(random.random(blocks) < 0.5):
            x[row, block * BLOCK : (block + 1) * BLOCK] = -np.inf
    return x


def _inf_first_block(x, ids, random, case):
    x[_rows(x, random), : min(BLOCK, max(x.shape[1] - 1, 0))] = -np.inf
    return x


def _inf_chosen(x, ids, random, case):
    return _chosen(x, ids, _rows(x, random), -np.inf)


def _inf_but_chosen(x, ids, random, case):
    rows = _rows(x, random) & (ids >= 0) & (ids < x.shape[1])
    kept = x[rows, ids[rows]]
    x[rows] = -np.inf
    x[rows, ids[rows]] = kept
    return x


def _whole_row(value):
    def fill(x, ids, random, case):
        x[_rows(x, random)] = value
        return x

    return fill


def _one(value):
    def fill(x, ids, random, case):
        columns = random.integers(0, x.shape[1], len(x))
        rows = _rows(x, random)
        x[rows, columns[rows]] = value
        return x

    return fill


def _beside(by):
    def move(x, ids, random, case):
        return _chosen(x, ids, _rows(x, random), x.max(1, initial=0.0) + by)

    return move


def _largest(x, ids, random, case):
    largest = float(torch.finfo(getattr(torch, case.dtype)).max)
    largest = min(largest, 3e38)
    places = random.random(x.shape) < 0.2
    return np.where(places, largest * np.sign(x), x)


def _tiny(x, ids, random, case):
    return x * float(torch.finfo(getattr(torch, case.dtype)).tiny) / 4


_FEATURE = {
    "offset": _offset,
    "ties": _ties,
    "inf-some": _inf_some,
    "inf-block": _inf_block,
    "inf-first-block": _inf_first_block,
    "inf-chosen": _inf_chosen,
    "inf-but-chosen": _inf_but_chosen,
    "inf-row": _whole_row(-np.inf),
    "nan-row": _whole_row(np.nan),
    "nan-one": _one(np.nan),
    "positive-inf": _one(np.inf),
    "far-chosen": _beside(-60.0),
    "sure-chosen": _beside(40.0),
    "largest": _largest,
    "tiny": _tiny,
}

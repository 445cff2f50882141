"""The data of a policy loss per token, besides logits.

Log-probabilities on a grid of 1/64 have exact differences in float32 (and, if small, in 16 bits),
so that a log ratio can be exactly on a bound; `bounds_of` lists the bounds of the objective.
"""

from __future__ import annotations

from math import inf, isfinite, log, log1p, sqrt

import numpy as np

from .case import Case
from .logits_data import as_held
from .tokens import Tokens

GRID = 64.0
FEATURES = (
    "logprob-inf",  # banned now, not when it was sampled
    "old-inf",
    "both-inf",
    "ref-inf",
    "ref-both-inf",
    "rollout-inf",
    "rollout-both-inf",
    "nan-logprob",
    "nan-old",
    "nan-ref",
    "nan-rollout",
    "nan-entropy",
    "nan-advantages",
    "inf-advantages",
    "large-advantages",
    "tiny-advantages",
    "zero-advantages",
    "equal-advantages",
    "negative-advantages",
)


def logprobs_of(case: Case, tokens: Tokens) -> np.ndarray:
    """Return the log-probabilities of a case without logits, rounded to its dtype."""
    random = case.random("logprobs")
    drawn = -np.abs(random.standard_normal(tokens.total)) * 3
    drawn = _on_grid(case, drawn)
    for feature, value in (("logprob-inf", -inf), ("both-inf", -inf), ("nan-logprob", np.nan)):
        drawn = _some(case, feature, drawn, value)
    if case.has("ref-both-inf") or case.has("rollout-both-inf"):
        drawn = _some(case, "both-inf everywhere", drawn, -inf, always=True)
    return as_held(drawn, case.dtype)


def bounds_of(fields: dict) -> list[float]:
    """Return the log ratios at which behavior changes."""
    clamp = fields["log_ratio_clamp"]
    clamps = clamp if isinstance(clamp, tuple) else (clamp, -clamp) if clamp else ()
    low, high = fields["clip_low"], fields["clip_high"]
    found = [0.0, 80.0, -80.0, 40.0, -40.0, low, -low, high, -high, log1p(max(high, -0.99))]
    found += [x for x in clamps if isfinite(x)]
    found += [log1p(-low)] if low < 1 else []
    found += [log(x) for x in (fields["dual_clip"], fields["delta"]) if x]
    return found


def kl_bounds_of(fields: dict) -> list[float]:
    """Return the values of ref - logprob at which behavior changes."""
    clamp = fields["kl_clamp"]
    around = [] if clamp is None else [clamp, -clamp, sqrt(2 * clamp), -sqrt(2 * clamp)]
    return [0.0, 80.0, -80.0, 40.0, -40.0, 17.0, 30.0, *around]


def correction_bounds_of(fields: dict) -> list[float]:
    """Return the values of old - rollout at which a correction changes."""
    found = [0.0, 80.0, -80.0]
    for correction in fields["rollout_correction"] or ():
        bounds = (correction["low"], correction["high"])
        found += [log(x) for x in bounds if 0 < x < inf]
    threshold = fields["off_policy_threshold"]
    return found if threshold is None else [*found, threshold, -threshold]


def distances(case: Case, what: str, kind: str, bounds: list[float], n: int) -> np.ndarray:
    """Return log-probability differences of a kind."""
    random = case.random(what)
    normal = random.standard_normal(n)
    if kind == "equal":
        return np.zeros(n)
    if kind == "bounds":
        at = random.choice(bounds, n)
        return np.where(random.random(n) < 0.7, at, _on_grid(case, at + normal / 8))
    scale = {"near": 0.15, "far": 5.0, "huge": 60.0}[kind]
    return _on_grid(case, normal * scale)


def old_of(case: Case, logprobs: np.ndarray, fields: dict) -> np.ndarray | None:
    if case.old is None:
        return None
    x = distances(case, "old", case.old, bounds_of(fields), len(logprobs))
    return _beside(case, "old", logprobs, -x)


def ref_of(case: Case, logprobs: np.ndarray, fields: dict) -> np.ndarray | None:
    if case.ref is None:
        return None
    d = distances(case, "ref", case.ref, kl_bounds_of(fields), len(logprobs))
    return _beside(case, "ref", logprobs, d)


def rollout_of(case: Case, old: np.ndarray, fields: dict) -> np.ndarray | None:
    if case.rollout is None:
        return None
    g = distances(case, "rollout", case.rollout, correction_bounds_of(fields), len(old))
    return _beside(case, "rollout", old, -g)


def _beside(case: Case, name: str, logprobs: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Return log-probabilities close to these, or infinite, or NaN."""
    finite = np.isfinite(logprobs)
    values = np.where(finite, logprobs, -2.5) + by
    both = "both-inf" if name == "old" else f"{name}-both-inf"
    together = ~finite & (case.random(both).random(len(values)) < 0.7)
    values = np.where(together & (case.has(both) or case.has("inf-chosen")), -inf, values)
    values = _some(case, f"{name}-inf", values, -inf)
    values = _some(case, f"nan-{name}", values, np.nan)
    return as_held(values, case.token_dtype)


def entropy_of(case: Case, tokens: Tokens) -> np.ndarray | None:
    if not case.entropy:
        return None
    drawn = np.abs(_on_grid(case, case.random("entropy").standard_normal(tokens.total) * 2))
    return as_held(_some(case, "nan-entropy", drawn, np.nan), case.token_dtype)


def advantages_of(case: Case, tokens: Tokens) -> np.ndarray:
    """Return advantages, one of each token or each sequence."""
    count = tokens.total if case.advantages == "token" else tokens.count
    random = case.random("advantages")
    drawn = np.round(random.standard_normal(count) * GRID) / GRID
    drawn = np.where(random.random(count) < 0.3, random.choice([-1.0, 0.0, 1.0], count), drawn)
    if case.has("equal-advantages"):
        drawn = np.full(count, random.choice([-1.5, -1.0, 0.5, 1.0]))
    if case.has("zero-advantages"):
        drawn = np.where(random.random(count) < 0.8, 0.0, drawn)
    if case.has("negative-advantages"):
        drawn = -np.abs(drawn)
    drawn = drawn * (2.0**100 if case.has("large-advantages") else 1)
    drawn = drawn * (2.0**-100 if case.has("tiny-advantages") else 1)
    drawn = _some(case, "nan-advantages", drawn, np.nan)
    return as_held(_some(case, "inf-advantages", drawn, inf), case.token_dtype)


def policy_weights_of(case: Case, tokens: Tokens) -> np.ndarray | None:
    if case.policy_weights is None:
        return None
    count = tokens.total if case.policy_weights == "token" else tokens.count
    drawn = case.random("policy weights").choice([0.0, 0.5, 1.0, 1.25, 3.0], count)
    return as_held(drawn, case.token_dtype)


def of_tokens(values: np.ndarray, tokens: Tokens) -> np.ndarray:
    """Return values per sequence or per token, per token."""
    return values if len(values) == tokens.total else values[tokens.sequence]


def _on_grid(case: Case, x: np.ndarray) -> np.ndarray:
    return np.round(x * GRID) / GRID if case.values == "grid" else x


def _some(
    case: Case, feature: str, x: np.ndarray, value: float, *, always: bool = False
) -> np.ndarray:
    if not (always or case.has(feature)):
        return x
    return np.where(case.random(feature).random(len(x)) < 0.4, value, x)

"""User-defined objectives: in torch for fastrl, by formula for the oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from .bounded import Bounded
from .functions import exp
from .oracle.terms import Term, never, zeros
from .oracle.valid_tokens import Tokens


@dataclasses.dataclass(frozen=True)
class OwnObjective:
    """A loss per token, twice."""

    function: Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]
    oracle: Callable[[Tokens, Bounded], Term]


def _ratio(logprobs, old, ref, advantages):
    return -torch.exp(logprobs - old) * advantages


def _ratio_oracle(tokens: Tokens, x: Bounded) -> Term:
    value = -(exp(_log_ratio(tokens)) * tokens.advantages)
    return _term(value, value)


def _square(logprobs, old, ref, advantages):
    return (logprobs - old - advantages) ** 2 / 2


def _square_oracle(tokens: Tokens, x: Bounded) -> Term:
    off = _log_ratio(tokens) - tokens.advantages
    return _term(off * off / 2.0, off)


def _to_reference(logprobs, old, ref, advantages):
    far = logprobs if ref is None else logprobs - ref
    return far * 0.5 - advantages * logprobs


def _to_reference_oracle(tokens: Tokens, x: Bounded) -> Term:
    logprobs = tokens.logprobs
    far = logprobs if tokens.ref is None else logprobs - tokens.ref
    slope = 0.5 - tokens.advantages  # the sum of two gradients, each weighed by itself
    terms = 2 * slope.arithmetic.unit * (0.5 + np.abs(tokens.advantages.value))
    slope = Bounded(slope.value, slope.error + terms, slope.arithmetic)
    return _term(far * 0.5 - tokens.advantages * logprobs, slope)


def _log_ratio(tokens: Tokens) -> Bounded:
    return tokens.logprobs - (tokens.logprobs if tokens.old is None else tokens.old)


def _term(value: Bounded, slope: Bounded) -> Term:
    return Term(value, zeros(value), slope, never(value), never(value))


OWN = {
    "own ratio": OwnObjective(_ratio, _ratio_oracle),
    "own square": OwnObjective(_square, _square_oracle),
    "own to-reference": OwnObjective(_to_reference, _to_reference_oracle),
}

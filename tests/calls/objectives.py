"""The objective of a case: as passed to fastrl, and the fields that the oracle reads.

User-defined ones are in torch for fastrl, and by formula for the oracle.
"""

import dataclasses
from typing import Any

import numpy as np
import torch

from fastrl import GammaWeights, Objective, RolloutCorrection, TrustRegion
from fastrl.objective.presets import CONVENTIONS as CONVENTIONS

from .case import Case
from .oracle.bounded import Bounded
from .oracle.functions import exp
from .oracle.policy import Function, fields_of
from .oracle.terms import Term, never, zeros
from .oracle.tokens import Tokens

#: Every field of an objective, with its default.
DEFAULTS = {field.name: field.default for field in dataclasses.fields(Objective)}


def objective_of(case: Case) -> Any:
    """Return the objective as passed to fastrl."""
    changes = dict(case.fields)
    if case.ref is not None and case.objective not in OWN:  # else they would be refused
        changes.setdefault("kl_coef", 0.0)
    corrections = changes.get("rollout_correction")
    if corrections is not None:
        built = tuple(RolloutCorrection(**correction) for correction in corrections)
        changes["rollout_correction"] = built[0] if len(built) == 1 else built
    for name, kind in (("trust_region", TrustRegion), ("gamma_weights", GammaWeights)):
        if isinstance(changes.get(name), dict):
            changes[name] = kind(**changes[name])
    if case.objective in OWN:
        function = OWN[case.objective][0]
        return Objective(surrogate=function, **changes) if changes else function
    if not changes and case.convention == "fastrl":
        return case.objective
    return Objective.preset(case.objective, convention=case.convention, **changes)


def objective_fields(case: Case) -> dict[str, Any]:
    objective = objective_of(case)
    if isinstance(objective, str):
        objective = Objective.preset(objective)
    return fields_of(
        objective if isinstance(objective, Objective) else Objective(surrogate=objective)
    )


def own_term(case: Case) -> Function | None:
    return OWN[case.objective][1] if case.objective in OWN else None


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
    "own ratio": (_ratio, _ratio_oracle),
    "own square": (_square, _square_oracle),
    "own to-reference": (_to_reference, _to_reference_oracle),
}

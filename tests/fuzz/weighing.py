"""The normalizer, groups and lengths of a case, for fastrl and for the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .arithmetic import Arithmetic
from .bounded import Bounded, Decision
from .case import Case
from .oracle.policy import Weights
from .oracle.weights import Weighing, token_weights
from .tokens import Tokens


def group_arguments(case: Case, tokens: Tokens) -> dict[str, Any]:
    if case.groups is None:
        return {}
    if case.groups == "ids":
        ids = torch.from_numpy(_group_ids(case, tokens))
        return {"group_ids": ids.to(getattr(torch, case.groups_dtype))}
    return {"group_size": case.groups}


def _group_ids(case: Case, tokens: Tokens) -> np.ndarray:
    far = 2**31 - 1 if case.groups_dtype == "int32" else 2**40
    return case.random("groups").choice([7, -3, 0, far], tokens.count)


def groups_of(case: Case, tokens: Tokens) -> np.ndarray | None:
    if case.groups is None:
        return None
    if case.groups == "ids":
        return _group_ids(case, tokens)
    return np.arange(tokens.count) // case.groups


def normalizer_argument(case: Case) -> Any:
    """Return the normalizer as it is given: a float, a tensor, or a mapping of them."""
    given = case.normalizer
    if isinstance(given, dict):
        return {name: _normalizer(value) for name, value in given.items()}
    return None if given is None else _normalizer(given)


def _normalizer(value: float | tuple[float, ...]) -> float | torch.Tensor:
    """A number in a tuple is given as a tensor."""
    return torch.tensor(value[0]) if isinstance(value, tuple) else value


def _number(value: float | tuple[float, ...] | None) -> float | None:
    return value[0] if isinstance(value, tuple) else value


def normalizer_of(case: Case, term: str = "policy") -> float | None:
    given = case.normalizer
    return _number(given.get(term) if isinstance(given, dict) else given)


def weighing_of(case: Case, tokens: Tokens, valid: np.ndarray, options: dict) -> Weighing:
    """Return what weighs the tokens; `options` has length_norm and count_empty."""
    return Weighing(
        valid=valid,
        sequence=tokens.sequence,
        count=tokens.count,
        width=0 if tokens.packed else tokens.shape[1],
        groups=groups_of(case, tokens),
        length_norm=options.get("length_norm"),
        count_empty=options.get("count_empty", False),
    )


def weights_of_terms(
    case: Case, tokens: Tokens, valid: np.ndarray, fields: dict, arithmetic: Arithmetic
) -> Weights:
    """Return the weights of the valid tokens in the policy, the KL and the entropy term."""

    def of(term: str, where: np.ndarray) -> Bounded:
        own = fields.get(f"{term}_aggregation")
        aggregation, normalized = (fields["aggregation"], "policy") if own is None else (own, term)
        weighing = weighing_of(case, tokens, where, fields)
        return token_weights(weighing, aggregation, normalizer_of(case, normalized), arithmetic)

    def entropy_on(dropped: Decision | None) -> Bounded:
        """A separate entropy aggregation runs over the tokens that have the bonus."""
        if dropped is None or fields["entropy_aggregation"] is None:
            return of("entropy", valid)[valid]
        kept = valid.copy()
        kept[valid] = ~dropped.yes
        weights = of("entropy", kept)[valid]
        unsure = dropped.doubtful.any()
        return Bounded(weights.value, np.inf if unsure else weights.error, arithmetic)

    return Weights(of("policy", valid)[valid], of("kl", valid)[valid], entropy_on)

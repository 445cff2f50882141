"""`token_weights`: the weight of each token in a loss."""

from __future__ import annotations

import dataclasses

import numpy as np

from ..arithmetic import Arithmetic
from ..bounded import Bounded, constant
from .sequences import lengths


@dataclasses.dataclass(frozen=True)
class Weighing:
    """The inputs of the weights besides the aggregation."""

    valid: np.ndarray  # [N]
    sequence: np.ndarray  # [N]
    count: int  # sequences
    width: int  # T of padded tokens
    groups: np.ndarray | None = None  # of each sequence, `[count]`
    length_norm: float | None = None
    count_empty: bool = False


def token_weights(
    weighing: Weighing, aggregation: str, normalizer: float | None, arithmetic: Arithmetic
) -> Bounded:
    """Return w_t `[N]`, with one rounding per operation."""
    w, valid = weighing, weighing.valid
    zero = constant(np.zeros(len(valid)), arithmetic)
    if not valid.any():
        return zero
    inside = w.sequence[valid]
    of_sequence = lengths(inside, w.count)
    sequences = float(w.count if w.count_empty else np.count_nonzero(of_sequence))
    one = constant(np.ones(len(inside)), arithmetic)
    divisors = {
        "token-mean": (len(inside), None),
        "token-sum": (None, None),
        "seq-mean-token-mean": (sequences, of_sequence[inside]),
        "seq-mean-token-sum": (sequences, None),
        "seq-mean-token-sum-norm": (sequences, w.length_norm or float(max(w.width, 1))),
        "prompt-mean": (None, None),
    }
    total, each = divisors[aggregation]
    if aggregation == "prompt-mean":
        of_token = w.groups[inside]
        names, group, size = np.unique(of_token, return_inverse=True, return_counts=True)
        total, each = float(len(names)), size[group].astype(np.float64)
    if normalizer is not None and total is not None:
        total = normalizer
    weights = one
    for divisor in (total, each):
        if divisor is not None:
            weights = weights / divisor
    value, error = zero.value.copy(), zero.error.copy()
    value[valid], error[valid] = weights.value, weights.error
    return Bounded(value, error, arithmetic)

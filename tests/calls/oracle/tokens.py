"""The valid tokens of a loss, sums over their sequences, and the weight of each."""

import dataclasses
from collections.abc import Callable

import numpy as np

from .bounded import Arithmetic, Bounded, Decision, constant


@dataclasses.dataclass
class Tokens:
    """The valid tokens, `[n]`, and the sequence of each."""

    logprobs: Bounded
    advantages: Bounded
    sequence: np.ndarray
    count: int  # sequences
    old: Bounded | None = None
    ref: Bounded | None = None
    rollout: Bounded | None = None
    entropy: Bounded | None = None
    policy_weights: Bounded | None = None


def sums(x: Bounded, sequence: np.ndarray, count: int) -> Bounded:
    """Return the sum over each sequence, `[count]`."""
    value, error = np.zeros(count), np.zeros(count)
    for which in np.unique(sequence):
        one = x[sequence == which].sum()
        value[which], error[which] = one.value, one.error
    return Bounded(value, error, x.arithmetic)


def means(x: Bounded, sequence: np.ndarray, count: int) -> Bounded:
    """Return the mean over each sequence, `[count]`; 0 of an empty one."""
    lengths = np.bincount(sequence, minlength=count).astype(np.float64)
    return sums(x, sequence, count) / np.maximum(lengths, 1)


def maxima(x: Bounded, sequence: np.ndarray, count: int) -> Bounded:
    """Return the maximum over each sequence, `[count]`; 0 of an empty one."""
    value, error = np.zeros(count), np.zeros(count)
    for which in np.unique(sequence):
        one = x[sequence == which]
        value[which], error[which] = one.value.max(), one.error.max()
    return Bounded(value, error, x.arithmetic)


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
    value, error = np.zeros((2, len(valid)))
    if not valid.any():
        return Bounded(value, error, arithmetic)
    inside = w.sequence[valid]
    lengths = np.bincount(inside, minlength=w.count).astype(np.float64)
    sequences = float(w.count if w.count_empty else np.count_nonzero(lengths))
    if aggregation == "prompt-mean":
        names, group, size = np.unique(w.groups[inside], return_inverse=True, return_counts=True)
        total, each = float(len(names)), size[group].astype(np.float64)
    else:
        total, each = {
            "token-mean": (len(inside), None),
            "token-sum": (None, None),
            "seq-mean-token-mean": (sequences, lengths[inside]),
            "seq-mean-token-sum": (sequences, None),
            "seq-mean-token-sum-norm": (sequences, w.length_norm or float(max(w.width, 1))),
        }[aggregation]
    if normalizer is not None and total is not None:
        total = normalizer
    weights = constant(np.ones(len(inside)), arithmetic)
    for divisor in (total, each):
        weights = weights if divisor is None else weights / divisor
    value[valid], error[valid] = weights.value, weights.error
    return Bounded(value, error, arithmetic)


@dataclasses.dataclass
class Weights:
    """The weights of the valid tokens in each term."""

    policy: Bounded
    kl: Bounded
    #: those of the entropy bonus, by the tokens that `top_entropy_quantile` drops
    entropy_on: Callable[[Decision | None], Bounded]


def term_weights(
    weighing: Weighing, fields: dict, normalizers: dict[str, float | None], arithmetic: Arithmetic
) -> Weights:
    """Return the weights of an objective's terms; `normalizers` has policy, kl and entropy."""
    valid = weighing.valid

    def of(term: str, where: np.ndarray = valid) -> Bounded:
        own = fields.get(f"{term}_aggregation")
        aggregation, normalized = (fields["aggregation"], "policy") if own is None else (own, term)
        among = dataclasses.replace(weighing, valid=where)
        weights = token_weights(among, aggregation, normalizers.get(normalized), arithmetic)
        return weights[valid]

    def entropy_on(dropped: Decision | None) -> Bounded:
        """A separate entropy aggregation runs over the tokens that have the bonus."""
        if dropped is None or fields["entropy_aggregation"] is None:
            return of("entropy")
        kept = valid.copy()
        kept[valid] = ~dropped.yes
        weights = of("entropy", kept)
        unsure = dropped.doubtful.any()
        return Bounded(weights.value, np.inf if unsure else weights.error, arithmetic)

    return Weights(of("policy"), of("kl"), entropy_on)

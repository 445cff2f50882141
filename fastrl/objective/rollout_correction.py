"""Options of the importance weights that correct for the inference engine."""

from __future__ import annotations

import dataclasses
from math import inf
from numbers import Real
from typing import Literal

from fastrl.checks import number, one_of, positive

_ESTIMATORS = ("ratio", "k1", "k2", "k3", "reverse-k3")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutCorrection:
    """A detached importance weight between the trainer and the engine that sampled the tokens.

    The ratio is `exp(old_logprobs - rollout_logprobs)` of the token (`level="token"`), its product
    over the sequence (`"sequence"`), its geometric mean over the sequence (`"geometric"`) or its
    maximum over the sequence (`"max"`).

    | kind | weight of a token | also known as |
    | --- | --- | --- |
    | `truncate` | the ratio, clamped to `[low, high]` | TIS; TRL `*_truncate`, OpenRLHF `tis` |
    | `mask` | the ratio, or 0 outside `[low, high]` | IcePop; TRL `*_mask`, verl `"low_high"` |
    | `filter` | 1, or 0 outside `[low, high]` | rejection; verl `rollout_rs`, AReaL `mask` |

    Instead, a `filter` may bound an estimate of the KL from the engine to the trainer in nats,
    `kl_divergence(rollout_logprobs, old_logprobs)`: the estimate of the token, or its sum
    (`"sequence"`), arithmetic mean (`"geometric"`) or maximum (`"max"`) over the sequence. With
    `x = old_logprobs - rollout_logprobs`:

    | estimator | estimate | also known as |
    | --- | --- | --- |
    | `k1` | `-x` | verl `*_k1`, whose bounds are `exp(low)` and `exp(high)`; AReaL `kl_k1` is `x` |
    | `k2` | `x^2 / 2` | verl `*_k2`, AReaL `kl_k2` |
    | `k3` | `e^x - 1 - x` | verl `*_k3` |
    | `reverse-k3` | `e^-x - 1 + x` | AReaL `kl_k3` |

    An `Objective` takes a tuple of several and multiplies their weights: OpenRLHF's `seq-mask-tis`
    is a `filter` at level `geometric` and a `truncate` at level `token` with `high=inf`.

    Attributes:
        kind: `"truncate"`, `"mask"` or `"filter"`.
        level: `"token"`, `"sequence"`, `"geometric"` or, for a `filter`, `"max"`.
        estimator: the bounded quantity: `"ratio"` or, for a `filter`, a row of the second table.
        low: lower bound, at least 0. For `k1` it must be below 0, and -infinity means no bound.
        high: upper bound, above `low`; infinity means no bound.

    Raises:
        ValueError: a field is invalid.
        TypeError: a field has the wrong type.

    Examples:
        >>> from fastrl import Objective, RolloutCorrection
        >>> objective = Objective(rollout_correction=RolloutCorrection(kind="mask", low=0.5))
        >>> objective.rollout_corrections[0].high
        2.0
        >>> rejection = RolloutCorrection(kind="filter", estimator="k3", level="max", high=0.1)
    """

    kind: Literal["truncate", "mask", "filter"] = "truncate"
    level: Literal["token", "sequence", "geometric", "max"] = "token"
    estimator: Literal["ratio", "k1", "k2", "k3", "reverse-k3"] = "ratio"
    low: float = 0.0
    high: float = 2.0

    def __post_init__(self) -> None:
        one_of("rollout_correction.kind", self.kind, ("truncate", "mask", "filter"))
        levels = ("token", "sequence", "geometric", "max")
        one_of("rollout_correction.level", self.level, levels)
        one_of("rollout_correction.estimator", self.estimator, _ESTIMATORS)
        if self.kind != "filter" and (self.level == "max" or self.estimator != "ratio"):
            raise ValueError(
                "rollout_correction.kind must be 'filter' with "
                f"estimator {self.estimator} and level {self.level}, got {self.kind!r}"
            )
        signed = self.estimator == "k1"
        if not (signed and isinstance(self.low, Real) and self.low == -inf):
            low = number("rollout_correction.low", self.low, low=None if signed else 0.0)
            object.__setattr__(self, "low", low)
        if not (isinstance(self.high, Real) and self.high == inf):
            object.__setattr__(self, "high", positive("rollout_correction.high", self.high))
        if signed and self.low >= 0:  # else equal policies would be rejected
            raise ValueError(
                f"rollout_correction.low must be below 0 with estimator k1, got {self.low}"
            )
        if self.high <= self.low:
            raise ValueError(
                f"rollout_correction.high must be above low = {self.low}, got {self.high}"
            )
        unbounded = (-inf if signed else 0.0, inf)
        if self.kind != "truncate" and (self.low, self.high) == unbounded:
            raise ValueError(f"rollout_correction.kind {self.kind} has no effect without a bound")

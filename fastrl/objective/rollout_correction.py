"""Options of the importance weights that correct for the inference engine."""

from __future__ import annotations

import dataclasses
from math import inf
from numbers import Real
from typing import Literal

from fastrl.checks import number, one_of, positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutCorrection:
    """A detached importance weight between the trainer and the engine that sampled the tokens.

    The ratio is `exp(old_logprobs - rollout_logprobs)` of the token (`level="token"`), its product
    over the sequence (`"sequence"`) or its geometric mean over the sequence (`"geometric"`).

    | kind | weight of a token | also known as |
    | --- | --- | --- |
    | `truncate` | the ratio, clamped to `[low, high]` | TIS; TRL `*_truncate`, OpenRLHF `tis` |
    | `mask` | the ratio, or 0 outside `[low, high]` | IcePop; TRL `*_mask`, verl `"low_high"` |
    | `filter` | 1, or 0 outside `[low, high]` | rejection; verl `rollout_rs` |

    An `Objective` takes a tuple of several and multiplies their weights: OpenRLHF's `seq-mask-tis`
    is a `filter` at level `geometric` and a `truncate` at level `token` with `high=inf`.

    Attributes:
        kind: `"truncate"`, `"mask"` or `"filter"`.
        level: `"token"`, `"sequence"` or `"geometric"`.
        low: lower bound of the ratio, at least 0.
        high: upper bound of the ratio, above `low`; infinity means no bound.

    Raises:
        ValueError: a field is invalid.
        TypeError: a field has the wrong type.

    Example:
        >>> from fastrl import Objective, RolloutCorrection
        >>> objective = Objective(rollout_correction=RolloutCorrection(kind="mask", low=0.5))
        >>> objective.rollout_corrections[0].high
        2.0
    """

    kind: Literal["truncate", "mask", "filter"] = "truncate"
    level: Literal["token", "sequence", "geometric"] = "token"
    low: float = 0.0
    high: float = 2.0

    def __post_init__(self) -> None:
        one_of("rollout_correction.kind", self.kind, ("truncate", "mask", "filter"))
        one_of("rollout_correction.level", self.level, ("token", "sequence", "geometric"))
        object.__setattr__(self, "low", number("rollout_correction.low", self.low, low=0.0))
        if not (isinstance(self.high, Real) and self.high == inf):
            object.__setattr__(self, "high", positive("rollout_correction.high", self.high))
        if self.high <= self.low:
            raise ValueError(
                f"rollout_correction.high must be above low = {self.low}, got {self.high}"
            )
        if self.kind != "truncate" and (self.low, self.high) == (0.0, inf):
            raise ValueError(f"rollout_correction.kind {self.kind} has no effect without a bound")

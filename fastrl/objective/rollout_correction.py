"""Which importance weights the loss takes against the engine that sampled."""

from __future__ import annotations

import dataclasses
from math import inf
from typing import Literal

from fastrl.checks import number, one_of, positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutCorrection:
    """A detached importance weight between the trainer and the engine that sampled.

    The ratio is `exp(old_logprobs - rollout_logprobs)` of a token (`level="token"`), the product
    over its sequence (`"sequence"`) or the geometric mean over it (`"geometric"`).

    | kind | weight of a token | names elsewhere |
    | --- | --- | --- |
    | `truncate` | the ratio, held within `[low, high]` | TIS; TRL `*_truncate`, OpenRLHF `tis` |
    | `mask` | the ratio, 0 outside `[low, high]` | IcePop; TRL `*_mask`, verl `"low_high"` |
    | `filter` | 1, 0 outside `[low, high]` | rejection; verl `rollout_rs` |

    An `Objective` takes several as a tuple and multiplies them: OpenRLHF's `seq-mask-tis` is a
    `filter` by the geometric mean and a `truncate` of tokens without bounds (`high=inf`).

    Attributes:
        kind: `"truncate"`, `"mask"` or `"filter"`.
        level: `"token"`, `"sequence"` or `"geometric"`.
        low: lower bound of the ratio, at least 0.
        high: upper bound of the ratio, above `low`; infinite for none.

    Raises:
        ValueError: a field has no such value.

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
        if self.high != inf:
            object.__setattr__(self, "high", positive("rollout_correction.high", self.high))
        if self.high <= self.low:
            raise ValueError(
                f"rollout_correction.high must be above low = {self.low}, got {self.high}"
            )
        if self.kind != "truncate" and (self.low, self.high) == (0.0, inf):
            raise ValueError(f"rollout_correction.kind {self.kind} has no effect without a bound")

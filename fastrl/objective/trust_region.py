"""Options of the mask that drops tokens which moved too far from the old policy."""

from __future__ import annotations

import dataclasses
from typing import Literal

from fastrl.checks import one_of, positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrustRegion:
    """A mask that drops tokens which moved too far from the old policy in the direction of `A`.

    With the probability `p` of the token under the policy and `q` under the old policy
    (`old_logprobs`; without them nothing is dropped), only tokens with `A > 0, p > q` or
    `A < 0, p < q` can be dropped from the policy term. `tv` and `kl` count a probability that
    rounding made larger than 1 as 1. The mask is a constant. A NaN distance drops nothing.

    | kind | drops tokens with | source |
    | --- | --- | --- |
    | `tv` | `abs(p - q)` above the bound | DPPO-Binary-TV, arXiv 2602.04879 |
    | `kl` | `q log(q / p) + (1 - q) log((1 - q + 1e-8) / (1 - p + 1e-8))` above the bound | DPPO-Binary-KL |
    | `m2` | the largest `(log p - log q)^2`, until the mean over the remaining candidates is at most `high`; equal ones are dropped together | M2PO, arXiv 2510.01161 |

    `m2` considers the candidates of the whole call together.

    Attributes:
        kind: `"tv"`, `"kl"` or `"m2"`.
        high: the bound for tokens with `A > 0`, in probability (`tv`) or nats (`kl`); for `m2`, the
            only bound, in squared nats.
        low: the bound for tokens with `A < 0`; None means the same as `high`.

    Raises:
        ValueError: a field is invalid.
        TypeError: a field has the wrong type.

    Examples:
        >>> import torch, fastrl
        >>> probabilities = torch.tensor([[0.1, 0.5, 0.9]])
        >>> logprobs = torch.tensor([[0.2, 0.8, 0.5]]).log().requires_grad_()
        >>> o = fastrl.Objective.preset("dppo_tv")  # TrustRegion(kind="tv", high=0.2)
        >>> fastrl.policy_loss(
        ...     logprobs,
        ...     torch.ones(1),
        ...     torch.ones(1, 3),
        ...     old_logprobs=probabilities.log(),
        ...     objective=o,
        ... ).loss.backward()
        >>> logprobs.grad
        tensor([[-0.6667,  0.0000, -0.1852]])
    """  # noqa: E501

    kind: Literal["tv", "kl", "m2"] = "tv"
    high: float = 0.2
    low: float | None = None

    def __post_init__(self) -> None:
        one_of("trust_region.kind", self.kind, ("tv", "kl", "m2"))
        object.__setattr__(self, "high", positive("trust_region.high", self.high))
        if self.low is not None:
            object.__setattr__(self, "low", positive("trust_region.low", self.low))
            if self.kind == "m2":
                raise ValueError("trust_region.low has no effect with kind m2")

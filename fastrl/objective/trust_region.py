"""Options of the mask of tokens that have moved too far from the old policy."""

from __future__ import annotations

import dataclasses
from typing import Literal

from fastrl.checks import one_of, positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrustRegion:
    """Drops tokens that have moved away from the old policy, and as their advantage pulls.

    Only tokens with `A > 0, p > q` or `A < 0, p < q` can be dropped from the policy term, where
    `log p` is the current log-probability and `log q` one of `old_logprobs`; without those nothing
    is dropped. The mask is a constant, a NaN distance drops nothing.

    | kind | dropped is a token with | source |
    | --- | --- | --- |
    | `tv` | `abs(p - q)` above its bound | DPPO-Binary-TV, arXiv 2602.04879 |
    | `kl` | `q log(q / p) + (1 - q) log((1 - q + 1e-8) / (1 - p + 1e-8))` above its bound | DPPO-Binary-KL |
    | `m2` | one of the largest `(log p - log q)^2`: as many as it takes until their mean over the tokens that remain of those above is at most `high`; equal ones are dropped together | M2PO, arXiv 2510.01161 |

    `m2` looks at all tokens of the call.

    Attributes:
        kind: `"tv"`, `"kl"` or `"m2"`.
        high: the bound for tokens with `A > 0`; for `m2`, the only bound.
        low: the bound for tokens with `A < 0`; None means as `high`.

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

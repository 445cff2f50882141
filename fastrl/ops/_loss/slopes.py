"""The slopes of a tokenwise policy loss, for a subset of the tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastrl import reference
from fastrl.contract import LossArguments, ObjectiveArguments
from fastrl.objective import TokenLoss
from fastrl.ops._loss.inputs import evaluate


def per_token(arguments: LossArguments, active: Tensor, shape: torch.Size) -> LossArguments:
    """Expand the arguments of `active` `[B, T]` to one value per token, in another shape."""
    sequences = reference.sequences_of(active, arguments.cu_seqlens)
    return LossArguments._make(
        None if x is None else sequences.per_token(x, active).reshape(shape).contiguous()
        for x in arguments._replace(cu_seqlens=None)
    )


class TokenSlopes(NamedTuple):
    """A policy loss without dependencies between tokens; all tensors are per token."""

    active: Tensor
    arguments: LossArguments
    objective: ObjectiveArguments
    function: TokenLoss | None
    backend: str

    def weighted(self) -> Tensor:
        """Return which tokens have a nonzero weight in any term."""
        return self._in_any_term(self._policy_weights() != 0)

    def may_flow(self) -> Tensor:
        """Return which tokens may have a gradient, as far as the constants determine it."""
        policy = self._policy_weights() != 0
        if self.function is None:  # a function may have a gradient where the advantage is 0
            old, nonzero = self.arguments.old_logprobs, self.arguments.advantages != 0
            # 0 times NaN is NaN
            policy = policy & (nonzero if old is None else nonzero | old.isnan())
        return self._in_any_term(policy)

    def _policy_weights(self) -> Tensor:
        a = self.arguments
        return a.weights if a.policy_weights is None else a.weights * a.policy_weights

    def _in_any_term(self, policy: Tensor) -> Tensor:
        a, c = self.arguments, self.objective.coefficients
        result = policy
        terms = ((c.kl_coef, a.kl_weights), (c.entropy_coef, a.entropy_weights))
        for coefficient, weights in terms:
            if coefficient:
                result = result | ((a.weights if weights is None else weights) != 0)
        return result

    def of(self, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return dL/dlogprobs and dL/dentropy (None: 0)."""
        _, slope, entropy_slope, _ = evaluate(
            logprobs,
            entropy,
            self.active,
            self.arguments,
            self.objective,
            self.function,
            self.backend,
        )
        return slope, entropy_slope

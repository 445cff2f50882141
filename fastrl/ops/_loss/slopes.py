"""The slopes of a tokenwise policy loss, for a subset of the tokens."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fastrl import reference
from fastrl.contract import LossArguments, ObjectiveArguments
from fastrl.objective import TokenLoss
from fastrl.ops._loss.inputs import evaluate


def flat_arguments(arguments: LossArguments, active: Tensor) -> LossArguments:
    """Expand the arguments to one value per token, `[N]`; `active` is `[B, T]`."""
    sequences = reference.sequences_of(active, arguments.cu_seqlens)
    return LossArguments._make(
        None if x is None else sequences.per_token(x, active).reshape(-1)
        for x in arguments._replace(cu_seqlens=None)
    )


class TokenSlopes(NamedTuple):
    """A policy loss without dependencies between tokens; all tensors are per token, `[N]`."""

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
            policy = policy & (self.arguments.advantages != 0)
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

    def taken(self, indices: Tensor | None) -> TokenSlopes:
        """Return the loss of the tokens with these indices; None means all."""
        if indices is None:
            return self
        arguments = (None if x is None else x[indices] for x in self.arguments)
        return self._replace(active=self.active[indices], arguments=LossArguments._make(arguments))

    def arguments_of(self, chunk: slice) -> LossArguments:
        """Return the arguments of a chunk, `[1, C]` each."""
        return LossArguments._make(
            None if x is None else x[chunk][None].contiguous() for x in self.arguments
        )

    def of_chunk(
        self, logprobs: Tensor, entropy: Tensor, chunk: slice
    ) -> tuple[Tensor, Tensor | None]:
        """Return dL/dlogprobs and dL/dentropy (None: 0) of a chunk, `[C]` each."""
        _, slope, entropy_slope, _ = evaluate(
            logprobs[None],
            entropy[None],
            self.active[chunk][None],
            self.arguments_of(chunk),
            self.objective,
            self.function,
            self.backend,
        )
        return slope[0], None if entropy_slope is None else entropy_slope[0]

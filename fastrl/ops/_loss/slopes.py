"""dL/dlogprob of some of the rows of a linear form."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastrl import reference
from fastrl.contract import LossArguments, ObjectiveArguments
from fastrl.objective import TokenLoss
from fastrl.ops._loss.inputs import evaluate


def flat_arguments(arguments: LossArguments, active: Tensor) -> LossArguments:
    """Return the arguments per token, `[N]` each, of tokens `[B, T]`."""
    sequences = reference.sequences_of(active, arguments.cu_seqlens)
    return LossArguments._make(
        None if x is None else sequences.per_token(x, active).reshape(-1)
        for x in arguments._replace(cu_seqlens=None)
    )


class TokenSlopes(NamedTuple):
    """A loss of tokens by themselves: `active` and the arguments are per token, `[N]`."""

    active: Tensor
    arguments: LossArguments
    objective: ObjectiveArguments
    function: TokenLoss | None
    backend: str

    def may_flow(self) -> Tensor:
        """Say which rows may have a gradient, as far as is known before their logprobs are."""
        a, c = self.arguments, self.objective.coefficients
        flows = a.weights != 0
        if a.policy_weights is not None:
            flows = flows & (a.policy_weights != 0)
        if self.function is None:  # what a function makes of an advantage of 0 is not known
            flows = flows & (a.advantages != 0)
        terms = ((c.kl_coef, a.kl_weights), (c.entropy_coef, a.entropy_weights))
        for coefficient, weights in terms:
            if coefficient:
                flows = flows | ((a.weights if weights is None else weights) != 0)
        return flows

    def of(
        self, logprobs: Tensor, entropy: Tensor, rows: Tensor | slice
    ) -> tuple[Tensor, Tensor | None]:
        """Return the slopes of the loss in logprobs and entropy, both `[C]`, of these rows."""
        arguments = LossArguments._make(
            None if x is None else x[rows][None].contiguous() for x in self.arguments
        )
        _, slope, entropy_slope, _ = evaluate(
            logprobs[None],
            entropy[None],
            self.active[rows][None],
            arguments,
            self.objective,
            self.function,
            self.backend,
        )
        return slope[0], None if entropy_slope is None else entropy_slope[0]


def weighed_tokens(arguments: LossArguments, active: Tensor) -> Tensor:
    """Say which tokens `[B, T]` have a weight in any term."""
    sequences = reference.sequences_of(active, arguments.cu_seqlens)
    policy = sequences.per_token(arguments.weights, active)
    if arguments.policy_weights is not None:
        policy = policy * sequences.per_token(arguments.policy_weights, active)
    others = (arguments.kl_weights, arguments.entropy_weights)
    terms = [policy, *(sequences.per_token(x, active) for x in others if x is not None)]
    return torch.stack([weights != 0 for weights in terms]).any(0)

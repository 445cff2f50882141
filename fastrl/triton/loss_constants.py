"""The constants of a policy loss in a kernel: each has one value per sequence or one per token."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fastrl.contract import LossArguments


class BySequence(NamedTuple):
    """Which constants have one value per sequence, as constants of the compilation."""

    advantages: bool
    weights: bool
    kl_weights: bool
    entropy_weights: bool
    policy_weights: bool


def by_sequence(loss: LossArguments) -> BySequence:
    """Return which constants have one value per sequence."""
    constants = (getattr(loss, name) for name in BySequence._fields)
    return BySequence(*(x is not None and x.dim() == 1 for x in constants))


class Weights(NamedTuple):
    """The weights of tokens in the terms of the loss."""

    policy: Any
    kl: Any
    entropy: Any


@triton.jit
def load_constant(values, BY_SEQUENCE: tl.constexpr, sequence, token, inside, active):
    """Load a constant of the loss for a block of tokens, or of one sequence; 0 where inactive."""
    at = sequence if BY_SEQUENCE else token
    if at.type.is_block():  # noqa: SIM108
        x = tl.load(values + at, mask=inside, other=0.0)
    else:
        x = tl.load(values + at)
    return tl.where(active, x, 0.0)


@triton.jit
def load_weights(loss, BY_SEQUENCE: tl.constexpr, sequence, token, inside, active):
    """Load the weights of all terms; a term without separate weights uses `loss.weights`."""
    policy = load_constant(loss.weights, BY_SEQUENCE.weights, sequence, token, inside, active)
    kl, entropy = policy, policy
    if loss.policy_weights is not None:
        policy *= load_constant(
            loss.policy_weights, BY_SEQUENCE.policy_weights, sequence, token, inside, active
        )
    if loss.kl_weights is not None:
        kl = load_constant(loss.kl_weights, BY_SEQUENCE.kl_weights, sequence, token, inside, active)
    if loss.entropy_weights is not None:
        entropy = load_constant(
            loss.entropy_weights, BY_SEQUENCE.entropy_weights, sequence, token, inside, active
        )
    return Weights(policy, kl, entropy)

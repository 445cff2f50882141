"""Statistics of rows, in the form that functions of logits and of hidden states return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.checks import one_of
from fastrl.contract import RowStats

#: The fields of `TokenStats` with a gradient, in the order in which kernels take their slopes.
DIFFERENTIABLE = ("logprobs", "entropy", "logsumexp")
#: The fields that need a teacher.
OF_TEACHER = ("divergence", "teacher_entropy", "agrees")


class TokenStats(NamedTuple):
    """Statistics of the distribution at each token; fields that were not requested are None.

    All have the shape of the token ids, `[B, T]` or `[N]`.

    Attributes:
        logprobs: log p(token), in nats.
        entropy: -sum p log p, in nats.
        logsumexp: log sum exp z, in nats.
        sum_sq_probs: sum p^2 (no gradient).
        is_top1: bool, whether no logit is greater than the token's.
        divergence: the divergence from the teacher's distribution in nats, see `Teacher`.
        teacher_entropy: the entropy of the teacher's distribution in nats (no gradient).
        agrees: bool, whether the same token is the most probable in both distributions.

    Examples:
        >>> import torch, fastrl
        >>> stats = fastrl.token_stats(torch.zeros(1, 4), torch.tensor([2]))
        >>> round(stats.entropy.item(), 4), stats.logsumexp
        (1.3863, None)
    """

    logprobs: Tensor | None
    entropy: Tensor | None
    logsumexp: Tensor | None
    sum_sq_probs: Tensor | None
    is_top1: Tensor | None
    divergence: Tensor | None = None
    teacher_entropy: Tensor | None = None
    agrees: Tensor | None = None


#: The fields that need none.
OF_ROW = tuple(name for name in TokenStats._fields if name not in OF_TEACHER)


def checked_outputs(outputs: object, teacher: object) -> Sequence[str]:
    """Return the names of requested fields if `TokenStats` has them."""
    if isinstance(outputs, str) or not isinstance(outputs, Sequence):
        raise TypeError(f"outputs must be a sequence of names, got {outputs!r}")
    for name in outputs:
        one_of("outputs", name, TokenStats._fields)
        if teacher is None and name in OF_TEACHER:
            raise ValueError(f"outputs must not have {name!r} without a teacher")
    if len(set(outputs)) < len(outputs):
        raise ValueError(f"outputs must not repeat a name, got {tuple(outputs)}")
    return outputs


def public_stats(stats: RowStats) -> tuple[Tensor, ...]:
    """Return the statistics that are fields of `TokenStats`, in their order."""
    return tuple(getattr(stats, name) for name in OF_ROW)


def without_gradient(stats: RowStats) -> tuple[Tensor, ...]:
    """Return the fields of `TokenStats` that are not differentiable."""
    names = (name for name in OF_ROW if name not in DIFFERENTIABLE)
    return tuple(getattr(stats, name) for name in names)


def slopes_of(grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Return the gradients of the differentiable fields of `TokenStats`."""
    named = zip(OF_ROW, grads, strict=True)
    return tuple(grad for name, grad in named if name in DIFFERENTIABLE)


def requested(stats: TokenStats, outputs: Sequence[str], shape: torch.Size) -> TokenStats:
    """Return the requested statistics in the caller's shape."""
    named = zip(TokenStats._fields, stats, strict=True)
    return TokenStats._make(
        [None if x is None or name not in outputs else x.reshape(shape) for name, x in named]
    )

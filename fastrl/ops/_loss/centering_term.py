"""The sampler's expected score as a term of a policy loss."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl import reference
from fastrl.contract import METRICS, CenteringStats, LossArguments


def add_centering(
    loss: Tensor,
    metrics: Tensor,
    centered: CenteringStats,
    weights: Tensor,
    arguments: LossArguments,
    active: Tensor,
    still: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the loss with the term, the metrics, what is still, and the metrics of the term.

    `still` marks tokens that have no gradient from the other terms. `arguments` have the weights of
    the sampled tokens.
    """
    term = torch.where(weights == 0, 0.0, weights * centered.term).sum()
    still = still & (weights == 0)
    count = active.sum().clamp(min=1)

    def mean(values: Tensor) -> Tensor:
        return torch.where(active, values.detach(), 0).sum(dtype=metrics.dtype) / count

    dropped = torch.zeros_like(active)
    if arguments.policy_weights is not None:
        sequences = reference.sequences_of(active, arguments.cu_seqlens)
        dropped = sequences.per_token(arguments.policy_weights, active) == 0
    values = dict(zip(METRICS, metrics.unbind(), strict=True))
    values["policy_loss"] = values["policy_loss"] + term.detach()
    values["zero_grad_fraction"] = mean(still)
    of_term = torch.stack([mean(x) for x in (centered.mass, centered.head_kl, dropped)])
    return loss + term, torch.stack([*values.values()]), still, of_term

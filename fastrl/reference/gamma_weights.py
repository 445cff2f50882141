"""The weight that VESPO gives to a sequence, a gamma density of its importance ratio."""

from __future__ import annotations

from math import log

import torch
from torch import Tensor

from fastrl.objective.gamma_weights import GammaWeights
from fastrl.reference.objectives import MAX_LOG_RATIO, clamp, difference
from fastrl.reference.sequences import Sequences

_LOWEST, _HIGHEST = log(1e-8), 20.0


def gamma_weights(
    logprobs: Tensor,
    old_logprobs: Tensor,
    corrections: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequences: Sequences,
    options: GammaWeights,
) -> Tensor:
    """Return the detached weight of every token, `[B, T]`; `corrections` are factors of `w`."""
    log_ratio = clamp(difference(logprobs.detach(), old_logprobs), -_HIGHEST, _HIGHEST)
    log_ratio = log_ratio + clamp(corrections.log(), _LOWEST, _HIGHEST)
    log_w = sequences.total(torch.where(mask, log_ratio, 0.0))
    log_w = sequences.spread(clamp(log_w, _LOWEST, _HIGHEST), log_ratio)
    rises = advantages >= 0
    # in the dtype of the weights: `torch.where` of two numbers has torch's default dtype
    k = torch.full_like(log_w, options.k_neg).masked_fill(rises, options.k_pos)
    decay = torch.full_like(log_w, options.lambda_neg).masked_fill(rises, options.lambda_pos)
    return (k * log_w - decay * torch.expm1(log_w)).clamp(max=MAX_LOG_RATIO).exp()

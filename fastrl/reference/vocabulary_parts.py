"""The statistics of rows whose vocabulary is split over ranks, from statistics of the parts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.contract import RowArguments, RowStats
from fastrl.reference.row_blocks import unless_all
from fastrl.reference.token_stats import gain_of, row_sums, squashed, token_logits


class PartStats(NamedTuple):
    """The statistics of rows over only a rank's part of the vocabulary.

    With t = z - max z over the part: s = sum exp t.
    """

    row_max: Tensor  # the largest logit; -inf if all are
    log_sum: Tensor  # log s
    entropy: Tensor  # of the softmax over the part
    sum_sq_probs: Tensor  # of the softmax over the part
    token_logit: Tensor  # 0 where the token belongs to another part


def part_stats(logits: Tensor, active: Tensor, own: Tensor, rows: RowArguments) -> PartStats:
    """Return the statistics of a part, `[B, T]`; `own` marks tokens that are columns of the part.

    A row with only -inf adds nothing to the whole row.
    """
    sums = row_sums(logits, rows, unless_all(active), with_entropy=True, with_sum_sq_probs=True)
    token, _ = token_logits(logits, rows)
    log_sum = sums.log_sum_exp()
    absent = ~active | (sums.row_max == float("-inf"))
    log_sum, entropy, sum_sq_probs = (
        x.masked_fill(absent, 0.0) for x in (log_sum, log_sum - sums.mean, sums.sum_sq_probs)
    )
    return PartStats(
        row_max=sums.row_max.masked_fill(~active, 0.0),
        log_sum=log_sum,
        entropy=entropy,
        sum_sq_probs=sum_sq_probs,
        token_logit=token.masked_fill(~(own & active), 0.0),
    )


def whole_stats(parts: PartStats, rows: RowArguments, active: Tensor, known: Tensor) -> RowStats:
    """Combine the parts, `[R, ...]` in rank order, into the statistics of the whole rows.

    With d_r = max z_r - max z, w_r = s_r exp d_r and S = sum_r w_r over the parts r:
    log p = z_token - max z - log S,  H = log S - sum_r w_r (log s_r - H_r + d_r) / S.

    The sums are in float64 and in the order of the ranks. `known` marks tokens whose id is inside
    the vocabulary; elsewhere the log-probability is NaN.
    """
    dtype = parts.log_sum.dtype
    parts = PartStats._make(field.double() for field in parts)
    row_max = parts.row_max.amax(0)
    top = _scaled(row_max, rows, active)
    below = _scaled(parts.row_max, rows, active) - top
    weights = torch.where(parts.row_max == float("-inf"), 0.0, parts.log_sum.exp() * below.exp())
    total = weights.sum(0)
    # the part with the maximum has the weight 1 + expm1(log s); S - 1 takes it without the 1
    ranks = torch.arange(len(weights), device=weights.device).view(-1, *[1] * (weights.dim() - 1))
    first = ranks == parts.row_max.argmax(0)
    beside_1 = torch.where(first, parts.log_sum.expm1(), weights).sum(0)
    log_sum = torch.where(total == 0, float("nan"), beside_1.log1p())
    shares = weights / total
    # the mean of z - max z over the part; a part of weight 0 may be infinitely far below
    means = torch.where(weights == 0, 0.0, parts.log_sum - parts.entropy + below)
    entropy = (log_sum - (shares * means).sum(0)).clamp(min=0.0)
    token = parts.token_logit.sum(0)
    logprobs = torch.where(known, _scaled(token, rows, active) - top - log_sum, float("nan"))
    tops = (squashed(logit.to(dtype), rows) for logit in (token, row_max))
    stats = RowStats(
        logprobs=logprobs,
        entropy=entropy,
        logsumexp=torch.where(total == 0, float("-inf"), top + log_sum),
        sum_sq_probs=(shares.square() * parts.sum_sq_probs).sum(0),
        is_top1=torch.ge(*tops) & known & active,
        row_max=row_max,
        log_sum=log_sum,
    )
    return RowStats._make(
        stat if stat.dtype == torch.bool else torch.where(active, stat, 0.0).to(dtype)
        for stat in stats
    )


def _scaled(logits: Tensor, rows: RowArguments, active: Tensor) -> Tensor:
    """Return z of logits `[..., rows]`."""
    return squashed(logits, rows) * gain_of(rows, active)

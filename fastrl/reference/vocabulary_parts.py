"""The statistics of rows whose vocabulary is split over ranks, from statistics of the parts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.contract import RowArguments, RowStats
from fastrl.reference.inner_graph import inner_graph
from fastrl.reference.token_stats import log_sum_exp, shifted_logits, squashed


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
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    x = torch.where(active[..., None], logits, 0.0).to(dtype)
    shifted, _ = shifted_logits(
        x, _temperature(rows, active), rows.logit_scale, rows.logit_softcap or None
    )
    row_max = x.amax(-1)
    log_sum = torch.where(row_max == float("-inf"), 0.0, log_sum_exp(shifted)[..., 0])
    probs = (shifted - log_sum[..., None]).exp()
    token_logit = x.gather(-1, torch.where(own, rows.token_ids, 0)[..., None])[..., 0]
    return PartStats(
        row_max=row_max,
        log_sum=log_sum,
        entropy=log_sum - (probs * torch.where(probs == 0, 0.0, shifted)).sum(-1),
        sum_sq_probs=probs.square().sum(-1),
        token_logit=torch.where(own & active, token_logit, 0.0),
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
    tops = (_squashed(logit.to(dtype), rows) for logit in (token, row_max))
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


def part_gradient(
    logits: Tensor,
    token_ids: Tensor,
    active: Tensor,
    stats: RowStats,
    slopes: tuple[Tensor | None, Tensor | None, Tensor | None],
    rows: RowArguments,
) -> Tensor:
    """Return dL/dlogits of a part, from the statistics of whole rows.

    `token_ids` are columns of this part; `slopes` are dL/dlogprob (0 where the token belongs to
    another part), dL/dentropy and dL/dlogsumexp + dL/dlogprob of the other parts' tokens.
    """
    dtype = stats.log_sum.dtype
    with inner_graph():
        leaf = logits.detach().clone().requires_grad_()
        x = torch.where(active[..., None], leaf, 0.0).to(dtype)
        shifted, _ = shifted_logits(
            x,
            _temperature(rows, active),
            rows.logit_scale,
            rows.logit_softcap or None,
            stats.row_max,
        )
        with torch.no_grad():
            logprobs = shifted - stats.log_sum[..., None]
            slope = part_slope(logprobs, token_ids, stats.entropy, slopes)
            slope = torch.where(active[..., None], slope, 0.0)
        (gradient,) = torch.autograd.grad(shifted, leaf, slope)
    return gradient


def part_slope(
    logprobs: Tensor,
    token_ids: Tensor,
    entropy: Tensor,
    slopes: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> Tensor:
    """Return dL/dz of log-probabilities `[..., V]`; for the slopes see `part_gradient`."""
    probs = logprobs.exp()
    finite = torch.where(probs == 0, 0.0, logprobs)
    of_logprob, of_entropy, of_logsumexp = (
        torch.zeros_like(probs[..., :1]) if slope is None else slope[..., None] for slope in slopes
    )
    columns = torch.arange(probs.shape[-1], device=probs.device)
    own = (columns == token_ids[..., None]) & (of_logprob != 0)
    slope = torch.where(own, -logprobs.expm1(), -probs) * of_logprob
    return slope + of_logsumexp * probs - of_entropy * probs * (finite + entropy[..., None])


def _squashed(logits: Tensor, rows: RowArguments) -> Tensor:
    return squashed(logits, rows.logit_scale, rows.logit_softcap or None)


def _scaled(logits: Tensor, rows: RowArguments, active: Tensor) -> Tensor:
    """Return z of logits `[..., rows]`."""
    factor = 1.0 if rows.logit_softcap else rows.logit_scale
    return _squashed(logits, rows) * factor / _temperature(rows, active)


def _temperature(rows: RowArguments, active: Tensor) -> float | Tensor:
    if rows.temperatures is None:
        return rows.temperature
    return torch.where(active, rows.temperatures, 1.0)

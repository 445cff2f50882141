"""The divergence of a student's distribution from a teacher's, and its gradient by the logits.

With the student's distribution q, the teacher's distribution p and m = (1 - beta) q + beta p:

    beta = 0:  KL(p || q) = sum p log p/q
    beta = 1:  KL(q || p) = sum q log q/p
    else:      beta KL(p || m) + (1 - beta) KL(q || m)

The gradient is dD/dz_j = d_j - q_j sum d, with d_j = q_j dD/dlog q_j: in the three cases q_j - p_j,
q_j log q_j/p_j and (1 - beta) q_j log q_j/m_j.
"""

from __future__ import annotations

from math import log
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.contract import RowArguments, SoftmaxStats
from fastrl.reference.token_stats import (
    Slopes,
    gain_of,
    raw_gain_of,
    shifted,
    squash_slope,
    squashed,
    token_gradient,
)

#: A log q/p of this, as a logit of finfo.min makes it in one of the rows, is infinite.
EXCLUDED = 2.0**50 * log(2)


class DivergenceTerms(NamedTuple):
    """The term of each event in the divergence, and its d."""

    value: Tensor
    slope: Tensor


def divergence_terms(log_q: Tensor, log_p: Tensor, beta: float) -> DivergenceTerms:
    """Return the terms for two log-probabilities of the same events.

    The terms of the two KLs contain q - p, or p - q, besides the logarithm. These sum to 0, but
    keep every term at 0 or above, and an error in a normalizer has no effect to first order. All
    terms are computed from the larger probability and from expm1 of the distance, so nearly equal
    distributions keep their digits.
    """
    excluded = (log_q == float("-inf")) & (log_p == float("-inf"))
    log_ratio = torch.where(excluded, 0.0, log_q - log_p)
    log_ratio = torch.where(log_ratio.abs() >= EXCLUDED, log_ratio * torch.inf, log_ratio)
    leads = log_ratio >= 0
    larger = torch.where(leads, log_q, log_p).exp()
    distance = torch.where(leads, -log_ratio, log_ratio)
    growth, quotient = distance.expm1(), distance.exp()
    smaller = larger * quotient
    q, p = torch.where(leads, larger, smaller), torch.where(leads, smaller, larger)
    excess = torch.where(leads, -larger * growth, larger * growth)
    if beta == 0:
        return DivergenceTerms(excess - _product(p, log_ratio), excess)
    if beta == 1:
        slope = _product(q, log_ratio)
        return DivergenceTerms(slope - excess, slope)
    of_larger, of_smaller = _mixture_logs(distance, growth, quotient, leads, beta)
    slope = (1 - beta) * _product(q, torch.where(leads, of_larger, of_smaller))
    of_p = torch.where(leads, of_smaller, of_larger)
    return DivergenceTerms(beta * _product(p, of_p) + slope, slope)


def _mixture_logs(
    distance: Tensor, growth: Tensor, quotient: Tensor, leads: Tensor, beta: float
) -> tuple[Tensor, Tensor]:
    """Return log larger/m and log smaller/m, accurate however small a share is."""
    of_teacher, of_student = (torch.full_like(distance, share) for share in (beta, 1 - beta))
    share_of_larger = torch.where(leads, of_student, of_teacher)
    share_of_smaller = torch.where(leads, of_teacher, of_student)
    fall, rise = share_of_smaller * growth, -share_of_larger * growth  # to m; with larger = 1
    mixture = share_of_larger + share_of_smaller * quotient
    of_larger = -torch.where(fall > -0.5, fall.log1p(), mixture.log())
    near_smaller = (share_of_larger < 0.5) & (3 * rise < quotient)
    from_smaller = torch.where(near_smaller, rise / quotient, 0.0).log1p()
    of_larger = torch.where(near_smaller, -distance - from_smaller, of_larger)
    return of_larger, torch.where(near_smaller, -from_smaller, of_larger + distance)


def _product(probability: Tensor, log: Tensor) -> Tensor:
    return torch.where(probability == 0, 0.0, probability * log)


def divergence(
    logits: Tensor,
    teacher_logits: Tensor,
    active: Tensor,
    rows: RowArguments,
    teacher: RowArguments,
    stats: SoftmaxStats,
    teacher_stats: SoftmaxStats,
    beta: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the divergence, sum d, and whether both have the same largest column, `[B, T]`.

    The logits may be a part of the rows behind the statistics: the sums are then over this part.
    """
    log_q = _logprobs(logits, active, rows, stats)
    log_p = _logprobs(teacher_logits, active, teacher, teacher_stats)
    terms = divergence_terms(log_q, log_p, beta)
    tops = (
        _is_largest(x, given, of.row_max)
        for x, given, of in ((logits, rows, stats), (teacher_logits, teacher, teacher_stats))
    )
    agrees = torch.logical_and(*tops).any(-1) & active
    sums = (torch.where(active, term.sum(-1), 0.0) for term in terms)
    value, slope_mean = sums
    return value, slope_mean, agrees


def divergence_gradient(
    logits: Tensor,
    teacher_logits: Tensor,
    active: Tensor,
    rows: RowArguments,
    teacher: RowArguments,
    stats: SoftmaxStats,
    teacher_stats: SoftmaxStats,
    beta: float,
    slope_mean: Tensor,
    grad_divergence: Tensor,
    slopes: Slopes,
) -> Tensor:
    """Return dL/dlogits from dL/ddivergence and the slopes that `token_gradient` takes."""
    log_q = _logprobs(logits, active, rows, stats)
    log_p = _logprobs(teacher_logits, active, teacher, teacher_stats)
    d = divergence_terms(log_q, log_p, beta).slope
    slope = d - _product(log_q.exp(), slope_mean[..., None].expand_as(log_q))
    factor = raw_gain_of(rows, active)
    factor = factor[..., None] if isinstance(factor, Tensor) else factor
    slope = grad_divergence[..., None] * slope * factor
    if rows.logit_softcap:
        slope = slope * squash_slope(logits, rows)
    without = (grad_divergence == 0) | ~active
    slope = slope.masked_fill(without[..., None] | (logits == float("-inf")), 0.0)
    return slope + token_gradient(logits, rows, active, stats, slopes, is_part=True)


def _logprobs(logits: Tensor, active: Tensor, rows: RowArguments, stats: SoftmaxStats) -> Tensor:
    x = torch.where(active[..., None], logits, 0.0).to(stats.log_sum.dtype)
    top, gain = squashed(stats.row_max, rows), gain_of(rows, active)
    top = top.masked_fill(top == float("-inf"), 0.0)  # all logits are -inf
    gain = gain[..., None] if isinstance(gain, Tensor) else gain
    return shifted(squashed(x, rows), top[..., None], gain) - stats.log_sum[..., None]


def _is_largest(logits: Tensor, rows: RowArguments, row_max: Tensor) -> Tensor:
    """Return which columns have the largest value under the softcap."""
    values = (squashed(x, rows) for x in (logits, row_max[..., None].to(logits.dtype)))
    return torch.eq(*(x.to(row_max.dtype) for x in values))

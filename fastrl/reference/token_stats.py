"""Statistics of given tokens from logits: log-probability, entropy and others; their gradient.

With z = softcap(logit_scale * logits) / temperature, p = softmax(z) and t = z - max z:

    log p_y = t_y - log sum exp t               d log p_y/dz_j = [j = y] - p_j
    H = log sum exp t - sum p t                 dH/dz_j = -p_j (log p_j + H)
    log sum exp z = max z + log sum exp t       d log sum exp z/dz_j = p_j

The maximum is subtracted before anything is rounded, so a common offset of the logits costs no
precision. A logit of -inf excludes its token: it remains -inf under a softcap and gets no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.contract import RowArguments, RowStats, SoftmaxStats
from fastrl.reference.row_blocks import (
    EVERYTHING,
    Index,
    Memory,
    arithmetic_dtype,
    blocks,
    readable,
    unless_all,
    without_inactive,
)

Slopes = Sequence[Tensor | None]

#: Replaces t = -inf in p t, because 0 times infinity is NaN. Its exp is 0, also in float64.
_LOWEST = -800.0


class RowSums(NamedTuple):
    """The results of a pass over rows of logits, `[B, T]`."""

    row_max: Tensor  # the largest logit
    top_prob: Tensor  # the largest p, which is 1 / sum exp t
    others: Tensor  # sum exp t without the largest one, where its p is above 1/2
    mean: Tensor  # sum p t
    sum_sq_probs: Tensor  # sum p^2

    def log_sum_exp(self) -> Tensor:
        """Return log sum exp t, which keeps its digits if one token has nearly all probability."""
        return torch.where(self.top_prob > 0.5, self.others.log1p(), -self.top_prob.log())


def token_stats(
    logits: Tensor,
    rows: RowArguments,
    active: Tensor,
    *,
    with_entropy: bool = True,
    with_sum_sq_probs: bool = True,
    probs: Tensor | None = None,
) -> RowStats:
    """Return the statistics of rows `[B, T, V]`; entropy and sum of squares are 0 if not wanted.

    Inactive rows have no effect, and all their outputs are 0. In an active row with an id outside
    the vocabulary the log-probability is NaN. `probs`, in the dtype of the arithmetic, receives p.
    """
    some = unless_all(active)
    sums = row_sums(
        logits,
        rows,
        some,
        with_entropy=with_entropy,
        with_sum_sq_probs=with_sum_sq_probs,
        probs=probs,
    )
    token, unknown = token_logits(logits, rows)
    z, top = squashed(token, rows), squashed(sums.row_max, rows)
    gain, log_sum = gain_of(rows, some), sums.log_sum_exp()
    stats = RowStats(
        logprobs=((z - top) * gain - log_sum).masked_fill(unknown, float("nan")),
        entropy=log_sum - sums.mean if with_entropy else sums.mean,
        logsumexp=torch.where(top == float("-inf"), top, top * gain + log_sum),
        sum_sq_probs=sums.sum_sq_probs,
        is_top1=z >= top,
        row_max=sums.row_max,
        log_sum=log_sum,
    )
    if some is None:
        return stats
    return RowStats._make(stat.masked_fill(~some, 0) for stat in stats)


def row_sums(
    logits: Tensor,
    rows: RowArguments,
    active: Tensor | None,
    *,
    with_entropy: bool,
    with_sum_sq_probs: bool,
    probs: Tensor | None = None,
) -> RowSums:
    """Pass over rows `[B, T, V]`. Sums that are not wanted are 0; of inactive rows they are any."""
    gain = gain_of(rows, active)
    result = torch.zeros(
        len(RowSums._fields),
        *logits.shape[:-1],
        dtype=arithmetic_dtype(logits),
        device=logits.device,
    )
    for index, x, (target, other) in blocks(logits, active):
        if x is not None:
            of_block = gain[index][..., None] if isinstance(gain, Tensor) else gain
            memory = target if probs is None else probs[index], other
            sums = _sums(x, rows, of_block, memory, with_entropy, with_sum_sq_probs)
            if index is EVERYTHING:
                return sums
            result[:, index[0], index[1]] = torch.stack(sums)
    return RowSums._make(field.clone() for field in result)  # each may be changed in place


def _sums(
    logits: Tensor,
    rows: RowArguments,
    gain: float | Tensor,
    memory: Memory,
    with_entropy: bool,
    with_sum_sq_probs: bool,
) -> RowSums:
    u = squashed(logits, rows)
    target, other = memory
    if _is_one(gain):  # softmax subtracts the maximum itself
        p = torch.softmax(u, -1, out=target)
        top = u.amax(-1, keepdim=True)
        t = shifted(u, top, gain, other) if with_entropy else u
    else:
        top = u.amax(-1, keepdim=True)
        t = shifted(u, top, gain, other)
        p = torch.softmax(t, -1, out=target)
    row_max = logits.amax(-1) if rows.logit_softcap else top[..., 0]
    top_prob = p.amax(-1, keepdim=True)
    mean = sum_sq_probs = torch.zeros_like(row_max)
    if with_sum_sq_probs:
        sum_sq_probs = p.square().sum(-1)
    if with_entropy:
        product = torch.mul(p, t, out=other)
        mean = product.sum(-1)
        if not readable(mean) or bool(mean.isnan().any()):
            mean = product.nansum(-1)  # 0 log 0 = 0; in a row with NaN log sum exp t is NaN
    others = _others(p, top_prob, other)
    return RowSums(row_max, top_prob[..., 0], others, mean, sum_sq_probs)


def _others(p: Tensor, top_prob: Tensor, memory: Tensor | None) -> Tensor:
    if not readable(p):  # the fast division of a GPU could make x / x less than 1
        return torch.where(p > 0.5, 0.0, p).sum(-1) / top_prob[..., 0]
    peaked = (top_prob.flatten() > 0.5).nonzero()[:, 0]
    if 2 * len(peaked) >= top_prob.numel():
        return torch.div(p, top_prob, out=memory).frac_().sum(-1)  # the largest one alone is 1
    others = torch.zeros_like(top_prob).flatten()
    if len(peaked):  # of few rows a copy is shorter than a pass
        rows, tops = (x.flatten(0, 1).index_select(0, peaked) for x in (p, top_prob))
        others[peaked] = rows.div_(tops).frac_().sum(-1)
    return others.view(p.shape[:-1])


def token_gradient(
    logits: Tensor,
    rows: RowArguments,
    active: Tensor,
    stats: SoftmaxStats,
    slopes: Slopes,
    *,
    is_part: bool = False,
    overwrite: bool = False,
    probs: Tensor | None = None,
) -> Tensor:
    """Return dL/dlogits from dL/dlogprobs, dL/dentropy and dL/dlogsumexp, `[B, T]`; None is 0.

    `is_part` says that the statistics belong to longer rows, of which the logits are some columns:
    for a token among the other columns dL/dlogprobs is 0. `overwrite` writes the gradient over the
    logits. `probs` are those from `token_stats`, which are overwritten.
    """
    some = unless_all(active & (stats.row_max != float("-inf")))  # without rows of -inf alone
    row_max, log_sum, entropy = stats.row_max, stats.log_sum, stats.entropy
    if some is not None:
        row_max, log_sum, entropy = (x.masked_fill(~some, 0) for x in (row_max, log_sum, entropy))
        slopes = [None if x is None else x.masked_fill(~some, 0) for x in slopes]
    of_logprob, of_entropy, of_logsumexp = slopes
    token, unknown = token_logits(logits, rows)
    top, gain = squashed(row_max, rows), gain_of(rows, some)
    t = (squashed(token, rows) - top) * gain
    logprob = t - log_sum
    of_p = at_token = torch.zeros_like(top)
    if of_logprob is not None:
        of_p = -of_logprob.masked_fill(unknown, 0)
        at_token = of_p * logprob.expm1()  # 1 - p keeps its digits where p is near 1
    if of_logsumexp is not None:
        of_p = of_p + of_logsumexp
        at_token = at_token + of_logsumexp * logprob.exp()
    if of_entropy is not None:
        of_p = of_p - of_entropy * (entropy - log_sum)
        centered = t.clamp(min=_LOWEST) + (entropy - log_sum)
        at_token = at_token - of_entropy * logprob.exp() * centered
    constant = token == float("-inf")
    factor = raw_gain_of(rows, some)
    row = _RowSlopes(
        column=_columns(logits, rows),
        at_token=factor * at_token.masked_fill(constant if some is None else constant | ~some, 0),
        of_p=of_p * factor,
        of_p_t=None if of_entropy is None else -of_entropy * factor,
        gain=gain,
        top=top,
        log_sum=log_sum if is_part else None,
    )
    if probs is not None and probs.dtype == logits.dtype:
        gradient = probs
    else:
        gradient = logits if overwrite else torch.empty_like(logits)
    for index, x, (target, other) in blocks(logits, some):
        place = gradient[index]
        if x is None:
            place.zero_()
            continue
        if target is not None and place.dtype == x.dtype and not overwrite:
            target = place
        p = None
        if probs is not None:
            p = probs[index] if some is None else without_inactive(probs[index], some[index])
        found = _gradient(x, rows, row.at(index), (target, other), p)
        if index is EVERYTHING and not overwrite:
            return found.to(logits.dtype)
        if found is not place:
            place.copy_(found)
    return gradient


class _RowSlopes(NamedTuple):
    """What the gradients of rows are made from, `[B, T]` or, from `at`, `[b, t, 1]`.

    dL/dlogit is of_p p + of_p_t p t, apart from the token's and the derivative of a softcap.
    """

    column: Tensor  # of the token
    at_token: Tensor  # dL/dlogit of the token
    of_p: Tensor
    of_p_t: Tensor | None
    gain: float | Tensor
    top: Tensor
    log_sum: Tensor | None  # of the longer rows

    def at(self, index: Index) -> _RowSlopes:
        """Return the values of a block."""
        return _RowSlopes._make(x[index][..., None] if isinstance(x, Tensor) else x for x in self)


def _gradient(
    logits: Tensor, rows: RowArguments, row: _RowSlopes, memory: Memory, p: Tensor | None
) -> Tensor:
    t = u = squashed(logits, rows)
    target, other = memory
    if row.of_p_t is not None or (p is None and not (row.log_sum is None and _is_one(row.gain))):
        t = shifted(u, row.top, row.gain, other)
    if p is None and row.log_sum is None:
        p = torch.softmax(t, -1, out=target)
    elif row.log_sum is not None:
        p = torch.sub(t, row.log_sum, out=target).exp_()
    assert p is not None
    weight = row.of_p
    if row.of_p_t is not None:
        t = torch.clamp(t, min=_LOWEST, out=other)
        weight = torch.add(torch.mul(t, row.of_p_t, out=other), weight, out=other)
    gradient = torch.mul(p, weight, out=target)
    gradient = torch.scatter(gradient, -1, row.column, row.at_token, out=target)
    return gradient.mul_(squash_slope(logits, rows)) if rows.logit_softcap else gradient


def shifted(
    squashed_logits: Tensor, top: Tensor, gain: float | Tensor, out: Tensor | None = None
) -> Tensor:
    """Return t; `top` is the largest logit under the softcap, or 0 if all are -inf."""
    t = torch.sub(squashed_logits, top, out=out)
    return t if _is_one(gain) else t.mul_(gain)


def squashed(logits: Tensor, rows: RowArguments) -> Tensor:
    """Return the logits under the softcap, if there is one; -inf remains -inf."""
    if not rows.logit_softcap:
        return logits
    capped = rows.logit_softcap * (logits * (rows.logit_scale / rows.logit_softcap)).tanh()
    return torch.where(logits == float("-inf"), logits, capped)


def squash_slope(logits: Tensor, rows: RowArguments) -> Tensor:
    """Return 1 - tanh^2 under the softcap, with its digits where it is small."""
    decay = (-2 * (logits * (rows.logit_scale / rows.logit_softcap)).abs()).exp()
    return 4 * decay / (1 + decay).square()


def gain_of(rows: RowArguments, active: Tensor | None) -> float | Tensor:
    """Return dz/du for `squashed` logits u, for all rows or `[B, T]`."""
    scale = 1.0 if rows.logit_softcap else rows.logit_scale
    if rows.temperatures is None:
        return scale / rows.temperature
    temperatures = rows.temperatures
    return scale / (temperatures if active is None else temperatures.masked_fill(~active, 1.0))


def raw_gain_of(rows: RowArguments, active: Tensor | None) -> float | Tensor:
    """Return dz/dlogits, apart from the `squash_slope` of a softcap."""
    gain = gain_of(rows, active)
    return gain * rows.logit_scale if rows.logit_softcap else gain


def token_logits(logits: Tensor, rows: RowArguments) -> tuple[Tensor, Tensor]:
    """Return the logits of the tokens, and which ids are outside the vocabulary, `[B, T]`."""
    column = _columns(logits, rows)
    token = logits.gather(-1, column[..., None])[..., 0]
    return token.to(arithmetic_dtype(logits)), column != rows.token_ids


def _columns(logits: Tensor, rows: RowArguments) -> Tensor:
    return rows.token_ids.clamp(0, logits.shape[-1] - 1)


def _is_one(gain: float | Tensor) -> bool:
    return not isinstance(gain, Tensor) and gain == 1

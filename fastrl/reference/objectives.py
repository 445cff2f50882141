"""The scalar formulas of every surrogate and KL estimator, elementwise, for autograd.

`log_ratio = log pi(token) - log pi_old(token)`, `ratio = exp(log_ratio)`, A is the advantage. Each
surrogate takes `(logprobs, log_ratio, advantages, c)` with c the `Coefficients` and returns
`(loss, clip)`: clip is -1 where a lower bound is active, +1 where an upper bound is active, else 0.
`csrc/objectives.h` has the same functions with explicit derivatives; the tests compare the two
point by point.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from fastrl.contract import Coefficients

#: Log-ratios are clamped to +-80: exp(80) = 5.5e34 fits into float32.
MAX_LOG_RATIO = 80.0


def clamp(x: Tensor, low: float | Tensor, high: float | Tensor) -> Tensor:
    """Clamp x to `[low, high]`, propagating NaN; the derivative is 1 inside and at the bounds.

    (The derivative of `torch.clamp` at a bound is 1 up to torch 2.13, then 0.)
    """
    return torch.where(x < low, low, torch.where(x > high, high, x))


def difference(logprobs: Tensor, others: Tensor) -> Tensor:
    """Return `logprobs - others`, and 0 for equal infinities: a token that both policies exclude.

    An infinite log-probability is a constant and gets no gradient.
    """
    same = (logprobs == others) & others.isinf()
    minuend, subtrahend = (
        torch.where(same, 0.0, torch.where(x.isinf(), x.detach(), x)) for x in (logprobs, others)
    )
    return minuend - subtrahend


def saturate(
    log_ratio: Tensor, low: float = inf, high: float = inf, limit: float = MAX_LOG_RATIO
) -> Tensor:
    """Clamp a log-ratio to `[-low, high]` and to `[-limit, limit]`."""
    return clamp(log_ratio, -min(low, limit), min(high, limit))


def weighted_logprob(weights: Tensor, logprobs: Tensor) -> Tensor:
    """Return `weights * logprobs`, and 0 for weight 0 even if the log-probability is infinite."""
    constant = logprobs.isinf()
    product = weights * torch.where(constant, logprobs.detach(), logprobs)
    return torch.where(constant & (weights == 0), 0.0, product)


def ppo_clip(
    logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, c: Coefficients
) -> tuple[Tensor, Tensor]:
    """Return `-min(min(r, delta) A, clip(r, 1-clip_low, 1+clip_high) A)`, with the dual clip."""
    ratio = log_ratio.exp()
    free = clamp(ratio, -inf, c.delta) * advantages
    bounded = clamp(ratio, 1 - c.clip_low, 1 + c.clip_high) * advantages
    loss = -torch.where(bounded < free, bounded, free)
    above = (bounded < free) & (advantages > 0) | (ratio > c.delta) & (free <= bounded)
    above &= advantages != 0
    below = (bounded < free) & (advantages < 0)
    if c.dual_clip != inf:
        capped = (advantages < 0) & (loss > -c.dual_clip * advantages)
        loss = torch.where(capped, -c.dual_clip * advantages, loss)
        above, below = above | capped, below & ~capped
    return loss, above.to(torch.int8) - below.to(torch.int8)


def cispo(
    logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, c: Coefficients
) -> tuple[Tensor, Tensor]:
    """Return `-sg[clip(r, 1-clip_low, 1+clip_high)] A logprob`: every token keeps a gradient."""
    low, high = 1 - c.clip_low, 1 + c.clip_high
    ratio = log_ratio.exp().detach()
    above = (ratio > high) & (advantages != 0)
    below = (ratio < low) & (advantages != 0)
    loss = weighted_logprob(-clamp(ratio, low, high) * advantages, logprobs)
    return loss, above.to(torch.int8) - below.to(torch.int8)


def sapo(
    logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, c: Coefficients
) -> tuple[Tensor, Tensor]:
    """Return `-4/tau sigmoid(tau (r - 1)) A`: a smooth gate instead of a clip."""
    tau = torch.full_like(log_ratio, c.sapo_temperature_neg)
    tau = tau.masked_fill(advantages > 0, c.sapo_temperature_pos)
    # autograd takes g (1 - g) for the slope of a sigmoid g, and 1 + expm1 for that of expm1
    ratio = log_ratio.exp()
    distance = torch.expm1(log_ratio).detach() + (ratio - ratio.detach())
    gate = logsigmoid(tau * distance).exp() * (4 / tau)
    return -gate * advantages, torch.zeros_like(advantages, dtype=torch.int8)


def gmpo_log_ratio(log_ratio: Tensor, advantages: Tensor, c: Coefficients) -> tuple[Tensor, Tensor]:
    """Return clipped log-ratios, whose mean over the sequence GMPO exponentiates, and clip."""
    low, high = -c.clip_low, c.clip_high
    rises = advantages >= 0
    above = rises & (log_ratio > high) & (advantages != 0)
    below = ~rises & (log_ratio < low)
    clipped = torch.where(rises, clamp(log_ratio, -inf, high), clamp(log_ratio, low, inf))
    return clipped, above.to(torch.int8) - below.to(torch.int8)


def gmpo(mean_log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """Return `-A exp(mean of the clipped log-ratios)`."""
    return -advantages * mean_log_ratio.exp()


def reinforce(
    logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, c: Coefficients
) -> tuple[Tensor, Tensor]:
    """Return `-A logprob`."""
    loss = weighted_logprob(-advantages, logprobs)
    return loss, torch.zeros_like(advantages, dtype=torch.int8)


#: The surrogates of single tokens; `gmpo` takes the mean over a sequence first.
SURROGATES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "ppo_clip": ppo_clip,
    "cispo": cispo,
    "sapo": sapo,
    "reinforce": reinforce,
}


def k3(x: Tensor) -> Tensor:
    """Return `e^x - 1 - x` with the derivative `expm1(x)`; autograd has `(expm1(x) + 1) - 1`."""
    at, slope = x.detach(), torch.expm1(x.detach())
    rest = x - at  # 0: k3(at + rest) = k3(at) + expm1(at) rest + e^at k3(rest)
    return slope - at + slope * (x - at) + (slope + 1) * (torch.expm1(rest) - rest)


def kl_estimate(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    estimator: str,
    bound: float = inf,
    limit: float = MAX_LOG_RATIO,
) -> Tensor:
    """Estimate KL(pi || ref) from one sampled token by k1, k2, k3 or abs, clamped to +-bound."""
    ref_minus_logprob = saturate(difference(ref_logprobs, logprobs), limit=limit)
    if estimator == "k1":
        kl = -ref_minus_logprob
    elif estimator == "k2":
        kl = 0.5 * ref_minus_logprob.square()
    elif estimator == "k3":
        kl = k3(ref_minus_logprob)
    else:
        kl = ref_minus_logprob.abs()
    return kl if bound == inf else clamp(kl, -bound, bound)


def kl_term(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    log_ratio: Tensor,
    estimator: str,
    gradient: str,
    bound: float = inf,
    log_ratio_bounds: tuple[float, float] = (inf, inf),
    unshared: Tensor | bool = True,
) -> Tensor:
    """Return the KL term of the loss per token; 0 if its log-probability, a constant, is infinite.

    `exact` is the estimate with its true gradient. `straight-through` has the value of the estimate
    and the gradient of k2, which is an unbiased estimate of the gradient of the KL.
    `bias-corrected` is the estimate times the ratio, which makes value and gradient of k3 unbiased
    off policy. `bound` clamps the estimate, and `log_ratio_bounds` (low, high) clamps the log-ratio
    to `[-low, high]`; `unshared` marks tokens whose log-ratio depends on no other token.
    """
    ref_logprobs = torch.where(logprobs.isinf() & ~ref_logprobs.isnan(), logprobs, ref_logprobs)
    if gradient == "bias-corrected":
        # a product of two exponentials fits into a float if each exponent is clamped to half the
        # range
        half = MAX_LOG_RATIO / 2
        clamped = saturate(log_ratio, *log_ratio_bounds, limit=half)
        kl = kl_estimate(logprobs, ref_logprobs, estimator, limit=half)
        x = difference(ref_logprobs, logprobs).detach()
        # where one factor is constant, the slope of the other may have the wrong sign, or any size
        held = (kl.abs() > bound) | (clamped != log_ratio)
        term = clamped.exp() * clamp(kl, -bound, bound)
        term = torch.where(held | (x.abs() > half), term.detach(), term)
        if estimator == "k3":
            # d(r k3) = r k3 - r (k3 + x) = -r x, where autograd would subtract terms of size e^x
            closed_form = unshared & ~held & (x.abs() <= MAX_LOG_RATIO)
            slope = torch.where(closed_form, -clamped.exp() * x, 0.0)  # 0 * inf would be NaN
            term = torch.where(closed_form, _with_slope(term, logprobs, slope), term)
        return term
    if gradient == "straight-through":
        k2 = kl_estimate(logprobs, ref_logprobs, "k2")
        value = kl_estimate(logprobs, ref_logprobs, estimator, bound).detach()
        return value + (k2 - k2.detach())
    return kl_estimate(logprobs, ref_logprobs, estimator, bound)


def _with_slope(value: Tensor, x: Tensor, slope: Tensor) -> Tensor:
    """Return `value` with the derivative `slope` by x, or 0 where x is not finite."""
    return value.detach() + slope.detach() * torch.where(x.isfinite(), x - x.detach(), 0.0)

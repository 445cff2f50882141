"""The scalar mathematics of every surrogate and KL estimator, elementwise; autograd is the slope.

`log_ratio = log pi(token) - log pi_old(token)`, `ratio = exp(log_ratio)`, A the advantage. Each
surrogate takes `(logprobs, log_ratio, advantages, c)`, c the `Coefficients`, and returns
`(loss, clip)`: clip is -1 where a lower bound acts, +1 where an upper bound acts, else 0.
`csrc/objectives.h` has the same functions with their derivatives written out; the tests compare
the two point by point.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import torch
from torch import Tensor

from fastrl.contract import Coefficients

#: exp(80) = 5.5e34 still fits float32; log-ratios saturate here with slope 0.
MAX_LOG_RATIO = 80.0


def hold(x: Tensor, low: float | Tensor, high: float | Tensor) -> Tensor:
    """Hold x within `[low, high]`: slope 1 there, the bounds included, and 0 beyond; NaN stays.

    (The slope of `torch.clamp` at a bound is 1 up to torch 2.13, and 0 from then on.)
    """
    return torch.where(x < low, low, torch.where(x > high, high, x))


def difference(logprobs: Tensor, others: Tensor) -> Tensor:
    """`logprobs - others`; 0 where both are the same infinity: a token that both exclude.

    An infinite log-probability is a constant: nothing flows into it.
    """
    same = (logprobs == others) & others.isinf()
    minuend, subtrahend = (
        torch.where(same, 0.0, torch.where(x.isinf(), x.detach(), x)) for x in (logprobs, others)
    )
    return minuend - subtrahend


def saturate(
    log_ratio: Tensor, low: float = inf, high: float = inf, limit: float = MAX_LOG_RATIO
) -> Tensor:
    """Hold a log-ratio within `[-low, high]`, each at most `limit`; beyond, the slope is 0."""
    return hold(log_ratio, -min(low, limit), min(high, limit))


def weighted_logprob(weights: Tensor, logprobs: Tensor) -> Tensor:
    """`weights * logprobs`; 0 where the weight is, also next to an infinite log-probability."""
    constant = logprobs.isinf()
    product = weights * torch.where(constant, logprobs.detach(), logprobs)
    return torch.where(constant & (weights == 0), 0.0, product)


def ppo_clip(
    logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, c: Coefficients
) -> tuple[Tensor, Tensor]:
    """`-min(min(r, delta) A, clip(r, 1-clip_low, 1+clip_high) A)`; A < 0: at most -dual_clip A."""
    ratio = log_ratio.exp()
    free = hold(ratio, -inf, c.delta) * advantages
    bounded = hold(ratio, 1 - c.clip_low, 1 + c.clip_high) * advantages
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
    """`-sg[clip(r, 1-clip_low, 1+clip_high)] A logprob`: every token keeps a gradient."""
    low, high = 1 - c.clip_low, 1 + c.clip_high
    ratio = log_ratio.exp().detach()
    above = (ratio > high) & (advantages != 0)
    below = (ratio < low) & (advantages != 0)
    loss = weighted_logprob(-hold(ratio, low, high) * advantages, logprobs)
    return loss, above.to(torch.int8) - below.to(torch.int8)


def sapo(
    logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, c: Coefficients
) -> tuple[Tensor, Tensor]:
    """`-4/tau sigmoid(tau (r - 1)) A`: a soft gate instead of a clip."""
    tau = torch.full_like(log_ratio, c.sapo_temperature_neg)
    tau = tau.masked_fill(advantages > 0, c.sapo_temperature_pos)
    gate = torch.sigmoid(tau * torch.expm1(log_ratio)) * (4 / tau)
    return -gate * advantages, torch.zeros_like(advantages, dtype=torch.int8)


def gmpo_log_ratio(log_ratio: Tensor, advantages: Tensor, c: Coefficients) -> tuple[Tensor, Tensor]:
    """The clipped token log-ratio whose sequence mean GMPO exponentiates, and the clip flag."""
    low, high = -c.clip_low, c.clip_high
    rises = advantages >= 0
    above = rises & (log_ratio > high) & (advantages != 0)
    below = ~rises & (log_ratio < low)
    clipped = torch.where(rises, hold(log_ratio, -inf, high), hold(log_ratio, low, inf))
    return clipped, above.to(torch.int8) - below.to(torch.int8)


def gmpo(mean_log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """`-A exp(mean of the clipped log-ratios)`."""
    return -advantages * mean_log_ratio.exp()


def reinforce(
    logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, c: Coefficients
) -> tuple[Tensor, Tensor]:
    """`-A logprob`."""
    loss = weighted_logprob(-advantages, logprobs)
    return loss, torch.zeros_like(advantages, dtype=torch.int8)


#: The surrogates of one token; `gmpo` is one of the sequence.
SURROGATES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "ppo_clip": ppo_clip,
    "cispo": cispo,
    "sapo": sapo,
    "reinforce": reinforce,
}


def kl_estimate(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    estimator: str,
    clamp: float = inf,
    limit: float = MAX_LOG_RATIO,
) -> Tensor:
    """Estimate KL(pi || ref) from one sampled token: k1, k2, k3 or abs, then held within clamp."""
    ref_minus_logprob = saturate(difference(ref_logprobs, logprobs), limit=limit)
    if estimator == "k1":
        kl = -ref_minus_logprob
    elif estimator == "k2":
        kl = 0.5 * ref_minus_logprob.square()
    elif estimator == "k3":
        kl = torch.expm1(ref_minus_logprob) - ref_minus_logprob
    else:
        kl = ref_minus_logprob.abs()
    return kl if clamp == inf else hold(kl, -clamp, clamp)


def kl_term(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    log_ratio: Tensor,
    estimator: str,
    gradient: str,
    clamp: float = inf,
    bounds: tuple[float, float] = (inf, inf),
    own: Tensor | bool = True,
) -> Tensor:
    """The KL as it enters the loss.

    `exact` is the estimate with its own gradient; `straight-through` its value with the gradient
    of k2, whose expectation is that of the KL; `bias-corrected` is the estimate times the ratio,
    which makes value and gradient of k3 unbiased off policy. `bounds` are those of `log_ratio`,
    below and above; `own` says where it moves with the token's log-probability and no other's.
    """
    if gradient == "bias-corrected":
        # a product of two exponentials fits a float where each factor is held at half the range
        half = MAX_LOG_RATIO / 2
        held = saturate(log_ratio, *bounds, limit=half)
        term = held.exp() * kl_estimate(logprobs, ref_logprobs, estimator, clamp, half)
        if estimator == "k3":
            # with x = ref - logprob: d(r k3) = r k3 - r (k3 + x) = -r x, where autograd would
            # leave what remains of two parts as large as e^x
            x = difference(ref_logprobs, logprobs).detach()
            inside = (x.abs() <= half) & (torch.expm1(x) - x <= clamp)
            free = inside & (held == log_ratio) & own
            slope = torch.where(free, -held.exp() * x, 0.0)  # 0 times an infinite x is NaN
            term = torch.where(free, _with_slope(term, logprobs, slope), term)
        return term
    if gradient == "straight-through":
        k2 = kl_estimate(logprobs, ref_logprobs, "k2")
        value = kl_estimate(logprobs, ref_logprobs, estimator, clamp).detach()
        return value + (k2 - k2.detach())
    return kl_estimate(logprobs, ref_logprobs, estimator, clamp)


def _with_slope(value: Tensor, x: Tensor, slope: Tensor) -> Tensor:
    """`value` with the slope that is written out, where x is finite."""
    return value.detach() + slope.detach() * torch.where(x.isfinite(), x - x.detach(), 0.0)

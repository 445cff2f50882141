"""Score centering: the sampler's expected score, from its most likely tokens (arXiv 2609.20807).

With the sampler's distribution q, the policy's p, the sampler's most likely tokens H and the weight
w(p / q) of a sampled token, the score that is expected of the sampler is sum_v q w grad log p. The
probabilities of the tail are unknown; they are modelled as rho p, which has the mass of q there:

    rho = (1 - sum_H q) / max(1 - sum_H p, 1e-6)

As sum_v p grad log p = 0, the expected score is the gradient of

    C = sum_H sg[m - alpha p] log p,   m = q w(p / q),   alpha = rho w(1 / rho)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.contract import CenteringStats
from fastrl.objective.rollout_correction import RolloutCorrection
from fastrl.reference.objectives import clamp, weighted_logprob
from fastrl.reference.rollout_correction import outside_bounds, token_estimate

#: The least mass of the policy's tail.
_LEAST_TAIL = 1e-6


class ExpectedScore(NamedTuple):
    """The parts of an expected score: the mass m of each token of H, and the factor of the tail."""

    logprobs: Tensor  # log p [..., K]; -inf: the policy excludes the token, or there is none
    mass: Tensor  # m [..., K], 0 where the policy excludes the token
    alpha: Tensor  # [..., 1]
    stats: CenteringStats

    def coefficients(self) -> Tensor:
        """Return dC/dlog p, m - alpha p, `[..., K]`."""
        return self.mass - self.alpha * self.logprobs.exp()

    def sum(self) -> Tensor:
        """Return the sum of the coefficients, `[..., 1]`: minus dC/dlogsumexp."""
        p = self.logprobs.exp().sum(-1, keepdim=True)
        return self.mass.sum(-1, keepdim=True) - self.alpha * p

    def slopes(self) -> Tensor:
        """Return dC/dz, `[..., K]`, with alpha multiplied by the tail alone.

        alpha can be large, and m - alpha p - (sum m - alpha sum p) p would lose all digits.
        """
        p = self.logprobs.exp()
        tail = 1 - p.sum(-1, keepdim=True)
        return self.mass - (self.mass.sum(-1, keepdim=True) + self.alpha * tail) * p


def expected_score(
    logprobs: Tensor, sampler_logprobs: Tensor, corrections: Sequence[RolloutCorrection]
) -> ExpectedScore:
    """Return the score that is expected of a sampler.

    Both log-probabilities are of the sampler's tokens, `[..., K]`; -inf stands for no token. The
    corrections are those of tokens, whose weights are functions of p / q.
    """
    p, q = logprobs.exp(), sampler_logprobs.exp()
    head = q.sum(-1, keepdim=True)
    tail_q = (1 - head).clamp(min=0)
    tail_p = (1 - p.sum(-1, keepdim=True)).clamp(min=_LEAST_TAIL)
    rho = tail_q / tail_p
    mass = weighted_mass(logprobs, sampler_logprobs, corrections)
    alpha = weighted_mass(torch.zeros_like(rho), rho.log(), corrections)
    # an infinite log-probability is a constant
    mass = torch.where(logprobs == -torch.inf, 0.0, mass)
    coefficients = mass - alpha * p
    term = weighted_logprob(coefficients, logprobs).sum(-1)
    log_ratio = torch.where(q == 0, 0.0, sampler_logprobs - logprobs)
    of_tail = torch.where(tail_q == 0, 0.0, tail_q * rho.log())
    head_kl = (q * log_ratio).sum(-1) + of_tail[..., 0]
    return ExpectedScore(logprobs, mass, alpha, CenteringStats(term, head[..., 0], head_kl))


def weighted_mass(
    logprobs: Tensor, sampler_logprobs: Tensor, corrections: Sequence[RolloutCorrection]
) -> Tensor:
    """Return q w(p / q), which is p itself, and not a rounded product, where the weight is p / q.

    One correction at most is not a filter.
    """
    p, q = logprobs.exp(), sampler_logprobs.exp()
    result = q
    for correction in corrections:
        low, high = correction.low, correction.high
        if correction.kind == "truncate":
            result = clamp(p, low * q, high if high == torch.inf else high * q)
        elif correction.kind == "mask":
            result = p
    for correction in corrections:
        if correction.kind != "truncate":
            estimate = token_estimate(logprobs, sampler_logprobs, correction)
            outside, _ = outside_bounds(estimate, correction)
            result = torch.where(outside, 0.0, result)
    return torch.where(q.isnan(), q, result)  # comparisons with NaN are false

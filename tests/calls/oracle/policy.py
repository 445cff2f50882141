"""The policy loss of the valid tokens: loss, gradients and metrics, from the docstrings.

L = sum_t w_t is_t [c_t f_t + beta k_t] - entropy_coef sum_t w_t H_t. The derivatives are explicit
formulas, without automatic differentiation.
"""

import dataclasses
from collections.abc import Callable
from math import inf
from typing import Any

import numpy as np

from . import terms
from .bounded import Bounded, Decision, Doubts, choose, unbounded, where
from .centering import Centering
from .functions import exp, expm1, held, mean
from .masks import (
    gamma_weights,
    off_policy,
    outside_trust_region,
    rollout_weights,
    top_entropy,
)
from .terms import Ratio, Term, difference, geometric_ratio, zeros
from .tokens import Tokens, Weights, means


@dataclasses.dataclass
class Loss:
    """Expected results of a call; the slopes are dL/dlogprob and dL/dH of each token."""

    loss: Bounded
    slope: Bounded
    entropy_slope: Bounded
    metrics: dict[str, Bounded]
    #: the factor of the sampler's expected score, which adds its own gradient
    score_factor: Bounded
    #: on which tokens a bound acts
    clip_low: Decision
    clip_high: Decision
    score: Centering | None = None


#: The term of a user-defined objective.
Function = Callable[[Tokens, Bounded], Term]


def fields_of(objective: object) -> dict[str, Any]:
    """Return the fields of an `Objective`, with `rollout_correction` as a list."""
    fields = dataclasses.asdict(objective)
    fields["clip_high"] = inf if fields["clip_high"] is None else fields["clip_high"]
    corrections = fields["rollout_correction"]
    fields["rollout_correction"] = [corrections] if isinstance(corrections, dict) else corrections
    return fields


def log_ratio(tokens: Tokens, fields: dict) -> Ratio:
    """Return the log ratio by level, clamped to +-80 and `log_ratio_clamp`."""
    logprobs = tokens.logprobs
    if tokens.old is None:
        x = where(np.isnan(logprobs.value), logprobs, zeros(logprobs))
    else:
        x = difference(logprobs, tokens.old)
    clamp = fields["log_ratio_clamp"]
    low, high = clamp if isinstance(clamp, tuple) else (-(clamp or inf), clamp or inf)
    low, high = max(low, -terms.SATURATION), min(high, terms.SATURATION)
    own, stuck = held(x, low, high)
    if fields["level"] == "token" or fields["surrogate"] == "gmpo":
        return Ratio(own, own, stuck, shared=False)
    of_sequence, stuck = held(means(x, tokens.sequence, tokens.count), low, high)
    index, shared = tokens.sequence, fields["level"] == "sequence"
    return Ratio(own, of_sequence[index], stuck[index], shared)


def policy_loss(
    tokens: Tokens,
    fields: dict,
    weights: Weights,
    doubts: Doubts,
    function: Function | None = None,
    score: Centering | None = None,
) -> Loss:
    """Return the expected results."""
    importance = rollout_weights(tokens, fields, doubts)
    of_policy, gamma = importance, None
    if fields["gamma_weights"] is not None:
        of_policy = rollout_weights(tokens, fields, doubts, ("filter",))
        factors = rollout_weights(tokens, fields, doubts, ("truncate", "mask"))
        gamma = gamma_weights(tokens, fields, factors)
    off, top = off_policy(tokens, fields, doubts), top_entropy(tokens, fields, doubts)
    drops = [
        dropped
        for dropped in (outside_trust_region(tokens, fields, doubts), off, top)
        if dropped is not None
    ]
    weight = _weight(weights.policy, (of_policy, gamma, tokens.policy_weights), drops)
    ratio, counted = log_ratio(tokens, fields), _finite_advantages(tokens, weight)
    if fields["surrogate"] == "gmpo":
        ratio, term = geometric_ratio(counted, ratio, fields)
    else:
        term = _term(counted, ratio, fields, function)
    dropped = np.isinf(tokens.advantages.value)  # unspecified: whether its clip counts
    low, high = (Decision(one.yes, one.doubtful | dropped) for one in (term.low, term.high))
    term = dataclasses.replace(term, low=low, high=high)
    doubts.add("clip", (term.low | term.high).doubtful)
    doubts.add("log ratio bound", ratio.stuck.doubtful)
    policy = _times(weight, _finite_where_weightless(weight, term.value), doubts)
    through, own = (_times(weight, part, doubts) for part in (term.through, term.own))
    infinite = np.isinf(counted.advantages.value)
    doubts.add("unspecified: an infinite advantage", infinite)
    # the factors may be multiplied in any order, and overflow before one of them makes them small
    factors = np.abs(weight.value * counted.advantages.value) * np.exp(np.maximum(ratio.x.value, 0))
    infinite = infinite | (factors > weight.arithmetic.largest)
    policy, through, own = (unbounded(part, infinite) for part in (policy, through, own))
    slope = _slope(tokens, ratio, through, own)
    if function is None:
        slope = _constant_where_infinite(slope, tokens, ratio, policy)
    else:  # whatever automatic differentiation makes of NaN
        slope = unbounded(slope, np.isnan(policy.value))
    slope = unbounded(slope, np.isinf(tokens.logprobs.error))  # one that may have become infinite
    loss = policy.sum()
    score_factor = zeros(weight)
    if score is not None:
        of_sequences = [c for c in fields["rollout_correction"] or () if c["level"] != "token"]
        common = rollout_weights(tokens, fields | {"rollout_correction": of_sequences}, doubts)
        common = _weight(weights.policy, (common, tokens.policy_weights), drops)
        score_factor = _finite_where_weightless(common, common * tokens.advantages)
        part = score_factor * score.term
        idle = (score_factor.value == 0) & (score_factor.error == 0)
        unknown = infinite | np.isinf(tokens.advantages.value)
        of_score = unbounded(where(idle, zeros(part), part), unknown).sum()
        score_factor = unbounded(score_factor, unknown)
        loss = loss + of_score
    kl = None
    if tokens.ref is not None:
        kl = _kl_term(tokens, ratio, fields)
        if fields["kl_coef"]:
            by = weights.kl * fields["kl_coef"]
            if importance is not None and fields["rollout_weighs"] == "policy-and-kl":
                by = by * importance
            part = _times(by, kl.value, doubts)
            through, own = (_times(by, each, doubts) for each in (kl.through, kl.own))
            kl_slope = _slope(tokens, ratio, through, own)
            loss = loss + part.sum()
            slope = slope + _constant_where_infinite(kl_slope, tokens, ratio, part)
            doubts.add("kl bound", (kl.low | kl.high).doubtful)
    entropy_slope = _entropy_slope(weights.entropy_on(top), fields, top)
    if fields["entropy_coef"]:
        bonus = entropy_slope * tokens.entropy
        loss = loss + (bonus if top is None else choose(top, zeros(bonus), bonus)).sum()
    still = _zero(slope) & _zero(entropy_slope) & _zero(score_factor)
    metrics = _metrics(tokens, ratio, term, kl, still) | {"policy_loss": policy.sum()}
    if score is not None:
        metrics["policy_loss"] = policy.sum() + of_score
        found = (score.mass, score.head_kl, _share(_zero(weight), ratio.x))
        names = ("centering_mass", "head_kl", "zero_weight_fraction")
        metrics |= {name: _mean(x) for name, x in zip(names, found, strict=True)}
    clips = term.low, term.high
    return Loss(loss, slope, entropy_slope, metrics, score_factor, *clips, score)


def _weight(weight: Bounded, factors: tuple[Bounded | None, ...], drops: list[Decision]) -> Bounded:
    for factor in factors:
        weight = weight if factor is None else weight * factor
    for dropped in drops:
        weight = choose(dropped, zeros(weight), weight)
    return weight


def _term(tokens: Tokens, ratio: Ratio, fields: dict, function: Function | None) -> Term:
    kind, a, logprobs = fields["surrogate"], tokens.advantages, tokens.logprobs
    if function is not None:
        return function(tokens, ratio.own)
    if kind == "ppo_clip":
        return terms.ppo_clip(ratio.x, a, fields)
    if kind == "cispo":
        return terms.cispo(ratio.x, a, logprobs, fields)
    if kind == "sapo":
        return terms.sapo(ratio.x, a, fields)
    return terms.reinforce(a, logprobs)


def _times(weight: Bounded, x: Bounded, doubts: Doubts) -> Bounded:
    """Return weight times x; 0 times infinity or NaN is unspecified."""
    product = weight * x
    lost = (weight.value == 0) & ~np.isfinite(x.value)
    lost = lost | (x.value == 0) & ~np.isfinite(weight.value)
    doubts.add("unspecified: 0 times infinity or NaN", lost)
    return Bounded(product.value, np.where(lost, np.inf, product.error), product.arithmetic)


def _finite_advantages(tokens: Tokens, weight: Bounded) -> Tokens:
    """A weight of 0 drops an infinite advantage."""
    x = tokens.advantages
    dropped = (weight.value == 0) & (weight.error == 0) & np.isinf(x.value)
    value, error = np.where(dropped, np.sign(x.value), x.value), np.where(dropped, 0, x.error)
    return dataclasses.replace(tokens, advantages=Bounded(value, error, x.arithmetic))


def _finite_where_weightless(weight: Bounded, x: Bounded) -> Bounded:
    """A weight of 0 makes an infinite loss 0."""
    infinite = np.isinf(x.value) & (x.error == 0)
    return where((weight.value == 0) & (weight.error == 0) & infinite, zeros(x), x)


def _slope(tokens: Tokens, ratio: Ratio, through: Bounded, own: Bounded) -> Bounded:
    """dL/dlogprob from the derivatives by log ratio and by log-probability."""
    total = through
    if ratio.shared:
        total = means(through, tokens.sequence, tokens.count)[tokens.sequence]
    lost = np.isnan(through.value)
    # unspecified: what a token that is held at a bound has of another token's NaN
    total = unbounded(total, ratio.shared & np.isnan(total.value) & ~lost)
    if ratio.bounded_each:  # unspecified: what a token at its bound has of a NaN that it shares
        at_bound = lost & (ratio.stuck.yes | ratio.stuck.doubtful)
        total = where(
            lost, Bounded(total.value, np.where(at_bound, np.inf, 0), own.arithmetic), total
        )
    held_still = ratio.stuck & ~lost & np.isfinite(total.error)
    return choose(held_still, zeros(total), total) + own


def _constant_where_infinite(
    slope: Bounded, tokens: Tokens, ratio: Ratio, part: Bounded
) -> Bounded:
    """An infinite log-probability is a constant; a NaN loss reaches the gradient."""
    lost, unsure = np.isnan(part.value), np.isinf(part.error)
    infinite = np.isinf(tokens.logprobs.value) & ~lost
    shared = ratio.shared & np.isnan(slope.value)  # unspecified: what it has of another token's NaN
    slope = where(infinite, unbounded(zeros(slope), shared | unsure), slope)
    slope = unbounded(slope, lost & unsure)
    reaches = lost & np.isfinite(slope.error)
    return where(reaches, Bounded(np.where(lost, np.nan, 0.0), 0.0, slope.arithmetic), slope)


def _kl_term(tokens: Tokens, ratio: Ratio, fields: dict) -> Term:
    d, logprobs = difference(tokens.ref, tokens.logprobs), tokens.logprobs.value
    d = where(np.isinf(logprobs) & ~np.isnan(d.value), zeros(d), d)  # a constant
    if fields["kl_level"] == "token":
        ratio = log_ratio(tokens, {**fields, "level": "token"})
    term = terms.kl_term(d, ratio.x, ratio.stuck, fields)
    if fields["kl_gradient"] != "bias-corrected":
        return term
    slope = terms.bias_corrected_slope(d, ratio.x, ratio.stuck, fields)
    lengths = np.bincount(tokens.sequence, minlength=tokens.count)
    alone = lengths[tokens.sequence] == 1 if ratio.shared else True
    own, through = where(alone, slope, term.own), where(alone, zeros(slope), term.through)
    return dataclasses.replace(term, own=own, through=through)


def _entropy_slope(weight: Bounded, fields: dict, top: Decision | None) -> Bounded:
    if not fields["entropy_coef"]:
        return zeros(weight)
    slope = weight * -fields["entropy_coef"]
    return slope if top is None else choose(top, zeros(slope), slope)


def _metrics(
    tokens: Tokens,
    ratio: Ratio,
    term: Term,
    kl: Term | None,
    still: Decision,
) -> dict[str, Bounded]:
    """Means over the valid tokens; all 0 where there is none."""
    r = exp(ratio.x)
    entropy = -tokens.logprobs if tokens.entropy is None else tokens.entropy
    of_tokens = {
        **({} if kl is None else {"kl": kl.value}),
        "kl_old": expm1(ratio.own) - ratio.own,
        "entropy": entropy,
        "ratio_mean": r,
        "clip_low": _share(term.low, r),
        "clip_high": _share(term.high, r),
        "clip_fraction": _share(term.low | term.high, r),
        "zero_grad_fraction": _share(still, r),
    }
    n = len(r.value)
    metrics = {name: _mean(x) for name, x in of_tokens.items()}
    metrics["active_tokens"] = Bounded(float(n), 0.0, r.arithmetic)
    for name, extreme in (("ratio_max", np.max), ("ratio_min", np.min)):
        value = extreme(r.value) if n else 0.0
        ends = [extreme(r.value + sign * r.error) if n else 0.0 for sign in (-1, 1)]
        metrics[name] = Bounded(value, np.abs(np.subtract(ends, value)).max(), r.arithmetic)
    return metrics


def _mean(x: Bounded) -> Bounded:
    return mean(x) if len(x.value) else x.sum()


def _zero(x: Bounded) -> Decision:
    near = (np.abs(x.value) <= x.error) & (x.error > 0)
    return Decision(x.value == 0, near | np.isinf(x.error))


def _share(decision: Decision, like: Bounded) -> Bounded:
    one = 1 + zeros(like)
    return choose(decision, one, zeros(like))

"""Weights and masks of tokens in the policy term: rollout corrections, masks of the objective."""

from math import inf

import numpy as np

from .bounded import GRID, Bounded, Decision, Doubts, beyond, certain, choose, where
from .functions import exp, expm1, held, log, minimum
from .terms import SATURATION, difference, kl_value, zeros
from .tokens import Tokens, maxima, means, sums


def rollout_weights(
    tokens: Tokens, fields: dict, doubts: Doubts, kinds: tuple[str, ...] | None = None
) -> Bounded | None:
    """Return the weights of `RolloutCorrection` of these kinds, multiplied; None without one."""
    product = None
    for correction in fields["rollout_correction"] or ():
        if kinds is not None and correction["kind"] not in kinds:
            continue
        of_level = LEVELS[correction["level"]]
        old = tokens.logprobs if tokens.old is None else tokens.old
        bounded = estimate(difference(old, tokens.rollout), correction["estimator"])
        if of_level is not None:
            bounded = of_level(bounded, tokens.sequence, tokens.count)
        if correction["estimator"] == "ratio":
            bounded = exp(held(bounded, -SATURATION, SATURATION)[0])
        if of_level is not None:
            bounded = bounded[tokens.sequence]
        weight = _weight(bounded, correction, doubts)
        product = weight if product is None else product * weight
    return product


LEVELS = {"token": None, "sequence": sums, "geometric": means, "max": maxima}


def estimate(log: Bounded, estimator: str) -> Bounded:
    """Return what a correction bounds of log ratios: these, or estimates of a KL."""
    if estimator == "ratio":
        return log
    log = held(-log if estimator == "reverse-k3" else log, -SATURATION, SATURATION)[0]
    return kl_value(log, estimator.removeprefix("reverse-"))[0]


def _weight(bounded: Bounded, correction: dict, doubts: Doubts) -> Bounded:
    low, high = correction["low"], correction["high"]
    if correction["kind"] == "truncate":
        return held(bounded, low, high)[0]
    outside = beyond(bounded.like(low) + zeros(bounded), bounded) | beyond(bounded, high)
    doubts.add("rollout correction", outside.doubtful)
    one = 1 + zeros(bounded)
    inside = (
        bounded
        if correction["kind"] == "mask"
        else Bounded(np.where(np.isnan(bounded.value), np.nan, one.value), 0.0, one.arithmetic)
    )
    return choose(outside, zeros(bounded), inside)


def gamma_weights(tokens: Tokens, fields: dict, factors: Bounded | None) -> Bounded | None:
    """Return the weights of `GammaWeights`, with these factors of w; None without any."""
    gamma, x = fields["gamma_weights"], tokens.logprobs
    if gamma is None or (tokens.old is None and factors is None):
        return None
    x = where(np.isnan(x.value), x, zeros(x)) if tokens.old is None else difference(x, tokens.old)
    lowest, highest = np.log(1e-8), 20.0
    x = held(x, -highest, highest)[0]
    if factors is not None:
        x = x + held(log(factors), lowest, highest)[0]
    log_w = held(sums(x, tokens.sequence, tokens.count), lowest, highest)[0][tokens.sequence]
    rises = tokens.advantages.value >= 0
    k, decay = (
        where(rises, zeros(x) + gamma[f"{name}_pos"], zeros(x) + gamma[f"{name}_neg"])
        for name in ("k", "lambda")
    )
    return exp(minimum(k * log_w - decay * expm1(log_w), SATURATION))


def outside_trust_region(tokens: Tokens, fields: dict, doubts: Doubts) -> Decision | None:
    """Decide which tokens `trust_region` drops; None without one, or without an old policy."""
    region, old, new = fields["trust_region"], tokens.old, tokens.logprobs
    if region is None or old is None:
        return None
    x = held(difference(new, old), -SATURATION, SATURATION)[0]
    a, high = tokens.advantages.value, region["high"]
    up, down = beyond(x, 0.0) & (a > 0), beyond(zeros(x), x) & (a < 0)
    if region["kind"] == "m2":
        dropped = _largest_squares(x, up | down, high)
    else:
        new, old = (held(each, -inf, 0.0)[0] for each in (new, old))  # p is at most 1
        x, q = held(difference(new, old), -SATURATION, SATURATION)[0], exp(old)
        if region["kind"] == "tv":
            distance = abs(exp(new) - q)
        else:
            others = (1e-8 - expm1(old)) / (1e-8 - expm1(new))
            distance = (1 - q) * log(others) - q * x
        low = high if region["low"] is None else region["low"]
        dropped = up & beyond(distance, high) | down & beyond(distance, low)
    doubts.add("trust region", dropped.doubtful)
    return dropped


def _largest_squares(x: Bounded, among: Decision, bound: float) -> Decision:
    """Decide which squares to drop for a mean of the rest within the bound."""
    square, inside = x * x, among.yes
    maybe = inside | among.doubtful
    if not (square.value + square.error > bound)[maybe].any():
        return certain(np.zeros(x.shape, bool))
    if among.doubtful.any():
        return Decision(inside, maybe)
    ordered = np.sort(square.value[inside])
    error = square.error[inside].max()
    ranks = np.arange(1, len(ordered) + 1)
    means_ = np.cumsum(ordered) / ranks
    slack = error + 2.0**-40 * means_ * (np.cumsum(ordered) % GRID != 0)
    edges = np.append(ordered, np.inf)
    least, usual, most = (
        edges[np.count_nonzero(means_ <= bound + by)] for by in (-slack, 0.0, slack)
    )
    between = (square.value >= least - 2 * error) & (square.value < most + 2 * error)
    return Decision(inside & (square.value >= usual), inside & between)


def off_policy(tokens: Tokens, fields: dict, doubts: Doubts) -> Decision | None:
    """Decide which tokens `off_policy_threshold` drops; None without one."""
    if fields["off_policy_threshold"] is None:
        return None
    other = tokens.rollout if tokens.rollout is not None else tokens.old
    logprobs = tokens.logprobs
    gone = zeros(logprobs) if other is None else difference(other, logprobs)
    gone = where(np.isnan(gone.value), zeros(gone), gone)
    far = means(gone, tokens.sequence, tokens.count)
    above = beyond(far, fields["off_policy_threshold"])
    above = Decision(above.yes, above.doubtful | np.isnan(far.value))  # unspecified: inf - inf
    dropped = above[tokens.sequence] & (tokens.advantages.value < 0)
    doubts.add("off-policy threshold", dropped.doubtful)
    return dropped


def top_entropy(tokens: Tokens, fields: dict, doubts: Doubts) -> Decision | None:
    """Decide which tokens `top_entropy_quantile` drops; None where it keeps all."""
    share, entropy = fields["top_entropy_quantile"], tokens.entropy
    n = 0 if entropy is None else np.count_nonzero(~np.isnan(entropy.value))  # NaN stays
    if share == 1 or n == 0:
        return None
    u = entropy.arithmetic.unit
    order = np.argsort(entropy.value, kind="stable")[:n]  # NaN is the last
    value, error = entropy.value[order], entropy.error[order]
    place = (1 - share) * (n - 1)
    known = share * 1024 % 1 == 0  # so is the place, exactly
    slack = 0.0 if known else 4 * u * max(place, 1)
    at, low, high = np.interp([place, place - slack, place + slack], np.arange(n), value)
    around = error[max(int(place - slack), 0) : int(np.ceil(place + slack)) + 1].max()
    whole = known and place % 1 == 0
    rounding = 0.0 if whole else 4 * u * abs(at)
    threshold = Bounded(at, max(high - at, at - low) + around + rounding, entropy.arithmetic)
    dropped = beyond(threshold + zeros(entropy), entropy)
    if whole and np.count_nonzero(dropped.doubtful) == 1:  # the threshold is that token's entropy
        dropped = Decision(dropped.yes, np.zeros(dropped.yes.shape, bool))
    doubts.add("top entropy", dropped.doubtful)
    return dropped

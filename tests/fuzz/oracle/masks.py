"""Weights and masks of tokens in the policy term: rollout corrections, masks of the objective."""

import numpy as np

from .bounded import Bounded, Decision, Doubts, beyond, choose, where
from .functions import exp, held
from .terms import SATURATION, difference, zeros
from .tokens import Tokens, means, sums


def rollout_weights(tokens: Tokens, fields: dict, doubts: Doubts) -> Bounded | None:
    """Return the importance weights of `RolloutCorrection`, multiplied; None without one."""
    product = None
    for correction in fields["rollout_correction"] or ():
        old = tokens.logprobs if tokens.old is None else tokens.old
        log = difference(old, tokens.rollout)
        level = correction["level"]
        if level == "token":
            log = held(log, -SATURATION, SATURATION)[0]
        else:
            of_level = (sums if level == "sequence" else means)(log, tokens.sequence, tokens.count)
            log = held(of_level, -SATURATION, SATURATION)[0][tokens.sequence]
        weight = _weight(exp(log), correction, doubts)
        product = weight if product is None else product * weight
    return product


def _weight(ratio: Bounded, correction: dict, doubts: Doubts) -> Bounded:
    low, high = correction["low"], correction["high"]
    if correction["kind"] == "truncate":
        return held(ratio, low, high)[0]
    outside = beyond(ratio.like(low) + zeros(ratio), ratio) | beyond(ratio, high)
    doubts.add("rollout correction", outside.doubtful)
    one = 1 + zeros(ratio)
    inside = (
        ratio
        if correction["kind"] == "mask"
        else Bounded(np.where(np.isnan(ratio.value), np.nan, one.value), 0.0, ratio.arithmetic)
    )
    return choose(outside, zeros(ratio), inside)


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

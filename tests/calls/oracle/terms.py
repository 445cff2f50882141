"""The policy term f and the KL term k of a token, with their derivatives by formula."""

import dataclasses

import numpy as np

from .bounded import Bounded, Decision, beyond, certain, choose, constant, where
from .functions import exp, expm1, held, minimum, sigmoid
from .tokens import Tokens, means

SATURATION = 80.0  # of a log ratio
BIAS_SATURATION = 40.0  # of both logs in a bias-corrected KL


def difference(a: Bounded, b: Bounded) -> Bounded:
    """Return a - b; 0 where both are the same infinity."""
    same = np.isinf(a.value) & (a.value == b.value)
    return where(same, constant(np.zeros(same.shape), a.arithmetic), a - b)


@dataclasses.dataclass(frozen=True)
class Term:
    """A term per token: its value, and its slopes.

    `through` is its derivative by the log ratio, `own` that by the log-probability itself.
    """

    value: Bounded
    through: Bounded
    own: Bounded
    low: Decision  # where the lower bound acts
    high: Decision


@dataclasses.dataclass
class Ratio:
    """The log ratio of a token as the objective has it."""

    own: Bounded  # of the token alone, held within the bounds
    x: Bounded  # of the level
    stuck: Decision  # held at a bound, where there is no slope
    shared: bool  # the tokens of a sequence share its slope
    bounded_each: bool = False  # each within separate bounds


def zeros(like: Bounded) -> Bounded:
    return Bounded(np.zeros(like.shape), 0.0, like.arithmetic)


def never(like: Bounded) -> Decision:
    return certain(np.zeros(like.shape, bool))


def maybe(yes: np.ndarray, unknown: np.ndarray) -> Decision:
    """Return a decision that is in doubt where something is NaN."""
    return Decision(yes, unknown)


def ppo_clip(x: Bounded, advantages: Bounded, fields: dict) -> Term:
    """-min(min(r, delta) A, clip(r) A), for A < 0 at most -dual_clip A."""
    r, a = exp(x), advantages
    positive, negative = a.value > 0, a.value < 0
    over, under = (
        beyond(r, 1 + r.like(fields["clip_high"])),
        beyond(1 - r.like(fields["clip_low"]), r),
    )
    capped = minimum(r, r.like(fields["delta"])) if fields["delta"] is not None else r
    # between infinite advantages min and max are ties
    infinite, unknown = np.isinf(a.value), np.isnan(a.value)
    over, under = (Decision(d.yes, d.doubtful | d.yes & infinite) for d in (over, under))
    high, low = over & maybe(positive, unknown), under & maybe(negative, unknown)
    inside = choose(high, 1 + zeros(r) + fields["clip_high"], r)
    outside = choose(under, 1 + zeros(r) - fields["clip_low"], capped)
    factor = where(negative, outside, inside)
    if fields["delta"] is not None:
        high = high | (beyond(r, fields["delta"]) & maybe(negative, unknown | infinite))
    if fields["dual_clip"] is not None:
        most = zeros(r) + fields["dual_clip"]
        dual = beyond(factor, most) & maybe(negative, unknown | infinite)
        factor, high, low = choose(dual, most, factor), high | dual, low & ~dual
    slope = choose(low | high, zeros(r), -(r * a))
    lost = np.isnan((a * r).value)
    return Term(-(factor * a), where(lost, a * r, slope), zeros(r), low, high)


def cispo(x: Bounded, advantages: Bounded, logprobs: Bounded, fields: dict) -> Term:
    """-sg[clip(r)] A logprob."""
    r = exp(x)
    low, high = 1 - r.like(fields["clip_low"]), 1 + r.like(fields["clip_high"])
    weight = held(r, low, high)[0] * advantages
    unknown = np.isnan(advantages.value)
    acts = maybe((advantages.value != 0) & ~unknown, unknown)
    return Term(
        -weighted(weight, logprobs),
        zeros(r),
        -weight,
        beyond(low, r) & acts,
        beyond(r, high) & acts,
    )


def weighted(weight: Bounded, logprobs: Bounded) -> Bounded:
    """Return weight times log-probability; 0 for a weight of exactly 0, whatever the other."""
    nothing = (weight.value == 0) & (weight.error == 0) & ~np.isnan(logprobs.value)
    return where(nothing, zeros(weight), weight * logprobs)


def sapo(x: Bounded, advantages: Bounded, fields: dict) -> Term:
    """-4/tau sigmoid(tau (r - 1)) A, tau by the sign of A."""
    r = exp(x)
    tau = where(
        advantages.value > 0,
        zeros(r) + fields["sapo_temperature_pos"],
        zeros(r) + fields["sapo_temperature_neg"],
    )
    argument = tau * (r - 1.0)
    gate = sigmoid(argument)
    value = -(gate * 4.0 / tau * advantages)
    rest = sigmoid(-argument)
    # of 1 - s, whose terms cancel, until s rounds to 1
    unit = rest.arithmetic.unit
    lost = np.where(rest.value > unit / 8, 2 * unit, rest.value)
    rest = Bounded(rest.value, rest.error + lost, rest.arithmetic)
    # so may those of r = 1 + (r - 1), where r is small
    moving = Bounded(r.value, r.error + 2 * r.arithmetic.unit, r.arithmetic)
    slope = -(gate * rest * 4.0 * moving * advantages)
    return Term(value, slope, zeros(r), never(r), never(r))


def reinforce(advantages: Bounded, logprobs: Bounded) -> Term:
    """-A logprob."""
    none = never(logprobs)
    return Term(-weighted(advantages, logprobs), zeros(logprobs), -advantages, none, none)


def kl_value(d: Bounded, estimator: str) -> tuple[Bounded, Bounded]:
    """Return k and dk/dlogprob of d = ref - logprob."""
    if estimator == "k1":
        return -d, where(np.isnan(d.value), d, 1 + zeros(d))
    if estimator == "k2":
        return d * d / 2.0, -d
    if estimator == "k3":
        slope = -expm1(d)
        terms = 2 * d.arithmetic.unit * (2 + np.abs(slope.value))
        terms = np.where((slope.error == 0) | ~np.isfinite(slope.value), 0.0, terms)
        return expm1(d) - d, Bounded(slope.value, slope.error + terms, d.arithmetic)
    sign = constant(np.sign(d.value), d.arithmetic)
    doubtful = (np.abs(d.value) <= d.error) & (d.error > 0)
    return abs(d), -Bounded(sign.value, sign.error + 2 * doubtful, d.arithmetic)


def kl_term(d: Bounded, x: Bounded, stuck: Decision, fields: dict) -> Term:
    """The KL term by estimator, clamp and kind of gradient; d = ref - logprob, x the log ratio.

    `stuck` says where the log ratio is held at a bound.
    """
    biased = fields["kl_gradient"] == "bias-corrected"
    within = BIAS_SATURATION if biased else SATURATION
    d, saturated = held(d, -within, within)
    free, slope = kl_value(d, fields["kl_estimator"])
    value, clamped = free, never(d)
    if fields["kl_clamp"] is not None:
        value, clamped = held(free, -fields["kl_clamp"], fields["kl_clamp"])
    nothing = zeros(d)
    if fields["kl_gradient"] == "straight-through":
        return Term(value, nothing, choose(saturated, nothing, -d), clamped, saturated)
    own = choose(saturated | clamped, nothing, slope)
    if not biased:
        return Term(value, nothing, own, clamped, saturated)
    x, far = held(x, -within, within)
    r, still = exp(x), far | stuck | clamped
    through = choose(still | saturated, nothing, r * value)
    return Term(r * value, through, choose(still, nothing, r * own), clamped, saturated | far)


def _in_any_order(k: Bounded, slope: Bounded) -> Bounded:
    """Their sum, also where each of them is added to the slope of the policy by itself."""
    total = k + slope
    rounding = k.arithmetic.unit * (np.abs(k.value) + np.abs(slope.value))
    return Bounded(total.value, total.error + rounding, k.arithmetic)


def bias_corrected_slope(d: Bounded, x: Bounded, stuck: Decision, fields: dict) -> Bounded:
    """d(r k)/dlogprob where r is the token's own: by k in closed form, as the terms cancel.

    r (dk + k) is r (1 - d) for k1, r (d^2/2 - d) for k2, -r d for k3 and r (|d| - sign d) for abs.
    `stuck` says where the log ratio is held at a bound. There, and where k is, nothing is left.
    """
    near, saturated = held(d, -BIAS_SATURATION, BIAS_SATURATION)
    k, slope = kl_value(near, fields["kl_estimator"])
    total = _in_any_order(k, slope)
    if fields["kl_estimator"] == "k3":  # without an exponential of d
        far, saturated = held(d, -SATURATION, SATURATION)
        total = -far
    still = saturated | stuck
    if fields["kl_clamp"] is not None:
        still = still | held(k, -fields["kl_clamp"], fields["kl_clamp"])[1]
    x, far = held(x, -BIAS_SATURATION, BIAS_SATURATION)
    return choose(still | far, zeros(d), exp(x) * total)


def geometric_ratio(tokens: Tokens, ratio: Ratio, fields: dict) -> tuple[Ratio, Term]:
    """Return the ratio that the tokens of a sequence share, and the term -A r.

    A token's log ratio is bounded from above if its advantage is not negative, else from below. It
    counts as clipped unless the advantage is 0.
    """
    x, a = ratio.x, tokens.advantages
    positive, negative = a.value > 0, a.value < 0
    over, under = beyond(x, fields["clip_high"]), beyond(-fields["clip_low"] + zeros(x), x)
    unknown = np.isnan(a.value)
    over_acts = Decision(
        over.yes & ~negative & ~unknown, over.doubtful & ~negative | over.yes & unknown
    )
    under_acts = Decision(under.yes & negative, under.doubtful & negative | under.yes & unknown)
    clipped = choose(over_acts, zeros(x) + fields["clip_high"], x)
    clipped = choose(under_acts, zeros(x) - fields["clip_low"], clipped)
    geometric = means(clipped, tokens.sequence, tokens.count)[tokens.sequence]
    value = -(a * exp(geometric))
    high, low = over & maybe(positive, unknown), under & maybe(negative, unknown)
    own = ratio.own
    stuck = ratio.stuck | over_acts | under_acts
    shared = Ratio(own, geometric, stuck, shared=True, bounded_each=True)
    return shared, Term(value, value, zeros(x), low, high)

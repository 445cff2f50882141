"""GMPO: the geometric mean of a sequence's ratios, clipped according to their advantages."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..bounded import Decision, beyond, choose
from ..functions import exp
from .sequences import means, taken
from .terms import Term, maybe, zeros
from .valid_tokens import Tokens


def geometric_ratio(tokens: Tokens, ratio: Any, fields: dict) -> tuple[Any, Term]:
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
    geometric = taken(means(clipped, tokens.sequence, tokens.count), tokens.sequence)
    value = -(a * exp(geometric))
    high, low = over & maybe(positive, unknown), under & maybe(negative, unknown)
    own = ratio.own
    stuck = ratio.stuck | over_acts | under_acts
    shared = type(ratio)(own, geometric, stuck, shared=True, bounded_each=True)
    return shared, Term(value, value, zeros(x), low, high)

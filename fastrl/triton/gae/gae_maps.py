"""The maps that a run of tokens is for what wanders through it, and how they compose.

The state that wanders from token to token, last to first, is what a token hands to the one before
it, h, and where that does not suffice a second number u: gamma V of the next valid token (a
truncated token needs it without the trace), or, with a bootstrap value per token, 1 while no valid
token has been met. A map gives the new state from an old one (h0, u0):
h = a + c h0 + g u0, u = w + k u0. It is passed as the tuple (a, c, g, w, k).
"""

import triton
import triton.language as tl

NO_U = tl.constexpr(0)
NEXT_VALUE = tl.constexpr(1)
UNMET = tl.constexpr(2)


@triton.jit
def _times(factor, x):
    # a cut (factor 0) holds back NaN too
    return tl.where(factor != 0, factor * x, 0.0)


@triton.jit
def compose(a1, c1, g1, w1, k1, a2, c2, g2, w2, k2):
    """The map 2 applied to what the map 1 gives."""
    a = a2 + _times(c2, a1) + tl.where(w1 != 0, _times(g2, w1), 0.0)
    g = _times(c2, g1) + tl.where(k1 != 0, g2, 0.0)
    return a, c2 * c1, g, w2 + tl.where(k2 != 0, w1, 0.0), k2 * k1


@triton.jit
def _compose_all(
    a1, c1, g1, w1, k1, ia, ic, ig, iw, ik, a2, c2, g2, w2, k2, ja, jc, jg, jw, jk
):  # fmt: skip
    """Composes maps, and beside each the map of all that came before it (j)."""
    a, c, g, w, k = compose(a1, c1, g1, w1, k1, a2, c2, g2, w2, k2)
    ja, jc, jg, jw, jk = compose(a1, c1, g1, w1, k1, ja, jc, jg, jw, jk)
    return a, c, g, w, k, ja, jc, jg, jw, jk


@triton.jit
def _compose_plain(a1, c1, a2, c2):
    return a2 + _times(c2, a1), c2 * c1


@triton.jit
def _compose_all_plain(a1, c1, ia, ic, a2, c2, ja, jc):
    a, c = _compose_plain(a1, c1, a2, c2)
    ja, jc = _compose_plain(a1, c1, ja, jc)
    return a, c, ja, jc


@triton.jit
def scanned(state, U: tl.constexpr):
    """Composes the maps of a chunk's groups: all up to each, and all before each."""
    a, c, g, w, k = state
    if U == NO_U:
        a, c, ja, jc = tl.associative_scan(
            (a, c, tl.zeros_like(a), tl.full(a.shape, 1.0, tl.float32)), 0, _compose_all_plain
        )
        zero = tl.zeros_like(a)
        return (a, c, zero, zero, zero), (ja, jc, zero, zero, zero)
    zero, one = tl.zeros_like(a), tl.full(a.shape, 1.0, tl.float32)
    a, c, g, w, k, ja, jc, jg, jw, jk = tl.associative_scan(
        (a, c, g, w, k, zero, one, zero, zero, one), 0, _compose_all
    )
    return (a, c, g, w, k), (ja, jc, jg, jw, jk)


@triton.jit
def scalars(state):
    """The map of a whole scan, as scalars."""
    a, c, g, w, k = state
    end = tl.arange(0, a.shape[0]) == a.shape[0] - 1
    return (
        tl.sum(tl.where(end, a, 0.0), 0),
        tl.sum(tl.where(end, c, 0.0), 0),
        tl.sum(tl.where(end, g, 0.0), 0),
        tl.sum(tl.where(end, w, 0.0), 0),
        tl.sum(tl.where(end, k, 0.0), 0),
    )

"""Affine maps that carry the GAE state across a run of tokens, and how they compose.

The state goes from the last token to the first. It is h, which a token passes to the one before it,
and where h does not suffice a second number u: gamma V of the next valid token (a truncated token
needs it without the trace), or, with a bootstrap value per token, 1 until the first valid token. A
map gives the new state from an old one (h0, u0): h = constant + trace h0 + next u0,
u = value + open u0.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

# the state: one number, or the meaning of the second
ONE_NUMBER = tl.constexpr(0)
NEXT_VALUE = tl.constexpr(1)
UNMET = tl.constexpr(2)


class GaeMap(NamedTuple):
    """An affine map; with a state of one number, `next`, `value` and `open` are not used."""

    constant: Any
    trace: Any
    next: Any
    value: Any
    open: Any


@triton.jit
def _times(factor, x):
    # a cut (factor 0) also stops NaN
    return tl.where(factor != 0, factor * x, 0.0)


@triton.jit
def identity_map(like):
    """Return the identity map in the shape of `like`."""
    zero = tl.zeros_like(like)
    return GaeMap(zero, zero + 1.0, zero, zero, zero + 1.0)


@triton.jit
def compose(first, then):
    constant = then.constant + _times(then.trace, first.constant)
    constant += tl.where(first.value != 0, _times(then.next, first.value), 0.0)
    following = _times(then.trace, first.next) + tl.where(first.open != 0, then.next, 0.0)
    value = then.value + tl.where(then.open != 0, first.value, 0.0)
    return GaeMap(constant, then.trace * first.trace, following, value, then.open * first.open)


@triton.jit
def _scan(
    a1, c1, g1, w1, k1, ia, ic, ig, iw, ik, a2, c2, g2, w2, k2, ja, jc, jg, jw, jk
):  # fmt: skip
    """Compose maps, each together with the map of all that came before it."""
    first = GaeMap(a1, c1, g1, w1, k1)
    upto = compose(first, GaeMap(a2, c2, g2, w2, k2))
    before = compose(first, GaeMap(ja, jc, jg, jw, jk))
    return (
        upto.constant, upto.trace, upto.next, upto.value, upto.open,
        before.constant, before.trace, before.next, before.value, before.open,
    )  # fmt: skip


@triton.jit
def _scan_without_value(a1, c1, ia, ic, a2, c2, ja, jc):
    return a2 + _times(c2, a1), c2 * c1, ja + _times(jc, a1), jc * c1


@triton.jit
def scanned(maps, STATE: tl.constexpr):
    """Return the compositions of a chunk's groups up to each group, and before each group."""
    none = identity_map(maps.constant)
    if STATE == ONE_NUMBER:
        constant, trace, constant_before, trace_before = tl.associative_scan(
            (maps.constant, maps.trace, none.constant, none.trace), 0, _scan_without_value
        )
        upto = GaeMap(constant, trace, none.next, none.value, none.open)
        return upto, GaeMap(constant_before, trace_before, none.next, none.value, none.open)
    a, c, g, w, k, ja, jc, jg, jw, jk = tl.associative_scan(
        (
            maps.constant, maps.trace, maps.next, maps.value, maps.open,
            none.constant, none.trace, none.next, none.value, none.open,
        ), 0, _scan,
    )  # fmt: skip
    return GaeMap(a, c, g, w, k), GaeMap(ja, jc, jg, jw, jk)


@triton.jit
def _last(x):
    end = tl.arange(0, x.shape[0]) == x.shape[0] - 1
    return tl.sum(tl.where(end, x, 0.0), 0)


@triton.jit
def last_map(maps):
    """Return the last of a vector of maps, as scalars."""
    return GaeMap(
        _last(maps.constant), _last(maps.trace), _last(maps.next), _last(maps.value),
        _last(maps.open),
    )  # fmt: skip


@triton.jit
def store_map(maps, chunk, chunks, found, STATE: tl.constexpr):
    """Store the map of a chunk: one row of `maps` for each used field."""
    at = maps + chunk
    tl.store(at, found.constant)
    tl.store(at + chunks, found.trace)
    if STATE != ONE_NUMBER:
        tl.store(at + 2 * chunks, found.next)
        tl.store(at + 3 * chunks, found.value)
        tl.store(at + 4 * chunks, found.open)


@triton.jit
def load_maps(maps, chunk, chunks, STATE: tl.constexpr):
    """Load the maps of a vector of chunks; the identity lies beyond the last chunk."""
    known = chunk < chunks
    at = maps + chunk
    constant = tl.load(at, mask=known, other=0.0)
    trace = tl.load(at + chunks, mask=known, other=1.0)
    if STATE == ONE_NUMBER:
        none = identity_map(constant)
        return GaeMap(constant, trace, none.next, none.value, none.open)
    else:
        return GaeMap(
            constant,
            trace,
            tl.load(at + 2 * chunks, mask=known, other=0.0),
            tl.load(at + 3 * chunks, mask=known, other=0.0),
            tl.load(at + 4 * chunks, mask=known, other=1.0),
        )


def rows_of_maps(state):
    """Return how many rows `store_map` needs."""
    return 2 if state == ONE_NUMBER.value else len(GaeMap._fields)

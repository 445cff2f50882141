"""The first sweep over a row: its maximum, and the sums from which its statistics follow.

Every block is summed relative to its own maximum per lane, and the blocks are folded in order. This
costs one rescaling per block, and the exponentials do not depend on the fold. A row that is split
over programs is folded from the same blocks in the same order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrl.triton.vocabulary.row_loads import load_columns
from fastrl.triton.vocabulary.rows import (
    COLUMNS_PER_LANE,
    LN2,
    PER_TOKEN,
    RUN_TIME,
    at_least,
    blocks_of,
    exact_difference,
    exponent,
    exponent_factor,
    finite_or_zero,
    largest_exponent,
    row_counts,
    row_gain,
    row_start,
    token_column,
    token_logit,
    value,
)

#: The number of values per row for its token: its logit, and the sums over the rest of its lane.
OF_TOKEN = tl.constexpr(5)


class Sums(NamedTuple):
    """Sums over logits, per lane or of a row; t is relative to the exponent of the largest."""

    largest: Any
    s: Any  # sum of 2^t
    st: Any  # sum of 2^t t
    ss: Any  # sum of 4^t


class Statistics(NamedTuple):
    """The statistics of a row that determine its gradient."""

    row_max: Any
    log_sum: Any
    entropy: Any


@triton.jit
def block_sums(
    block, columns_left, token, binary_gain, squash, MASKED: tl.constexpr, SPEC: tl.constexpr
):  # fmt: skip
    """Return the sums [lanes] of a block, masked if it has more columns than are left.

    The lane with the column `token` has empty sums: `token_lane_sums` computes them.
    """
    TILES: tl.constexpr = COLUMNS_PER_LANE // SPEC.width
    tiles = load_columns(block, columns_left, MASKED, SPEC)
    largest = tiles[0]
    for tile in tl.static_range(1, TILES):
        largest = tl.maximum(largest, tiles[tile])  # loses NaN, but the sum shows it
    largest = tl.max(largest, axis=1)
    v = value(largest, squash, SPEC)
    factor = exponent_factor(v, binary_gain)
    reference = finite_or_zero(v * factor)[:, None]
    for tile in tl.static_range(TILES):
        x = tiles[tile]
        t = exponent(x, value(x, squash, SPEC), factor[:, None], reference, SPEC)
        if SPEC.entropy:
            t = at_least(t)
        e = tl.exp2(t)
        if tile == 0:
            s, st, ss = e, e * t, e * e
        else:
            s, st, ss = s + e, tl.fma(e, t, st), tl.fma(e, e, ss)
    lane = tl.arange(0, SPEC.lanes)
    others = (token < 0) | (token >= COLUMNS_PER_LANE * SPEC.lanes) | (lane != lane_of(token, SPEC))
    largest = tl.where(others, largest, float("-inf"))  # `fold` multiplies the sums by 0
    s, st, ss = tl.sum(s, axis=1), tl.sum(st, axis=1), tl.sum(ss, axis=1)
    if SPEC.softcap:  # but not where -inf has a value
        s, st, ss = tl.where(others, s, 0.0), tl.where(others, st, 0.0), tl.where(others, ss, 0.0)
    return Sums(largest, s, st, ss)


@triton.jit
def lane_of(column, SPEC: tl.constexpr):
    """Return which lane has a column of a block."""
    return column % (SPEC.lanes * SPEC.width) // SPEC.width


@triton.jit
def token_lane_sums(row, token, vocabulary, binary_gain, squash, SPEC: tl.constexpr):
    """Return the sums over the columns that share a lane of their block with the token.

    They exclude the token: a sum near 1 would not tell how far the token is ahead of the others.
    """
    BLOCK: tl.constexpr = COLUMNS_PER_LANE * SPEC.lanes
    start = token // BLOCK * BLOCK
    i = tl.arange(0, COLUMNS_PER_LANE)
    column = start + i // SPEC.width * (SPEC.lanes * SPEC.width)
    column += lane_of(token - start, SPEC) * SPEC.width + i % SPEC.width
    wanted = (column != token) & (column < vocabulary) & (token >= 0)
    x = tl.load(row + column, mask=wanted, other=float("-inf")).to(tl.float32)
    largest = tl.max(x, axis=0)
    v = value(largest, squash, SPEC)
    factor = exponent_factor(v, binary_gain)
    reference = finite_or_zero(v * factor)
    t = at_least(exponent(x, value(x, squash, SPEC), factor, reference, SPEC))
    e = tl.exp2(t)
    return Sums(largest, tl.sum(e, axis=0), tl.sum(e * t, axis=0), tl.sum(e * e, axis=0))


@triton.jit
def fold(sums, following, binary_gain, squash, SPEC: tl.constexpr):
    """Return the sums over both parts, relative to the larger exponent."""
    exponents = largest_exponent(value(sums.largest, squash, SPEC), binary_gain)
    next_exponents = largest_exponent(value(following.largest, squash, SPEC), binary_gain)
    first = sums.largest >= following.largest
    reference = finite_or_zero(tl.where(first, exponents, next_exponents))
    fall, next_fall = at_least(exponents - reference), at_least(next_exponents - reference)
    factor, next_factor = tl.exp2(fall), tl.exp2(next_fall)
    s = tl.fma(sums.s, factor, following.s * next_factor)
    next_st = tl.fma(following.s, next_fall, following.st) * next_factor
    st = tl.fma(tl.fma(sums.s, fall, sums.st), factor, next_st)
    ss = tl.fma(sums.ss, factor * factor, following.ss * (next_factor * next_factor))
    largest = tl.maximum(sums.largest, following.largest)
    return Sums(largest, s, st if SPEC.entropy else s, ss)


@triton.jit
def row_sums(
    row, partial_sums, of_tokens, index, token, vocabulary, binary_gain, squash,
    SPEC: tl.constexpr,
):  # fmt: skip
    """Return the sums of the row of that index, from those of `sums_of_blocks` if given.

    They exclude the token, which `row_statistics` adds.
    """
    LANES: tl.constexpr = SPEC.lanes
    BLOCK: tl.constexpr = COLUMNS_PER_LANE * LANES
    nothing = tl.zeros([LANES], tl.float32)
    sums = Sums(nothing + float("-inf"), nothing, nothing, nothing)
    if partial_sums is not None:
        blocks = tl.cdiv(vocabulary, BLOCK)
        for block in range(blocks):
            following = _load_sums(partial_sums, index * blocks + block, LANES)
            sums = fold(sums, following, binary_gain, squash, SPEC)
        at = of_tokens + index * OF_TOKEN + 1
        beside = Sums(tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3))
    else:
        full = vocabulary // BLOCK * BLOCK
        for start in range(0, full, BLOCK):
            following = block_sums(
                row + start, vocabulary - start, token - start, binary_gain, squash, False, SPEC
            )
            sums = fold(sums, following, binary_gain, squash, SPEC)
        if full < vocabulary:
            left = vocabulary - full
            following = block_sums(row + full, left, token - full, binary_gain, squash, True, SPEC)
            sums = fold(sums, following, binary_gain, squash, SPEC)
        beside = token_lane_sums(row, token, vocabulary, binary_gain, squash, SPEC)
    largest = tl.max(sums.largest, axis=0)
    reference = finite_or_zero(largest_exponent(value(largest, squash, SPEC), binary_gain))
    fall = at_least(largest_exponent(value(sums.largest, squash, SPEC), binary_gain) - reference)
    factor = tl.exp2(fall)
    s = tl.sum(sums.s * factor, axis=0)
    st = tl.sum(tl.fma(sums.s, fall, sums.st) * factor, axis=0)
    ss = tl.sum(sums.ss * (factor * factor), axis=0)
    return fold(Sums(largest, s, st, ss), beside, binary_gain, squash, SPEC)


@triton.jit
def _block_place(partial_sums, block, LANES: tl.constexpr):
    return partial_sums + block * (4 * LANES) + tl.arange(0, LANES)


@triton.jit
def _load_sums(partial_sums, block, LANES: tl.constexpr):
    at = _block_place(partial_sums, block, LANES)
    return Sums(tl.load(at), tl.load(at + LANES), tl.load(at + 2 * LANES), tl.load(at + 3 * LANES))


@triton.jit
def _store_sums(partial_sums, block, sums, LANES: tl.constexpr):
    at = _block_place(partial_sums, block, LANES)
    tl.store(at, sums.largest)
    tl.store(at + LANES, sums.s)
    tl.store(at + 2 * LANES, sums.st)
    tl.store(at + 3 * LANES, sums.ss)


@triton.jit
def log1p(x):
    """Return log(1 + x) with all its digits."""
    u = 1.0 + x
    none = u == 1.0
    return tl.where(none, x, tl.log(u) * (x / tl.where(none, 1.0, u - 1.0)))


@triton.jit
def row_statistics(others, x, token, binary_gain, squash, SPEC: tl.constexpr):
    """Return the sums and statistics of a row; a row of -inf alone has no softmax.

    `others` are the sums of all columns but the token's, whose logit is `x`.
    """
    x = tl.where(token >= 0, x, float("-inf"))
    largest = tl.maximum(others.largest, x)
    v = value(largest, squash, SPEC)
    factor = exponent_factor(v, binary_gain)
    reference = finite_or_zero(v * factor)
    below = largest_exponent(value(others.largest, squash, SPEC), binary_gain)
    fall = at_least(below - finite_or_zero(largest_exponent(v, binary_gain)))
    falling = tl.exp2(fall)
    t = at_least(exponent(x, value(x, squash, SPEC), factor, reference, SPEC))
    e = tl.exp2(t)
    rest = others.s * falling
    s = rest + e
    st = tl.fma(e, t, tl.fma(others.s, fall, others.st) * falling)
    ss = tl.fma(e, e, others.ss * (falling * falling))
    # the sums are relative to the rounded exponent, log_sum to the largest logit itself
    residue = tl.fma(v, factor, -reference)
    log_s = tl.where(s == 0, float("nan"), tl.log(s))
    log_sum = tl.fma(-LN2, residue, log_s)
    # no closer to 0 than a sum near 1 can resolve, unless the token is the largest
    log_sum = tl.where(log_sum < 1.2e-7, 0.0, log_sum)
    leads = (x >= others.largest) & (s != 0) & (s == s)
    log_sum = tl.where(leads, log1p(rest * tl.exp2(-residue)), log_sum)
    entropy = tl.fma(-LN2, st / s, log_s)
    stats = Statistics(largest, log_sum, tl.where(entropy < 1.2e-7, 0.0, entropy))
    return Sums(largest, s, st, ss), stats


@triton.jit
def token_logprob(x, row_max, log_sum, gain, squash, SPEC: tl.constexpr):
    """Return log p of a logit; NaN if the logit is."""
    t = exact_difference(x, row_max, squash, SPEC) * gain
    return tl.where(x == float("-inf"), float("-inf"), t) - log_sum


@triton.jit(do_not_specialize=RUN_TIME, do_not_specialize_on_alignment=PER_TOKEN)
def sums_of_blocks_kernel(
    logits, token_ids, mask, ignore_index: tl.int64, temperatures, scale, squash,
    length, stride_b: tl.int64, stride_t: tl.int64, vocabulary,
    partial_sums, of_tokens, SPEC: tl.constexpr,
):  # fmt: skip
    LANES: tl.constexpr = SPEC.lanes
    BLOCK: tl.constexpr = COLUMNS_PER_LANE * LANES
    program = tl.program_id(0).to(tl.int64)
    index = program // tl.cdiv(vocabulary, BLOCK)
    token_id = tl.load(token_ids + index)
    if row_counts(index, token_id, mask, ignore_index):
        start = ((program - index * tl.cdiv(vocabulary, BLOCK)) * BLOCK).to(tl.int32)
        _, binary_gain = row_gain(index, temperatures, scale, True)
        row = row_start(logits, index, length, stride_b, stride_t, SPEC)
        token = token_column(token_id, vocabulary)
        left, place = vocabulary - start, token - start
        if start + BLOCK <= vocabulary:
            sums = block_sums(row + start, left, place, binary_gain, squash, False, SPEC)
        else:
            sums = block_sums(row + start, left, place, binary_gain, squash, True, SPEC)
        _store_sums(partial_sums, program, sums, LANES)
        if start == 0:
            at = of_tokens + index * OF_TOKEN
            tl.store(at, token_logit(row, token, True))
            beside = token_lane_sums(row, token, vocabulary, binary_gain, squash, SPEC)
            tl.store(at + 1, beside.largest)
            tl.store(at + 2, beside.s)
            tl.store(at + 3, beside.st)
            tl.store(at + 4, beside.ss)


def sums_of_blocks(arguments: dict[str, Any], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the sums of every block, each by a separate program, and the values of the tokens.

    These are the token's logit and `token_lane_sums`: other programs may overwrite the logits with
    their gradient.
    """
    logits = arguments["logits"]
    B, T, V = logits.shape
    blocks = blocks_of(V)
    shape = (B * T, blocks, len(Sums._fields), options["SPEC"].lanes)
    partial_sums = logits.new_empty(shape, dtype=torch.float32)
    of_tokens = logits.new_empty((B, T, OF_TOKEN.value), dtype=torch.float32)
    sums_of_blocks_kernel[(B * T * blocks,)](
        **arguments, partial_sums=partial_sums, of_tokens=of_tokens, **options
    )
    return partial_sums, of_tokens

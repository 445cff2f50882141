"""The first sweep over a row: its maximum, and the sums that its statistics come from.

Every block is summed relative to its own maximum per lane, and the blocks are folded in their
order, which costs one rescaling per block and leaves the exponentials independent of the fold. A
row that is split over programs is folded from the same blocks in the same order.

Sums are (largest logit, sum 2^t, sum 2^t t, sum 4^t), t relative to the exponent of the largest.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    load_block,
    row_offset,
    row_slope,
    token_logit,
    value,
)


@triton.jit
def block_sums(block, columns_left, multiplier, squash, MASKED: tl.constexpr, PLAN: tl.constexpr):
    """Return the sums [lanes] of a block, masked if fewer columns are left than it has."""
    TILES: tl.constexpr = COLUMNS_PER_LANE // PLAN.width
    tiles = load_block(block, columns_left, MASKED, PLAN)
    largest = tiles[0]
    for tile in tl.static_range(1, TILES):
        largest = tl.maximum(largest, tiles[tile])  # loses NaN: the sum will show it
    largest = tl.max(largest, axis=1)
    v = value(largest, squash, PLAN)
    factor = exponent_factor(v, multiplier)
    reference = finite_or_zero(v * factor)[:, None]
    for tile in tl.static_range(TILES):
        x = tiles[tile]
        t = exponent(x, value(x, squash, PLAN), factor[:, None], reference, PLAN)
        if PLAN.entropy:
            t = at_least(t)
        e = tl.exp2(t)
        if tile == 0:
            s, st, ss = e, e * t, e * e
        else:
            s, st, ss = s + e, tl.fma(e, t, st), tl.fma(e, e, ss)
    return largest, tl.sum(s, axis=1), tl.sum(st, axis=1), tl.sum(ss, axis=1)


@triton.jit
def fold(sums, following, multiplier, squash, PLAN: tl.constexpr):
    """Return the sums over both, relative to the larger exponent."""
    exponents = value(sums[0], squash, PLAN) * multiplier
    next_exponents = value(following[0], squash, PLAN) * multiplier
    reference = finite_or_zero(tl.where(sums[0] >= following[0], exponents, next_exponents))
    fall, next_fall = at_least(exponents - reference), at_least(next_exponents - reference)
    factor, next_factor = tl.exp2(fall), tl.exp2(next_fall)
    s = tl.fma(sums[1], factor, following[1] * next_factor)
    next_st = tl.fma(following[1], next_fall, following[2]) * next_factor
    st = tl.fma(tl.fma(sums[1], fall, sums[2]), factor, next_st)
    ss = tl.fma(sums[3], factor * factor, following[3] * (next_factor * next_factor))
    return tl.maximum(sums[0], following[0]), s, st if PLAN.entropy else s, ss


@triton.jit
def row_sums(row, partials, index, vocabulary, multiplier, squash, PLAN: tl.constexpr):
    """Return the sums of the row of that index, from the `partials` of all rows if given."""
    LANES: tl.constexpr = PLAN.lanes
    BLOCK: tl.constexpr = COLUMNS_PER_LANE * LANES
    nothing = tl.zeros([LANES], tl.float32)
    sums = (nothing + float("-inf"), nothing, nothing, nothing)
    if partials is not None:
        blocks = tl.cdiv(vocabulary, BLOCK)
        for block in range(blocks):
            at = partials + (index * blocks + block) * (4 * LANES) + tl.arange(0, LANES)
            following = (
                tl.load(at),
                tl.load(at + LANES),
                tl.load(at + 2 * LANES),
                tl.load(at + 3 * LANES),
            )
            sums = fold(sums, following, multiplier, squash, PLAN)
    else:
        full = vocabulary // BLOCK * BLOCK
        for start in range(0, full, BLOCK):
            following = block_sums(row + start, vocabulary - start, multiplier, squash, False, PLAN)
            sums = fold(sums, following, multiplier, squash, PLAN)
        if full < vocabulary:
            following = block_sums(row + full, vocabulary - full, multiplier, squash, True, PLAN)
            sums = fold(sums, following, multiplier, squash, PLAN)
    largest = tl.max(sums[0], axis=0)
    reference = finite_or_zero(value(largest, squash, PLAN) * multiplier)
    fall = at_least(value(sums[0], squash, PLAN) * multiplier - reference)
    factor = tl.exp2(fall)
    s = tl.sum(sums[1] * factor, axis=0)
    st = tl.sum(tl.fma(sums[1], fall, sums[2]) * factor, axis=0)
    ss = tl.sum(sums[3] * (factor * factor), axis=0)
    return largest, s, st, ss


@triton.jit
def row_statistics(sums, multiplier, squash, PLAN: tl.constexpr):
    """Return log_sum, entropy and sum_sq_probs; a row of nothing but -inf has no softmax."""
    largest, s, st, ss = sums
    v = value(largest, squash, PLAN)
    log_s = tl.where(s == 0, float("nan"), tl.log(s))
    entropy = tl.fma(-LN2, st / s, log_s)
    # the sums are relative to the rounded exponent, log_sum to the largest logit itself
    factor = exponent_factor(v, multiplier)
    rest = tl.fma(v, factor, -finite_or_zero(v * factor))
    log_sum = tl.fma(-LN2, rest, log_s)
    # no closer to 0 than a sum near 1 can tell
    log_sum = tl.where(log_sum < 1.2e-7, 0.0, log_sum)
    return log_sum, tl.where(entropy < 1.2e-7, 0.0, entropy), ss / s / s


@triton.jit
def token_logprob(x, largest, log_sum, slope, squash, PLAN: tl.constexpr):
    """Return log p of a logit; NaN where the logit is."""
    t = exact_difference(x, largest, squash, PLAN) * slope
    return tl.where(x == float("-inf"), float("-inf"), t) - log_sum


@triton.jit(do_not_specialize=RUN_TIME, do_not_specialize_on_alignment=PER_TOKEN)
def _sums_of_blocks(
    logits, token_ids, active, temperatures, scale, squash,
    length, stride_b: tl.int64, stride_t: tl.int64, vocabulary,
    partials, chosen, PLAN: tl.constexpr,
):  # fmt: skip
    LANES: tl.constexpr = PLAN.lanes
    BLOCK: tl.constexpr = COLUMNS_PER_LANE * LANES
    program = tl.program_id(0).to(tl.int64)
    index = program // tl.cdiv(vocabulary, BLOCK)
    if tl.load(active + index):
        start = ((program - index * tl.cdiv(vocabulary, BLOCK)) * BLOCK).to(tl.int32)
        _, multiplier = row_slope(index, temperatures, scale, True)
        row = logits + row_offset(index, length, stride_b, stride_t, PLAN)
        if start + BLOCK <= vocabulary:
            sums = block_sums(row + start, vocabulary - start, multiplier, squash, False, PLAN)
        else:
            sums = block_sums(row + start, vocabulary - start, multiplier, squash, True, PLAN)
        at = partials + program * (4 * LANES) + tl.arange(0, LANES)
        for i in tl.static_range(4):
            tl.store(at + i * LANES, sums[i])
        if start == 0:
            tl.store(chosen + index, token_logit(row, tl.load(token_ids + index), vocabulary, True))


def sums_of_blocks(arguments: dict[str, Any], plan: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the sums of every block, each by a program of its own, and the tokens' logits.

    The logits, since a gradient written by other programs may overwrite them.
    """
    logits = arguments["logits"]
    B, T, V = logits.shape
    blocks = blocks_of(V)
    partials = logits.new_empty((B * T, blocks, 4, plan["PLAN"].lanes), dtype=torch.float32)
    chosen = logits.new_empty((B, T), dtype=torch.float32)
    _sums_of_blocks[(B * T * blocks,)](**arguments, partials=partials, chosen=chosen, **plan)
    return partials, chosen

"""The second sweep over a row: its gradient, which may take the place of the logits.

With p_j = 2^t_j norm the gradient of a row is p_j (constant + linear t_j), and at the token what
flows into its log-probability besides. The row is read from its end, which the first sweep has
left in cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastrl.triton.objectives import exp, expm1
from fastrl.triton.vocabulary.row_sums import token_logprob
from fastrl.triton.vocabulary.rows import (
    COLUMNS_PER_LANE,
    LN2,
    at_least,
    exponent,
    exponent_factor,
    finite_or_zero,
    load_block,
    tile_columns,
    value,
)


@triton.jit
def _block_gradient(
    block, grad, columns_left, terms, multiplier, reference, squash,
    MASKED: tl.constexpr, PLAN: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = COLUMNS_PER_LANE // PLAN.width
    tiles = load_block(block, columns_left, MASKED, PLAN)
    for tile in tl.static_range(TILES):
        x = tiles[tile]
        v = value(x, squash, PLAN)
        t = exponent(x, v, multiplier, reference, PLAN)
        factor = terms[0]
        if PLAN.entropy:
            t = at_least(t)
            factor = tl.fma(t, terms[1], terms[0])
        g = tl.exp2(t) * factor
        if PLAN.softcap:
            g *= tl.fma(-v, v, -v)
        columns = tile_columns(tile, PLAN)
        g = g.to(grad.dtype.element_ty)
        if MASKED:
            tl.store(grad + columns, g, mask=columns < columns_left)
        else:
            tl.store(grad + columns, g)


@triton.jit
def _block_zeros(grad, columns_left, MASKED: tl.constexpr, PLAN: tl.constexpr):
    TILES: tl.constexpr = COLUMNS_PER_LANE // PLAN.width
    LANES: tl.constexpr = PLAN.lanes
    WIDTH: tl.constexpr = PLAN.width
    zeros = tl.zeros([LANES, WIDTH], grad.dtype.element_ty)
    for tile in tl.static_range(TILES):
        columns = tile_columns(tile, PLAN)
        if MASKED:
            tl.store(grad + columns, zeros, mask=columns < columns_left)
        else:
            tl.store(grad + columns, zeros)


@triton.jit
def _token_gradient(x, stats, flow, slope, squash, PLAN: tl.constexpr):
    """Return the gradient at the token, where the two parts would cancel as p nears 1."""
    logprob = token_logprob(x, stats[0], stats[1], slope, squash, PLAN)
    held = tl.maximum(logprob, -100.0, propagate_nan=tl.PropagateNan.ALL)
    p = exp(held)
    g = flow[2] * p - flow[0] * expm1(held)
    if PLAN.entropy:
        g -= flow[1] * (held + stats[2]) * p
    if PLAN.softcap:
        v = value(x, squash, PLAN)
        g *= tl.fma(-v, v, -v)
    return tl.where(logprob == float("-inf"), 0.0, g)


@triton.jit
def row_gradient(
    row, grad, moves, token_id, x, stats, flow, vocabulary, slope, multiplier, squash,
    part, parts, PLAN: tl.constexpr,
):  # fmt: skip
    """Write the blocks part, part + parts, ... of a row's gradient, from the last to the first.

    Args:
        row: pointer to the logits.
        grad: pointer to the gradient, may be the same.
        moves: whether the row has a gradient that is not zero.
        token_id: of the row.
        x: its logit, NaN where the id is outside the vocabulary; used by the block it is in.
        stats: largest logit, log_sum and entropy.
        flow: the gradients of log-probability, entropy and log-sum-exp.
        vocabulary: columns of the row.
        slope: dz/dv.
        multiplier: slope in exponents of two.
        squash: inside the softcap.
        part: of the row.
        parts: into which rows are split.
        PLAN: of the launch.
    """
    BLOCK: tl.constexpr = COLUMNS_PER_LANE * PLAN.lanes
    full = vocabulary // BLOCK
    has_tail = (full * BLOCK < vocabulary) & (full % parts == part)
    mine = (full - part + parts - 1) // parts
    if moves:
        known = (token_id >= 0) & (token_id < vocabulary)
        v = value(stats[0], squash, PLAN)
        multiplier = exponent_factor(v, multiplier)
        reference = finite_or_zero(v * multiplier)
        rest = tl.fma(v, multiplier, -reference)
        chain = slope
        if PLAN.softcap:
            chain = slope * squash * LN2
        norm = exp(-stats[1]) * tl.exp2(-rest) * chain
        constant = flow[2] - tl.where(known | (flow[0] == 0), flow[0], float("nan"))
        if PLAN.entropy:
            constant -= flow[1] * (stats[2] - stats[1] - LN2 * rest)
        terms = (constant * norm, -flow[1] * LN2 * norm)
        of_token = _token_gradient(x, stats, flow, slope, squash, PLAN) * chain
        tl.debug_barrier()  # everyone has read the token's logit before anyone overwrites it
        if has_tail:
            _block_gradient(
                row + full * BLOCK, grad + full * BLOCK, vocabulary - full * BLOCK, terms,
                multiplier, reference, squash, True, PLAN,
            )  # fmt: skip
        for i in range(mine):
            start = (part + (mine - 1 - i) * parts).to(tl.int64) * BLOCK
            _block_gradient(
                row + start, grad + start, BLOCK, terms,
                multiplier, reference, squash, False, PLAN,
            )  # fmt: skip
        tl.debug_barrier()  # and the token's gradient comes after that of its block
        owner = known & ((token_id // BLOCK) % parts == part)
        tl.store(grad + token_id, of_token.to(grad.dtype.element_ty), mask=owner)
    else:
        if has_tail:
            _block_zeros(grad + full * BLOCK, vocabulary - full * BLOCK, True, PLAN)
        for i in range(mine):
            _block_zeros(grad + (part + i * parts) * BLOCK, BLOCK, False, PLAN)

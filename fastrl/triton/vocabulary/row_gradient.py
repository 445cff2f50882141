"""The second sweep over a row: its gradient, which may overwrite the logits.

With p_j = 2^t_j norm the gradient of a row is p_j (constant + linear t_j), plus dL/dlogprob at the
token. The row is read from its end, which the first sweep has left in cache. A bfloat16 gradient of
float32 logits may fill the second half of their row: element j then begins at byte
2 stride + 2 j >= 4 j, so once its block is read, it lies beyond all logits that are still to be
read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fastrl.triton.objectives import exp, expm1
from fastrl.triton.vocabulary.row_loads import load_block, tile_columns, tile_mask
from fastrl.triton.vocabulary.row_sums import token_logprob
from fastrl.triton.vocabulary.rows import (
    COLUMNS_PER_LANE,
    LN2,
    at_least,
    exponent,
    exponent_factor,
    finite_or_zero,
    token_logit,
    value,
)


class Slopes(NamedTuple):
    """The derivatives of the loss with respect to the statistics of a row."""

    logprob: Any
    entropy: Any
    logsumexp: Any


class RowTerms(NamedTuple):
    """The gradient of a row, 2^t (constant + linear t), under a softcap times dv/dx."""

    constant: Any
    linear: Any


@triton.jit
def _head(grad, vocabulary, SPEC: tl.constexpr):
    """Return how many columns come before the first multiple of 16 bytes of the gradient."""
    SIZE: tl.constexpr = grad.dtype.element_ty.primitive_bitwidth // 8
    return tl.minimum(((-grad.to(tl.int64) & 15) // SIZE).to(tl.int32), vocabulary)


@triton.jit
def _edges(head, vocabulary, split, owner_of_tail, SPEC: tl.constexpr):
    """Return the columns at the ends of a row that do not fill 16 bytes, and their mask."""
    WIDTH: tl.constexpr = SPEC.width
    place = tl.arange(0, 2 * WIDTH)
    tail = place - WIDTH + head + (vocabulary - head) // WIDTH * WIDTH
    in_head = (place < head) & (split == 0)
    in_tail = (tail < vocabulary) & (split == owner_of_tail)
    columns = tl.where(place < WIDTH, place, tail)
    return columns, tl.where(place < WIDTH, in_head, in_tail)


@triton.jit
def _gradient(x, row_terms, binary_gain, reference, squash, SPEC: tl.constexpr):
    v = value(x, squash, SPEC)
    t = exponent(x, v, binary_gain, reference, SPEC)
    factor = row_terms.constant
    if SPEC.entropy:
        t = at_least(t)
        factor = tl.fma(t, row_terms.linear, row_terms.constant)
    g = tl.exp2(t) * factor
    if SPEC.softcap:
        g *= tl.fma(-v, v, -v)
    return g


@triton.jit
def _block_gradient(
    block, grad, limit, row_terms, binary_gain, reference, squash,
    MASKED: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = COLUMNS_PER_LANE // SPEC.width
    tiles = load_block(block, limit, MASKED, SPEC.together, SPEC)
    if grad.dtype.element_ty != block.dtype.element_ty:
        tl.debug_barrier()  # the gradient may overwrite logits that other threads read
    for tile in tl.static_range(TILES):
        g = _gradient(tiles[tile], row_terms, binary_gain, reference, squash, SPEC)
        place = grad + tile_columns(tile, SPEC)
        if MASKED:
            mask = tile_mask(tile, limit, SPEC.width, SPEC)
            tl.store(place, g.to(grad.dtype.element_ty), mask=mask, cache_modifier=".cs")
        else:  # read at most once more: the rest of the row must stay in the cache
            tl.store(place, g.to(grad.dtype.element_ty), cache_modifier=".cs")


@triton.jit
def _block_zeros(grad, limit, MASKED: tl.constexpr, SPEC: tl.constexpr):
    TILES: tl.constexpr = COLUMNS_PER_LANE // SPEC.width
    LANES: tl.constexpr = SPEC.lanes
    WIDTH: tl.constexpr = SPEC.width
    zeros = tl.zeros([LANES, WIDTH], grad.dtype.element_ty)
    for tile in tl.static_range(TILES):
        place = grad + tile_columns(tile, SPEC)
        if MASKED:
            tl.store(
                place, zeros, mask=tile_mask(tile, limit, SPEC.width, SPEC), cache_modifier=".cs"
            )
        else:
            tl.store(place, zeros, cache_modifier=".cs")


@triton.jit
def token_gradient(x, stats, slopes, gain, squash, SPEC: tl.constexpr):
    """Return the gradient at the token, where its two terms would cancel as p nears 1."""
    logprob = token_logprob(x, stats.row_max, stats.log_sum, gain, squash, SPEC)
    held = tl.maximum(logprob, -100.0, propagate_nan=tl.PropagateNan.ALL)
    p = exp(held)
    g = slopes.logsumexp * p - slopes.logprob * expm1(held)
    if SPEC.entropy:
        g -= slopes.entropy * (held + stats.entropy) * p
    if SPEC.softcap:  # -v (1 + v), which cancels next to the cap
        decay = tl.exp2(-tl.abs(x * squash))
        g *= decay / ((1.0 + decay) * (1.0 + decay))
    return tl.where(logprob == float("-inf"), 0.0, g)


@triton.jit
def _owns(column, split, splits, SPEC: tl.constexpr):
    """Return whether a column, counted from the head's end, is in a block of this program."""
    return column // (COLUMNS_PER_LANE * SPEC.lanes) % splits == split


@triton.jit
def row_gradient(
    row, grad, has_gradient, token, x, stats, slopes, vocabulary, gain, binary_gain, squash,
    split, splits, SPEC: tl.constexpr,
):  # fmt: skip
    """Write the blocks split, split + splits, ... of a row's gradient, from the last to the first.

    Args:
        row: pointer to the logits.
        grad: pointer to the gradient; the same, or half a row further with half the width.
        has_gradient: whether the gradient of the row may be nonzero.
        token: the column of the token, -1 if its id is outside the vocabulary.
        x: the logit of the token, NaN if it has no column; None if it is still in the row.
        stats: `Statistics` of the row.
        slopes: `Slopes` of the row.
        vocabulary: columns of the row.
        gain: dz/dv.
        binary_gain: gain in exponents of two.
        squash: the factor inside the softcap.
        split: the index of this program among those that share the row.
        splits: the number of programs that share the row.
        SPEC: `Specialization` of the launch.
    """
    BLOCK: tl.constexpr = COLUMNS_PER_LANE * SPEC.lanes
    WIDTH: tl.constexpr = SPEC.width
    head, blocks, grad_blocks = 0, row, grad
    if not SPEC.aligned:
        head = _head(grad, vocabulary, SPEC)
        blocks, grad_blocks = row + head, tl.multiple_of(grad + head, 16)
        if SPEC.together:
            blocks = tl.multiple_of(blocks, 16)
    full = (vocabulary - head) // BLOCK
    tail = full * BLOCK
    limit = (vocabulary - head - tail) // WIDTH * WIDTH
    has_tail = (limit > 0) & (full % splits == split)
    mine = (full - split + splits - 1) // splits
    logit = x
    if x is None:  # another program may have overwritten its columns
        logit = token_logit(row, token, has_gradient & _owns(token - head, split, splits, SPEC))
    if has_gradient:
        known = token >= 0
        v = value(stats.row_max, squash, SPEC)
        binary_gain = exponent_factor(v, binary_gain)
        reference = finite_or_zero(v * binary_gain)
        rest = tl.fma(v, binary_gain, -reference)
        chain = gain
        if SPEC.softcap:
            chain = gain * squash * LN2
        norm = exp(-stats.log_sum) * tl.exp2(-rest) * chain
        of_token = tl.where(known | (slopes.logprob == 0), slopes.logprob, float("nan"))
        constant = slopes.logsumexp - of_token
        if SPEC.entropy:
            constant -= slopes.entropy * (stats.entropy - stats.log_sum - LN2 * rest)
        row_terms = RowTerms(constant * norm, -slopes.entropy * LN2 * norm)
        at_token = token_gradient(logit, stats, slopes, gain, squash, SPEC) * chain
        if SPEC.edges:
            edges, is_mine = _edges(head, vocabulary, split, full % splits, SPEC)
            x_edges = tl.load(row + edges, mask=is_mine, other=0).to(tl.float32)
        tl.debug_barrier()  # all threads must read these logits before any overwrites them
        if has_tail:
            _block_gradient(
                blocks + tail, grad_blocks + tail, limit, row_terms,
                binary_gain, reference, squash, True, SPEC,
            )  # fmt: skip
        for i in range(mine):
            start = (split + (mine - 1 - i) * splits).to(tl.int64) * BLOCK
            _block_gradient(
                blocks + start, grad_blocks + start, BLOCK, row_terms,
                binary_gain, reference, squash, False, SPEC,
            )  # fmt: skip
        tl.debug_barrier()  # the following stores overwrite logits, and one in the token's block
        if SPEC.edges:
            g = _gradient(x_edges, row_terms, binary_gain, reference, squash, SPEC)
            mask = is_mine & (edges != token)
            tl.store(grad + edges, g.to(grad.dtype.element_ty), mask=mask)
        owner = known & _owns(token - head, split, splits, SPEC)
        tl.store(grad + token, at_token.to(grad.dtype.element_ty), mask=owner)
    else:
        if has_tail:
            _block_zeros(grad_blocks + tail, limit, True, SPEC)
        for i in range(mine):
            start = (split + i * splits).to(tl.int64) * BLOCK
            _block_zeros(grad_blocks + start, BLOCK, False, SPEC)
        if SPEC.edges:
            edges, is_mine = _edges(head, vocabulary, split, full % splits, SPEC)
            tl.store(grad + edges, tl.zeros([2 * WIDTH], grad.dtype.element_ty), mask=is_mine)

"""Loads of a block of a row, which give each lane its columns wherever the row begins.

If rows are aligned, a lane reads 16 bytes at a time. Otherwise it reads words of 4 bytes, and
shifts 16-bit logits that begin in the middle of a word into place. Each word, or 16 bytes, that is
read contains at least one wanted column, so no load goes beyond the 16 bytes that hold a row's
first or last column.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastrl.triton.vocabulary.rows import COLUMNS_PER_LANE


@triton.jit
def _lane_starts(tile, each: tl.constexpr, SPEC: tl.constexpr):
    """Return where each lane starts in a tile with `each` columns or words per lane."""
    LANES: tl.constexpr = SPEC.lanes
    return tile * (LANES * each) + tl.arange(0, LANES) * each


@triton.jit
def tile_columns(tile, SPEC: tl.constexpr):
    """Return the columns [lanes, width] of a tile of a block."""
    WIDTH: tl.constexpr = SPEC.width
    return _lane_starts(tile, WIDTH, SPEC)[:, None] + tl.arange(0, WIDTH)[None, :]


@triton.jit
def tile_mask(tile, limit, width: tl.constexpr, SPEC: tl.constexpr):
    """Return [lanes, width] whether the first column of each lane is below the limit."""
    LANES: tl.constexpr = SPEC.lanes
    starts = _lane_starts(tile, SPEC.width, SPEC)
    return tl.broadcast_to((starts < limit)[:, None], [LANES, width])


@triton.jit
def _unpacked(words):
    """Return both bfloat16 of each word in float32, the first one from the lower bits.

    That takes one instruction each; converting a single bfloat16 takes up to two.
    """
    low = (words << 16).to(tl.float32, bitcast=True)
    high = (words & -65536).to(tl.float32, bitcast=True)
    return low, high


@triton.jit
def _of_lanes(x0, x1, x2, x3):
    """Return [lanes, 4] from the four values of each lane."""
    return tl.reshape(tl.join(tl.join(x0, x2), tl.join(x1, x3)), [x0.shape[0], 4])


@triton.jit
def _both(word, following):
    """Return two words joined to one of 64 bits."""
    high = following.to(tl.uint32, bitcast=True).to(tl.uint64) << 32
    return high | word.to(tl.uint32, bitcast=True)


@triton.jit
def _load_unaligned_halves(block, tile, limit, MASKED: tl.constexpr, SPEC: tl.constexpr):
    """Return the columns of a tile from the words that hold them, five per lane."""
    tl.static_assert(SPEC.width == 8)
    dtype: tl.constexpr = block.dtype.element_ty
    odd = ((block.to(tl.int64) >> 1) & 1).to(tl.int32)  # the first column is a word's second half
    starts = _lane_starts(tile, 8, SPEC)
    place = (block - odd).to(tl.pointer_type(tl.int32)) + _lane_starts(tile, 4, SPEC)
    words = ()
    for i in tl.static_range(5):
        step = i if i < 4 else 3 + odd  # only shifted columns need a fifth word
        if MASKED:
            word = tl.load(place + step, mask=starts + (2 * step - odd) < limit, other=0)
        else:
            word = tl.load(place + step)
        words = words + (word,)  # type: ignore[assignment]  # noqa: RUF005  Triton cannot unpack
    w0, w1, w2, w3, w4 = words  # type: ignore[misc]
    first, second = _both(w0, w1), _both(w1, w2)
    third, fourth = _both(w2, w3), _both(w3, w4)
    shift = odd.to(tl.uint64) * 16
    shifted = _of_lanes(first >> shift, second >> shift, third >> shift, fourth >> shift)
    if dtype == tl.bfloat16:
        low, high = _unpacked(shifted.to(tl.int32))
    else:  # a shift of both words each, since the compiler would shift both again for the second
        shift += 16
        upper = _of_lanes(first >> shift, second >> shift, third >> shift, fourth >> shift)
        low = shifted.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        high = upper.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return tl.interleave(low, high)


@triton.jit
def _load_unaligned_words(block, tile, limit, MASKED: tl.constexpr, SPEC: tl.constexpr):
    """Return the columns of a tile of float32, so that each lane has one thread."""
    WIDTH: tl.constexpr = SPEC.width
    starts = _lane_starts(tile, WIDTH, SPEC)
    words = ()
    for i in tl.static_range(WIDTH):
        if MASKED:
            word = tl.load(block + starts + i, mask=starts + i < limit, other=0)
        else:
            word = tl.load(block + starts + i)
        words = words + (word,)  # type: ignore[assignment]  # noqa: RUF005  Triton cannot unpack
    if WIDTH == 4:
        w0, w1, w2, w3 = words  # type: ignore[misc]
        x = _of_lanes(w0, w1, w2, w3)
    else:
        w0, w1, w2, w3, w4, w5, w6, w7 = words  # type: ignore[misc]
        x = tl.interleave(_of_lanes(w0, w2, w4, w6), _of_lanes(w1, w3, w5, w7))
    return x


@triton.jit
def load_tile(block, tile, limit, MASKED: tl.constexpr, ALIGNED: tl.constexpr, SPEC: tl.constexpr):
    """Return the columns [lanes, width] of a tile in float32.

    If it is masked, values beyond the limit are unspecified.
    """
    WIDTH: tl.constexpr = SPEC.width
    dtype: tl.constexpr = block.dtype.element_ty
    if dtype.primitive_bitwidth == 16 and not ALIGNED:
        x = _load_unaligned_halves(block, tile, limit, MASKED, SPEC)
    elif not ALIGNED:
        x = _load_unaligned_words(block, tile, limit, MASKED, SPEC)
    elif dtype == tl.bfloat16:
        PAIRS: tl.constexpr = WIDTH // 2
        pairs = _lane_starts(tile, PAIRS, SPEC)[:, None] + tl.arange(0, PAIRS)[None, :]
        place = block.to(tl.pointer_type(tl.int32)) + pairs
        if MASKED:
            words = tl.load(place, mask=tile_mask(tile, limit, PAIRS, SPEC), other=0)
        else:
            words = tl.load(place)
        low, high = _unpacked(words)
        x = tl.interleave(low, high)
    else:
        columns = tile_columns(tile, SPEC)
        mask = tile_mask(tile, limit, WIDTH, SPEC)
        x = tl.load(block + columns, mask=mask, other=0) if MASKED else tl.load(block + columns)
        x = x.to(tl.float32)
    return x


@triton.jit
def load_block(block, limit, MASKED: tl.constexpr, ALIGNED: tl.constexpr, SPEC: tl.constexpr):
    """Return the tiles of a block; for values beyond the limit see `load_tile`."""
    TILES: tl.constexpr = COLUMNS_PER_LANE // SPEC.width
    tiles = ()
    for tile in tl.static_range(TILES):
        x = load_tile(block, tile, limit, MASKED, ALIGNED, SPEC)
        tiles = tiles + (x,)  # type: ignore[assignment]  # noqa: RUF005  Triton cannot unpack
    return tiles


@triton.jit
def load_columns(block, columns_left, MASKED: tl.constexpr, SPEC: tl.constexpr):
    """Return the tiles of a block, with -inf where a masked one has no columns."""
    TILES: tl.constexpr = COLUMNS_PER_LANE // SPEC.width
    tiles = ()
    for tile in tl.static_range(TILES):
        x = load_tile(block, tile, columns_left, MASKED, SPEC.aligned, SPEC)
        if MASKED:
            x = tl.where(tile_columns(tile, SPEC) < columns_left, x, float("-inf"))
        tiles = tiles + (x,)  # type: ignore[assignment]  # noqa: RUF005
    return tiles

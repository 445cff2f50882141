"""Products of hidden states with some rows of an LM head, and the sums of their gradients.

The ids `[C, K]` name rows of the matrix, and an id below 0 stands for no row. All sums are in
float32. The terms of an id are added in order, in blocks of terms sorted by id. The edges of these
blocks depend only on the number of terms, so every run gives the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Ids and columns of the matrix in a tile; a lane reads 16 bytes of it at a time.
IDS, WIDTH = 8, 256
WARPS = 2
#: Columns of a sum of terms, for one warp: enough to outweigh the loads of ids and places.
SCATTERED_WIDTH = 512
#: The fewest sorted terms of a block, and the most blocks, which bounds the memory of their edges.
BLOCK, MOST_BLOCKS = 64, 2048


@triton.jit
def gathered_dots_kernel(
    out, states, matrix, ids, count, width, stride_out: tl.int64, stride_states: tl.int64,
    stride_matrix: tl.int64, IDS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * IDS + tl.arange(0, IDS)
    token = tl.load(ids + row * count + k, mask=k < count, other=-1).to(tl.int64)
    sums = tl.zeros([IDS, WIDTH], tl.float32)
    for first in range(0, width, WIDTH):
        h = first + tl.arange(0, WIDTH)
        x = tl.load(states + row * stride_states + h, mask=h < width, other=0.0).to(tl.float32)
        mask = (token >= 0)[:, None] & (h < width)[None, :]
        y = tl.load(matrix + token[:, None] * stride_matrix + h[None, :], mask=mask, other=0.0)
        sums += x[None, :] * y.to(tl.float32)
    place = out + row * stride_out + k
    total = tl.load(place, mask=token >= 0, other=0.0) + tl.sum(sums, 1)
    tl.store(place, total, mask=token >= 0)


@triton.jit
def gathered_sums_kernel(
    out, factors, matrix, ids, count, width, stride_out: tl.int64, stride_factors: tl.int64,
    stride_matrix: tl.int64, IDS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    sums = tl.zeros([IDS, WIDTH], tl.float32)
    for first in range(0, count, IDS):
        k = first + tl.arange(0, IDS)
        token = tl.load(ids + row * count + k, mask=k < count, other=-1).to(tl.int64)
        x = tl.load(factors + row * stride_factors + k, mask=token >= 0, other=0.0).to(tl.float32)
        mask = (token >= 0)[:, None] & (h < width)[None, :]
        y = tl.load(matrix + token[:, None] * stride_matrix + h[None, :], mask=mask, other=0.0)
        sums += x[:, None] * y.to(tl.float32)
    place = out + row * stride_out + h
    total = tl.load(place, mask=h < width, other=0.0) + tl.sum(sums, 0)
    tl.store(place, total, mask=h < width)


@triton.jit
def scattered_sums_kernel(
    out, heads, tails, factors, states, ids, order, total, block, count, width,
    stride_out: tl.int64, stride_factors: tl.int64, stride_states: tl.int64, WIDTH: tl.constexpr,
):  # fmt: skip
    """Add the sums of ids within a block of sorted terms, and store those at its edges."""
    index = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = h < width
    edge = index * width + h
    first = index * block
    end = tl.minimum(first + block, total)
    token = tl.load(ids + first)
    # whether the id began before this block; ids below 0 come first
    before = (token >= 0) & (tl.load(ids + first - 1, mask=first > 0, other=-1) == token)
    sums = tl.zeros([WIDTH], tl.float32)
    for place in range(first, end):
        following = tl.load(ids + place + 1, mask=place + 1 < total, other=-1)
        goes_on = following == token
        if token >= 0:
            at = tl.load(order + place).to(tl.int32)
            row = at // count
            factor = tl.load(factors + row * stride_factors + (at - row * count)).to(tl.float32)
            x = tl.load(states + row * stride_states + h, mask=mask, other=0.0).to(tl.float32)
            sums += factor * x
            if before & ((place + 1 == end) | (goes_on == 0)):
                tl.store(heads + edge, sums, mask=mask)
            elif goes_on == 0:
                here = out + token.to(tl.int64) * stride_out + h
                tl.store(here, tl.load(here, mask=mask, other=0.0) + sums, mask=mask)
            elif place + 1 == end:
                tl.store(tails + edge, sums, mask=mask)
            sums = tl.where(goes_on, sums, 0.0)
            before = before & goes_on
        token = following


@triton.jit
def edge_sums_kernel(
    out, heads, tails, ids, stops, total, block, width, stride_out: tl.int64, WIDTH: tl.constexpr,
):  # fmt: skip
    """Add the sums of an id that began in a block of sorted terms and goes on in the next ones."""
    index = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = h < width
    first = index * block
    last = tl.minimum(first + block, total) - 1
    token = tl.load(ids + last)
    before = tl.load(ids + first - 1, mask=first > 0, other=-1) == token
    stop = tl.load(stops + index)  # the end of this id's terms
    if (token >= 0) & (before == 0) & (stop > last + 1):
        sums = tl.load(tails + index * width + h, mask=mask, other=0.0)
        for after in range(index + 1, (stop - 1) // block + 1):
            sums += tl.load(heads + after * width + h, mask=mask, other=0.0)
        here = out + token.to(tl.int64) * stride_out + h
        tl.store(here, tl.load(here, mask=mask, other=0.0) + sums, mask=mask)


def gathered_dots_(out: Tensor, states: Tensor, matrix: Tensor, ids: Tensor) -> None:
    rows, count = ids.shape
    if ids.numel():
        gathered_dots_kernel[(rows, triton.cdiv(count, IDS))](
            out, states, matrix, ids, count, matrix.shape[1],
            out.stride(0), states.stride(0), matrix.stride(0),
            IDS=IDS, WIDTH=WIDTH, num_warps=WARPS, enable_fp_fusion=True,
        )  # fmt: skip


def gathered_sums_(out: Tensor, factors: Tensor, matrix: Tensor, ids: Tensor) -> None:
    rows, count = ids.shape
    width = matrix.shape[1]
    if ids.numel():
        gathered_sums_kernel[(rows, triton.cdiv(width, WIDTH))](
            out, factors, matrix, ids, count, width,
            out.stride(0), factors.stride(0), matrix.stride(0),
            IDS=IDS, WIDTH=WIDTH, num_warps=WARPS, enable_fp_fusion=True,
        )  # fmt: skip


def scattered_sums_(out: Tensor, factors: Tensor, states: Tensor, ids: Tensor) -> None:
    total, width = ids.numel(), states.shape[1]
    if not total:
        return
    block = max(BLOCK, triton.cdiv(total, MOST_BLOCKS))
    blocks = triton.cdiv(total, block)
    by_id, order = ids.flatten().sort(stable=True)
    stops = torch.searchsorted(by_id, by_id[block - 1 :: block].contiguous(), right=True)
    if blocks > stops.shape[0]:  # the last one is shorter
        stops = torch.nn.functional.pad(stops, (0, 1), value=total)
    heads, tails = states.new_empty((2, blocks, width), dtype=torch.float32)
    grid = (blocks, triton.cdiv(width, SCATTERED_WIDTH))
    scattered_sums_kernel[grid](
        out, heads, tails, factors, states, by_id, order, total, block, ids.shape[1], width,
        out.stride(0), factors.stride(0), states.stride(0),
        WIDTH=SCATTERED_WIDTH, num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip
    edge_sums_kernel[grid](
        out, heads, tails, by_id, stops, total, block, width, out.stride(0),
        WIDTH=SCATTERED_WIDTH, num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip

"""The product of a finished gradient and the upstream factor, at almost no cost if that is 1."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrl.segments import segments_of

WARPS = 8
BYTES_PER_THREAD = 64
EDGE = 4096
PROGRAMS_PER_PROCESSOR = 4
#: Segments of fewer elements would leave most threads without work.
SHORTEST_SEGMENT = 32


@triton.jit
def _scaled(x, by):
    return (x.to(tl.float32) * by).to(x.dtype)


@triton.jit(
    do_not_specialize=("segments", "length", "stride", "blocks"),
    do_not_specialize_on_alignment=("gradient", "factor"),
)
def scale_kernel(
    gradient, factor, segments, length: tl.int64, stride: tl.int64, blocks,
    BLOCK: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Scale all segments; in each, `blocks` whole blocks fit behind a head of any length."""
    by = tl.load(factor).to(tl.float32)
    if by != 1.0:
        SIZE: tl.constexpr = gradient.dtype.element_ty.primitive_bitwidth // 8
        for item in range(tl.program_id(0), segments * blocks, tl.num_programs(0)):
            segment = item // blocks
            start = gradient + segment.to(tl.int64) * stride
            head = (-start.to(tl.int64) & 15) // SIZE  # ends at a multiple of 16 bytes
            start += head + (item - segment * blocks).to(tl.int64) * BLOCK
            place = tl.multiple_of(start, 16) + tl.arange(0, BLOCK)
            tl.store(place, _scaled(tl.load(place), by))
        for segment in range(tl.program_id(0), segments, tl.num_programs(0)):
            start = gradient + tl.cast(segment, tl.int64) * stride
            head = (-start.to(tl.int64) & 15) // SIZE
            inside = blocks.to(tl.int64) * BLOCK
            for first in range(0, (length - inside).to(tl.int32), EDGE):
                column = first + tl.arange(0, EDGE)
                place = start + tl.where(column < head, column, column + inside)
                mask = column < length - inside
                tl.store(place, _scaled(tl.load(place, mask=mask), by), mask=mask)


@functools.cache
def programs_of(device: torch.device) -> int:
    """Return the number of programs in a launch: they loop, or end at once if the factor is 1."""
    if device.type == "cpu":
        return PROGRAMS_PER_PROCESSOR
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return PROGRAMS_PER_PROCESSOR * int(processors)


def scale_(gradient: Tensor, factor: Tensor) -> None:
    if not gradient.numel():
        return
    segments = segments_of(gradient)
    if segments is None or (segments[0] > 1 and segments[1] < SHORTEST_SEGMENT):
        gradient.mul_(factor)
        return
    count, length, stride = segments
    width = 16 // gradient.element_size()
    block = BYTES_PER_THREAD // 16 * width * WARPS * 32
    blocks = max(length - (width - 1), 0) // block
    scale_kernel[(min(count * max(blocks, 1), programs_of(gradient.device)),)](
        gradient,
        factor,
        count,
        length,
        stride,
        blocks,
        BLOCK=block,
        EDGE=EDGE,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )

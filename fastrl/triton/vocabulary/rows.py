"""Rows of logits as the kernels of vocabulary size take them: addresses, scaling, launch shapes.

A row is cut in blocks of 32 columns per lane, and each lane belongs to one thread: in every block
it reads its columns 16 bytes at a time, and keeps sums of its own. Block and lane depend on the
vocabulary and the dtype alone, and so does every bit of a result.

Up to a constant z is slope * v, for v = x, or v = -1 / (1 + exp(2 scale x / cap)) under a softcap;
the kernels work on v, and on exponents of two, multiplier * v.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrl.triton.objectives import clamp, expm1
from fastrl.triton.runtime.target import Target

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
COLUMNS_PER_LANE = tl.constexpr(32)
_MOST_LANES = 512

#: Arguments whose value must not lead to another compilation, ...
RUN_TIME = ("length", "stride_b", "stride_t", "grad_stride_b", "grad_stride_t", "parts")
#: ... and tensors of which parts with any alignment are passed.
PER_TOKEN = (
    "token_ids",
    "active",
    "temperatures",
    "advantages",
    "weights",
    "kl_weights",
    "entropy_weights",
    "old_logprobs",
    "ref_logprobs",
    "row_max",
    "log_sum",
    "entropy",
    "grad_logprobs",
    "grad_entropy",
    "grad_logsumexp",
)


class Plan(NamedTuple):
    """What a kernel on rows of logits is compiled for.

    Attributes:
        lanes: threads that share a row.
        width: logits in 16 bytes.
        aligned: rows start at multiples of 16 bytes.
        softcap: there is one.
        entropy: sums for the entropy are kept; in a gradient, it has a part.
        squares: sums for sum_sq_probs are kept.
    """

    lanes: int
    width: int
    aligned: bool
    softcap: bool
    entropy: bool
    squares: bool


def lanes_of(vocabulary: int) -> int:
    """Return how many lanes share a row: as many as one block can use, from 32 to 512."""
    wanted: int = triton.next_power_of_2(triton.cdiv(vocabulary, COLUMNS_PER_LANE.value))
    return min(max(wanted, 32), _MOST_LANES)


def blocks_of(vocabulary: int) -> int:
    """Return how many blocks a row has."""
    return -(-vocabulary // (int(COLUMNS_PER_LANE.value) * lanes_of(vocabulary)))


@functools.cache
def processors(device: torch.device) -> int:
    """Return how many multiprocessors want work; a CPU has none to fill."""
    if device.type == "cpu":
        return 0
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def parts_of(logits: Tensor) -> int:
    """Return over how many programs to split each row: more than one where rows are few."""
    rows = logits.shape[0] * logits.shape[1]
    return max(1, min(blocks_of(logits.shape[2]), processors(logits.device) // max(rows, 1)))


def plan(
    *tensors: Tensor, softcap: float, entropy: bool = False, squares: bool = False
) -> dict[str, Any]:
    """Return the plan of a launch on these tensors `[B, T, V]`, and its options."""
    lanes, width = lanes_of(tensors[0].shape[2]), 16 // tensors[0].element_size()
    aligned = all(
        tensor.data_ptr() % 16 == 0
        and all(
            size == 1 or stride % width == 0
            for size, stride in zip(tensor.shape[:2], tensor.stride(), strict=False)
        )
        for tensor in tensors
    )
    return {
        "PLAN": Plan(lanes, width, aligned, softcap != 0, entropy, squares),
        "num_warps": max(1, lanes // (64 if torch.version.hip else 32)),
        # what the compiler fuses may differ between two kernels that must agree: the fused
        # multiply-adds are all written out
        "enable_fp_fusion": False,
    }


def row_arguments(
    logits: Tensor,
    token_ids: Tensor,
    active: Tensor,
    temperatures: Tensor | None,
    temperature: float,
    logit_scale: float,
    logit_softcap: float,
) -> dict[str, Any]:
    """Return the arguments that every kernel on logits shares, by name."""
    scale, squash = logit_scale / temperature, 0.0
    if logit_softcap:
        scale = 2 * logit_softcap / temperature
        squash = 2 * LOG2E.value * logit_scale / logit_softcap
    return {
        "logits": logits,
        "token_ids": token_ids,
        "active": active,
        "temperatures": temperatures,
        "scale": scale,
        "squash": squash,
        "length": logits.shape[1],
        "stride_b": logits.stride(0),
        "stride_t": logits.stride(1),
        "vocabulary": logits.shape[2],
    }


_BITS = {"bf16": 16, "fp16": 16, "fp32": 32}


class Variant(NamedTuple):
    """What else than a model's plain bf16 logits is compiled ahead of time."""

    dtype: str
    softcap: bool = False
    per_row: bool = False


#: By the end of the target's name.
VARIANTS = {
    "": Variant("bf16"),
    "_fp32": Variant("fp32"),
    "_fp16_per_row": Variant("fp16", per_row=True),
    "_softcap_per_row": Variant("bf16", softcap=True, per_row=True),
}


def row_target(
    name: str, kernel: Any, dtype: str, types: dict[str, str], *, softcap: bool = False,
    per_row: bool = False, entropy: bool = True, **others: Any,
) -> Target:  # fmt: skip
    """Return a compile target at a vocabulary of 151936: what `row_arguments` and `plan` give."""
    constants = others.pop("constants", {})
    plan = Plan(_MOST_LANES, 128 // _BITS[dtype], True, softcap, entropy, False)
    rows = {
        "logits": f"*{dtype}", "token_ids": "*i64", "active": "*i1", "scale": "fp32",
        "squash": "fp32", "length": "i32", "stride_b": "i64", "stride_t": "i64",
        "vocabulary": "i32",
    }  # fmt: skip
    if per_row:
        rows["temperatures"] = "*fp32"
    if "grad" in kernel.arg_names:
        rows |= {"grad": f"*{dtype}", "grad_stride_b": "i64", "grad_stride_t": "i64"}
        rows["parts"] = "i32"
    return Target(
        name,
        kernel,
        rows | types,
        {"PLAN": plan, **constants},
        divisible=("logits", "grad", "vocabulary"),
        num_warps=_MOST_LANES // 32,
        amd_num_warps=_MOST_LANES // 64,
        element_bytes=_BITS[dtype] // 8,
        options={"enable_fp_fusion": False},
        **others,
    )


@triton.jit
def row_offset(index, length, stride_b, stride_t, PLAN: tl.constexpr):
    """Return where a row starts; in 64 bits, since the logits may pass 2^31."""
    batch = index // length
    offset = batch * stride_b + (index - batch * length) * stride_t
    if PLAN.aligned:
        WIDTH: tl.constexpr = PLAN.width
        offset = tl.multiple_of(offset, WIDTH)
    return offset


@triton.jit
def tile_columns(tile, PLAN: tl.constexpr):
    """Return the columns [lanes, width] of one tile of a block."""
    LANES: tl.constexpr = PLAN.lanes
    WIDTH: tl.constexpr = PLAN.width
    lane = tl.arange(0, LANES)[:, None] * WIDTH
    columns = tile * (LANES * WIDTH) + lane + tl.arange(0, WIDTH)[None, :]
    if not PLAN.aligned:
        # Accesses are narrow then; said to run along the lanes, they leave each thread the columns
        # that it has elsewhere, and so leave every sum its bits.
        columns = tl.max_contiguous(columns, [LANES, 1])
    return columns


@triton.jit
def _load_tile(block, tile, PLAN: tl.constexpr):
    if PLAN.aligned and block.dtype.element_ty == tl.bfloat16:
        # two at a time: an instruction each, where the conversion of a single one takes up to two
        LANES: tl.constexpr = PLAN.lanes
        PAIRS: tl.constexpr = PLAN.width // 2
        pairs = tile * (LANES * PAIRS) + tl.arange(0, LANES)[:, None] * PAIRS
        pairs += tl.arange(0, PAIRS)[None, :]
        words = tl.load(block.to(tl.pointer_type(tl.int32)) + pairs)
        low = (words << 16).to(tl.float32, bitcast=True)
        high = (words & -65536).to(tl.float32, bitcast=True)
        x = tl.interleave(low, high)
    else:
        x = tl.load(block + tile_columns(tile, PLAN)).to(tl.float32)
    return x


@triton.jit
def load_block(block, columns_left, MASKED: tl.constexpr, PLAN: tl.constexpr):
    """Return the tiles of a block in float32; -inf where a masked one has no columns left."""
    TILES: tl.constexpr = COLUMNS_PER_LANE // PLAN.width
    tiles = ()
    for tile in tl.static_range(TILES):
        if MASKED:
            columns = tile_columns(tile, PLAN)
            x = tl.load(block + columns, mask=columns < columns_left, other=float("-inf"))
            x = x.to(tl.float32)
        else:
            x = _load_tile(block, tile, PLAN)
        tiles = tiles + (x,)  # type: ignore[assignment]  # noqa: RUF005  Triton cannot unpack
    return tiles


@triton.jit
def row_slope(index, temperatures, scale, wanted):
    """Return slope and multiplier of a row."""
    slope = scale
    if temperatures is not None:
        slope = tl.div_rn(scale, tl.load(temperatures + index, mask=wanted, other=1.0))
    return slope, slope * LOG2E


@triton.jit
def value(x, squash, PLAN: tl.constexpr):
    """Return v of a logit."""
    v = x
    if PLAN.softcap:
        root = tl.rsqrt(1.0 + tl.exp2(x * squash))
        v = -root * root
    return v


@triton.jit
def tanh_of_half(x):
    """Return tanh(x / 2) with all its digits: for single logits."""
    shrinkage = expm1(-tl.abs(clamp(x, -80.0, 80.0)))
    tanh = shrinkage / (2.0 + shrinkage)
    return tl.where(x < 0, tanh, -tanh)


@triton.jit
def exact_value(x, squash, PLAN: tl.constexpr):
    """Return v, and 1/2 more under a softcap, with all its digits."""
    v = x
    if PLAN.softcap:
        v = 0.5 * tanh_of_half(x * (squash * LN2))
    return v


@triton.jit
def exact_difference(x, largest, squash, PLAN: tl.constexpr):
    """Return v of one logit less v of another, with all the digits of the difference."""
    difference = x - largest
    if PLAN.softcap:  # tanh a - tanh b = tanh(a - b) (1 - tanh a tanh b)
        inside = squash * LN2
        product = tanh_of_half(x * inside) * tanh_of_half(largest * inside)
        difference = 0.5 * tanh_of_half(difference * inside) * (1.0 - product)
    return difference


@triton.jit
def exponent(x, v, multiplier, reference, PLAN: tl.constexpr):
    """Return multiplier * v - reference, rounded once; -inf where the logit is."""
    t = tl.fma(v, multiplier, -reference)
    if PLAN.softcap:
        t = tl.where(x == float("-inf"), float("-inf"), t)
    return t


@triton.jit
def exponent_factor(v, multiplier):
    """Return what takes the place of the multiplier where v is the largest.

    Beyond 2^30 two logits are equal or far apart, but the rounded reference may be hundreds away
    from the exponent of the largest: a power of two multiplies without rounding.
    """
    power = (multiplier.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(v * multiplier) < 1073741824.0, multiplier, power)


@triton.jit
def at_least(t):
    """Hold an exponent at -200, where 2^t is 0 and 2^t * t still is; let NaN through."""
    return tl.maximum(t, -200.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def finite_or_zero(reference):
    """Return what exponents are relative to, where no logit is above -inf, too."""
    return tl.where(reference == float("-inf"), 0.0, reference)


@triton.jit
def token_logit(row, token_id, vocabulary, wanted):
    """Return the logit of the token; NaN for an id outside the vocabulary, which is not read."""
    known = (token_id >= 0) & (token_id < vocabulary)
    return tl.load(row + token_id, mask=known & wanted, other=float("nan")).to(tl.float32)

"""Rows of logits for the kernels over the vocabulary: addresses, scaling, launch shapes.

A row is cut into blocks of 32 columns per lane, and each lane belongs to one thread, which reads
its columns of a block 16 bytes at a time and keeps separate sums. Block and lane depend on the
vocabulary and the dtype alone, and so does every bit of a result.

Up to a constant, z is gain * v for v = x, or v = -1 / (1 + 2^(squash x)) under a softcap. The
kernels work on v and on exponents of two, binary_gain * v with binary_gain = gain log2(e).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastrl.contract import RowArguments
from fastrl.triton.objectives import clamp, expm1

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
COLUMNS_PER_LANE = tl.constexpr(32)
MOST_LANES = 512
#: Programs with the most lanes that fit a multiprocessor at 64 registers per thread.
RESIDENT = 2
#: Programs that even out the last wave of a single sweep, which can be split at no cost.
EVEN = 8

#: Arguments whose values must not cause another compilation, ...
RUN_TIME = (
    "ignore_index",
    "length",
    "stride_b",
    "stride_t",
    "grad_stride_b",
    "grad_stride_t",
    "splits",
    "sequences",
)
#: ... and tensors per token or sequence, which may begin at any address.
PER_TOKEN = (
    "token_ids",
    "mask",
    "temperatures",
    "loss",
    "row_max",
    "log_sum",
    "entropy",
    "grad_logprobs",
    "grad_entropy",
    "grad_logsumexp",
)


class Specialization(NamedTuple):
    """The constants that a kernel on rows of logits is compiled for.

    Attributes:
        lanes: threads that share a row.
        width: logits in 16 bytes.
        aligned: rows start at multiples of 16 bytes.
        edges: a row may begin or end between such multiples.
        together: rows of the gradient start as far from such multiples as those of the logits.
        softcap: the logits have a softcap.
        entropy: sums for the entropy are kept; in a gradient, the entropy has a slope.
        squares: sums for sum_sq_probs are kept.
    """

    lanes: int
    width: int
    aligned: bool
    edges: bool
    together: bool
    softcap: bool
    entropy: bool
    squares: bool


def lanes_of(vocabulary: int) -> int:
    """Return how many lanes share a row: as many as one block can use, from 32 to 512."""
    wanted: int = triton.next_power_of_2(triton.cdiv(vocabulary, COLUMNS_PER_LANE.value))
    return min(max(wanted, 32), MOST_LANES)


def blocks_of(vocabulary: int) -> int:
    """Return how many blocks a row has."""
    return -(-vocabulary // (int(COLUMNS_PER_LANE.value) * lanes_of(vocabulary)))


@functools.cache
def processors(device: torch.device) -> int:
    """Return how many multiprocessors need work; a CPU has none to fill."""
    if device.type == "cpu":
        return 0
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def splits_of(logits: Tensor, programs: int | None = None) -> int:
    """Return how many programs share a row: enough to fill all `programs` places.

    Places are counted per multiprocessor, by default the resident ones. Beyond one wave a row is
    not split, since its second sweep would no longer find it in cache.
    """
    rows = logits.shape[0] * logits.shape[1]
    places = (RESIDENT if programs is None else programs) * processors(logits.device)
    return max(1, min(blocks_of(logits.shape[2]), places // max(rows, 1)))


def _phases(tensor: Tensor) -> tuple[int, ...]:
    """Return the offsets of a tensor, and of a row from the previous one, modulo 16 bytes.

    A single row counts its offset, too: it must be summed in the order that it has among others.
    """
    size = tensor.element_size()
    return (tensor.data_ptr() % 16, *(stride * size % 16 for stride in tensor.stride()[:2]))


def launch_options(
    *tensors: Tensor, softcap: float, entropy: bool = False, squares: bool = False
) -> dict[str, Any]:
    """Return the constants and the other options of a launch on these tensors `[B, T, V]`.

    The tensors are logits, and the gradient if there is one.
    """
    V, size, grad_size = tensors[0].shape[2], tensors[0].element_size(), tensors[-1].element_size()
    phases = [_phases(tensor) for tensor in tensors]
    aligned = not any(map(any, phases))
    spec = Specialization(
        lanes=lanes_of(V),
        width=16 // size,
        aligned=aligned,
        edges=not aligned or V * grad_size % 16 != 0,
        together=aligned or (phases[0] == phases[-1] and size == grad_size),
        softcap=softcap != 0,
        entropy=entropy,
        squares=squares,
    )
    return {
        "SPEC": spec,
        "num_warps": max(1, spec.lanes // (64 if torch.version.hip else 32)),
        # the compiler may fuse differently in two kernels that must agree, so all fused
        # multiply-adds are explicit
        "enable_fp_fusion": False,
    }


def narrowed(logits: Tensor) -> Tensor:
    """Return the second half of each row's memory, of float32 logits, as bfloat16 `[B, T, V]`.

    Raises:
        ValueError: the logits are not float32, or their rows overlap.
    """
    V, stride_b, stride_t = logits.shape[2], logits.stride(0), logits.stride(1)
    if logits.dtype != torch.float32:
        raise ValueError(f"logits: narrow expected torch.float32, got {logits.dtype}")
    B, T = logits.shape[:2]
    if stride_t < V or (B > 1 and stride_b < stride_t * T):
        raise ValueError(f"logits: narrow expected rows in order, got strides {logits.stride()}")
    halves = logits.view(torch.bfloat16)
    start = halves.storage_offset() + stride_t
    return halves.as_strided(logits.shape, (2 * stride_b, 2 * stride_t, 1), start)


def row_arguments(logits: Tensor, rows: RowArguments) -> dict[str, Any]:
    """Return the arguments that every kernel on logits shares, by name."""
    scale, squash = rows.logit_scale / rows.temperature, 0.0
    if rows.logit_softcap:
        scale = 2 * rows.logit_softcap / rows.temperature
        squash = 2 * LOG2E.value * rows.logit_scale / rows.logit_softcap
    return {
        "logits": logits,
        "token_ids": rows.token_ids,
        "mask": rows.mask,
        "ignore_index": rows.ignore_index,
        "temperatures": rows.temperatures,
        "scale": scale,
        "squash": squash,
        "length": logits.shape[1],
        "stride_b": logits.stride(0),
        "stride_t": logits.stride(1),
        "vocabulary": logits.shape[2],
    }


@triton.jit
def row_counts(index, token_id, mask, ignore_index):
    counts = token_id != ignore_index
    if mask is not None:
        counts = counts & (tl.load(mask + index) != 0)
    return counts


@triton.jit
def row_start(tensor, index, length, stride_b, stride_t, SPEC: tl.constexpr):
    """Return where a row starts; its offset has 64 bits, since logits may exceed 2^31."""
    batch = index // length
    offset = batch * stride_b + (index - batch * length) * stride_t
    if SPEC.aligned:
        WIDTH: tl.constexpr = 128 // tensor.dtype.element_ty.primitive_bitwidth
        offset = tl.multiple_of(offset, WIDTH)
    return tensor + offset


@triton.jit
def row_gain(index, temperatures, scale, wanted):
    """Return dz/dv of a row, and the same in exponents of two."""
    gain = scale
    if temperatures is not None:
        gain = tl.div_rn(scale, tl.load(temperatures + index, mask=wanted, other=1.0))
    return gain, gain * LOG2E


@triton.jit
def value(x, squash, SPEC: tl.constexpr):
    """Return v of a logit."""
    v = x
    if SPEC.softcap:
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
def exact_value(x, squash, SPEC: tl.constexpr):
    """Return v (under a softcap v + 1/2) with all its digits."""
    v = x
    if SPEC.softcap:
        v = 0.5 * tanh_of_half(x * (squash * LN2))
    return v


@triton.jit
def exact_difference(x, largest, squash, SPEC: tl.constexpr):
    """Return the difference in v of two logits with all its digits."""
    difference = x - largest
    if SPEC.softcap:  # tanh a - tanh b = tanh(a - b) (1 - tanh a tanh b)
        inside = squash * LN2
        difference = tl.where(x == largest, 0.0, difference)  # both may be +inf
        product = tanh_of_half(x * inside) * tanh_of_half(largest * inside)
        difference = 0.5 * tanh_of_half(difference * inside) * (1.0 - product)
    return difference


@triton.jit
def exponent(x, v, binary_gain, reference, SPEC: tl.constexpr):
    """Return binary_gain * v - reference, rounded once; -inf if the logit is."""
    t = tl.fma(v, binary_gain, -reference)
    if SPEC.softcap:
        t = tl.where(x == float("-inf"), float("-inf"), t)
    return t


@triton.jit
def exponent_factor(v, binary_gain):
    """Return the factor of the exponents in place of binary_gain; v is the largest value.

    Beyond 2^30 two logits are equal or far apart, but the rounded reference may be hundreds away
    from the exponent of the largest, so the factor is a power of two, which does not round.
    """
    power = (binary_gain.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    power = tl.where(tl.abs(v) < 18446744073709551616.0, power, 1.0)  # or the product overflows
    return tl.where(tl.abs(v * binary_gain) < 1073741824.0, binary_gain, power)


@triton.jit
def largest_exponent(v, binary_gain):
    """Return the exponent of the largest value: finite for the lowest number, -inf for -inf."""
    t = tl.maximum(v * binary_gain, -3.4028234663852886e38, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(v == float("-inf"), v, t)


@triton.jit
def at_least(t):
    """Clamp an exponent to at least -200, where 2^t and 2^t * t are 0; NaN stays NaN."""
    return tl.maximum(t, -200.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def finite_or_zero(reference):
    """Replace the reference of the exponents by 0 if no logit is above -inf."""
    return tl.where(reference == float("-inf"), 0.0, reference)


@triton.jit
def token_column(token_id, vocabulary):
    """Return the column of a token, -1 if its id is outside the vocabulary."""
    return tl.where((token_id >= 0) & (token_id < vocabulary), token_id, -1).to(tl.int32)


@triton.jit
def token_logit(row, token, wanted):
    """Return the logit in the column of a token; NaN if it has none."""
    return tl.load(row + token, mask=(token >= 0) & wanted, other=float("nan")).to(tl.float32)

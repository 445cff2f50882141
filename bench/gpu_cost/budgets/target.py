"""A kernel with what it is compiled for and what it may cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

#: Types of arguments in Triton's words. Strides are i64, and all others are `*fp32`.
TYPES = {
    name: type_
    for type_, names in {
        "*i1": "active agrees informatives is_top1 mask terminated truncated",
        "*i32": "counts cu_seqlens finished ids",
        "*i64": "group_ids order stops token_ids",
        "fp32": "beta correction eps gamma lam length_norm normalizer scale squash student_share "
        "teacher_scale teacher_squash",
        "i32": "block blocks count group_size groups length segments sequences span splits tokens "
        "total vocabulary width",
        "i64": "ignore_index",
    }.items()
    for name in names.split()
}


def type_of(name: str) -> str:
    """Return the type that an argument has in all kernels that do not say another."""
    return "i64" if "stride" in name else TYPES.get(name, "*fp32")


def fields(of: Any, *names: str) -> Any:
    """Return the types of a tuple of arguments where these are given; the others are None."""
    return of._make(type_of(name) if name in names else None for name in of._fields)


@dataclass(frozen=True)
class Target:
    """A kernel with the types and constants that one compilation is for.

    Of csrc/cuda a target limits on sm_90 what a kernel costs that is compiled anyway.

    Attributes:
        name: of the cubin, `triton-<name>-<arch>.cubin`; of csrc/cuda a part of the kernel's
            mangled name.
        kernel: the `triton.jit` function.
        types: of the run-time arguments that have another than `type_of` says: None where one is
            not given, a tuple of types for a tuple of arguments.
        constants: the values of the constexpr arguments.
        divisible: the arguments that are multiples of 16: aligned pointers, even strides. Of a
            tuple that is named here, all pointers are.
        enable_fp_fusion: as in the launch, like `num_warps`.
        amd_num_warps: as in a launch with 64 threads per warp, where that differs.
        element_bytes: of one element of what the hot loops load.
        bytes_per_element: what memory moves per element in all, in and out.
        instructions: the budget on sm_90 per element, all hot loops together; None where the loops
            do not run over something large.
        mufu: the same for the special functions.
        spills: instructions outside of all loops that may spill, by the version of Triton: ptxas
            then keeps to fewer registers, so that another program fits on a multiprocessor.
        block: elements that a program takes in one pass of a loop, where the bytes that the loop
            loads do not tell.
        loops: how many of the loops stream, those that move most; None is all of them, 0 none: the
            whole code is one pass.
        narrow: accesses under 16 bytes that a pass may hold: flags of a byte each, single values,
            words of rows that are not aligned.
        narrowest: bytes that each of these must have.
        sweeps: the cost is the sum of the worst sweep that only reads a row and the worst that
            writes its gradient, since a row goes through one of each: so many of the two there are.
        registers: on all architectures, what as many blocks as are meant to share a multiprocessor
            leave each thread.
        persistent: the kernel works through many rows, and has no barrier of the cluster in a loop:
            each waits for all that its block has stored.
    """

    name: str
    kernel: Any = None
    types: dict[str, Any] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    divisible: tuple[str, ...] = ()
    enable_fp_fusion: bool = False
    num_warps: int = 4
    amd_num_warps: int | None = None
    element_bytes: int = 4
    bytes_per_element: float = 0
    instructions: float | None = None
    mufu: float | None = None
    spills: dict[str, int] = field(default_factory=dict)
    block: int | None = None
    loops: int | None = None
    narrow: int = 0
    narrowest: int = 1
    sweeps: int = 0
    registers: int | None = None
    persistent: bool = False

"""A kernel with what it is compiled for and what it may cost."""

from __future__ import annotations

from typing import Any, NamedTuple


class Target(NamedTuple):
    """A Triton kernel with the types and constants that one compilation is for.

    Attributes:
        name: of the cubin, `triton-<name>-<arch>.cubin`.
        kernel: the `triton.jit` function.
        types: of every run-time argument in Triton's words: `*bf16`, `fp32`, `i32`, `i64`.
            A tuple of arguments is a tuple of types. An argument in neither `types` nor
            `constants` is None, as is a field that is None in a tuple.
        constants: the values of the constexpr arguments.
        divisible: the arguments that are multiples of 16: aligned pointers, even strides. Of a
            tuple that is named here, all pointers are.
        num_warps: as in the launch.
        amd_num_warps: as in a launch with 64 threads per warp, where that differs.
        element_bytes: of one element of what the hot loops load.
        bytes_per_element: what memory moves per element in all, in and out.
        instructions: the budget on sm_90 per element, all hot loops together; None where the loops
            do not run over something large.
        mufu: the same for the special functions.
        options: other compile options of the launch.
        spills: instructions outside of all loops that may spill, by the version of Triton: ptxas
            then keeps to fewer registers, so that another program fits on a multiprocessor.
        block: elements that a program takes in one pass of a loop, where the bytes that the loop
            loads do not tell.
        loops: how many of the loops stream, those that move most; None is all of them, 0 none: the
            whole code is one pass.
        narrow: accesses under 16 bytes that a pass may hold: flags of a byte each, single values,
            words of rows that are not aligned.
        narrowest: bytes that each of these must have.
    """

    name: str
    kernel: Any
    types: dict[str, Any]
    constants: dict[str, Any]
    divisible: tuple[str, ...]
    num_warps: int
    element_bytes: int
    bytes_per_element: float
    instructions: float | None = None
    mufu: float | None = None
    options: dict[str, Any] | None = None
    block: int | None = None
    loops: int | None = None
    narrow: int = 0
    narrowest: int = 1
    amd_num_warps: int | None = None
    spills: dict[str, int] | None = None


class CudaTarget(NamedTuple):
    """What a kernel of csrc/cuda may cost on sm_90, by a part of its mangled name.

    `registers` is for all architectures: what as many blocks as are meant to share a
    multiprocessor leave each thread. Without `instructions` it is the only budget. A `persistent`
    kernel works through many rows, and has no barrier of the cluster in a loop: each waits for all
    that its block has stored.

    `narrow` and `narrowest` are as for `Target`.

    With `sweeps` the cost is the sum of the worst sweep that only reads a row and the worst that
    writes its gradient, since a row goes through one of each; so many of the two there are.
    """

    kernel: str
    element_bytes: int
    bytes_per_element: float
    instructions: float | None = None
    mufu: float | None = None
    narrow: int = 0
    sweeps: int = 0
    registers: int | None = None
    persistent: bool = False
    narrowest: int = 1

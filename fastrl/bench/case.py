"""What is measured: one pass of one operator on one shape, and who computes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

Inputs = dict[str, Any]

FORWARD, BACKWARD, BOTH = PASSES = ("forward", "backward", "both")


class Size(NamedTuple):
    """One entry of a selection; ``rows`` are all tokens, or all answers to all prompts."""

    op: str  # the public function
    model: str  # whose shape it is; "" for operators without a vocabulary
    rows: int
    dtype: torch.dtype
    variant: str = ""  # what is unusual: "half the rows masked", "frozen head"


class Provider(NamedTuple):
    """One implementation of a case's work, called as its users call it.

    ``kind`` is ``fastrl``, ``fastrl in place``, ``eager``, ``compile``, ``peer`` (another
    library) or ``floor`` (the bytes or GEMMs of the work alone: its answer is not checked).
    """

    name: str
    kind: str
    forward: Callable[[Inputs], Any]
    #: From the output and the inputs; by default the gradients of ``Case.leaves``.
    backward: Callable[[Any, Inputs], Any] | None = None
    #: Before each call and not timed; may raise ``ImportError`` for a library that is missing.
    prepare: Callable[[Inputs], Inputs] | None = None


class Case(NamedTuple):
    """One pass of an operator on one shape.

    ``forward`` records the graph where there are ``leaves``; ``backward`` is timed alone, from the
    output of an untimed forward; ``both`` is one after the other.
    """

    size: Size
    step: str  # one of PASSES
    shape: Mapping[str, int]  # rows, hidden, vocabulary; sequences, tokens; prompts, group_size
    inputs: Callable[[int], Inputs]  # made from a seed, on the device of the run
    providers: Sequence[Provider]
    error: Callable[[Any, Inputs], float]  # of the output (forward) or gradients, against float64
    leaves: tuple[str, ...] = ()  # the inputs whose gradients are computed
    bytes_moved: int = 0  # the least that this work must read and write
    flops: int = 0  # the least arithmetic of its GEMMs; 0 where memory is the limit
    #: Of the output of ``both``, whose gradients ``error`` compares.
    output_error: Callable[[Any, Inputs], float] | None = None

    @property
    def name(self) -> str:
        """Identify the case within a run."""
        op, model, _, dtype, variant = self.size
        shape = " x ".join(map(str, self.shape.values()))
        parts = (op, self.step, model, shape, str(dtype).removeprefix("torch."), variant)
        return ", ".join(part for part in parts if part)

    def described(self) -> dict[str, Any]:
        """Return what a report has of it."""
        op, model, _, dtype, variant = self.size
        kept = {"name": self.name, "op": op, "step": self.step, "model": model, "variant": variant}
        kept["dtype"] = str(dtype).removeprefix("torch.")
        moved = {"bytes_moved": self.bytes_moved, "flops": self.flops}
        return {**kept, "shape": dict(self.shape), **moved}

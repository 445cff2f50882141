"""What is measured: one pass of one operator on one shape, and who computes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

Inputs = dict[str, Any]

FORWARD, BACKWARD, BOTH = PASSES = ("forward", "backward", "both")


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

    op: str  # the public function
    step: str  # one of PASSES
    model: str  # whose shape it is; "" for operators without a vocabulary
    shape: Mapping[str, int]  # rows, hidden, vocabulary; sequences, tokens; prompts, group_size
    dtype: torch.dtype
    inputs: Callable[[int], Inputs]  # made from a seed, on the device of the run
    providers: Sequence[Provider]
    error: Callable[[Any, Inputs], float]  # of the output (forward) or gradients, against float64
    leaves: tuple[str, ...] = ()  # the inputs whose gradients are computed
    bytes_moved: int = 0  # the least that this work must read and write
    flops: int = 0  # the least arithmetic of its GEMMs; 0 where memory is the limit
    variant: str = ""  # what is unusual: "half the rows masked", "frozen head"

    @property
    def name(self) -> str:
        """Identify the case within a run."""
        sizes = " x ".join(map(str, self.shape.values()))
        dtype = str(self.dtype).removeprefix("torch.")
        parts = (self.op, self.step, self.model, sizes, dtype, self.variant)
        return ", ".join(part for part in parts if part)

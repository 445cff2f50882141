"""Types of what every kernel with a policy loss takes."""

from __future__ import annotations

from fastrl.contract import Coefficients, LossArguments
from fastrl.triton.loss_constants import BySequence

COEFFICIENTS = Coefficients._make(["fp32"] * len(Coefficients._fields))

PER_TOKEN = BySequence._make([False] * len(BySequence._fields))
PER_SEQUENCE = BySequence._make([True] * len(BySequence._fields))


def loss_types(*names: str) -> LossArguments:
    """Return the types where these arguments are given; the others are None."""
    return LossArguments._make(
        None if name not in names else "*i32" if name == "cu_seqlens" else "*fp32"
        for name in LossArguments._fields
    )

"""The floating-point formats that an implementation may store and compute in."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """A binary floating-point format: unit roundoff, smallest normal, largest, smallest number."""

    name: str
    unit: float
    smallest: float
    largest: float
    subnormal: float

    def holds_sum(self, a: np.ndarray, b: np.ndarray, total: np.ndarray) -> np.ndarray:
        """Return where a + b, which float64 rounds to `total`, is representable in this format."""
        if self is not FLOAT64:
            return _float32(total) == total
        part = total - a  # the rounding error of float64 (Knuth's two-sum)
        return (a - (total - part)) + (b - part) == 0

    def holds_product(self, a: np.ndarray, b: np.ndarray, product: np.ndarray) -> np.ndarray:
        """Return where a b, which float64 rounds to `product`, is representable in this format."""
        if self is not FLOAT64:
            return _float32(product) == product  # two float32 make an exact float64
        return (np.abs(a) == 1) | (np.abs(b) == 1) | (product == 0)


def _float32(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float32).astype(np.float64)


# the oracle computes in float64 itself, so against a float64 result both round
FLOAT64 = Arithmetic("float64", 2.0**-52, 2.0**-1022, float(np.finfo(np.float64).max), 2.0**-1074)
FLOAT32 = Arithmetic("float32", 2.0**-24, 2.0**-126, float(np.finfo(np.float32).max), 2.0**-149)
FLOAT16 = Arithmetic("float16", 2.0**-11, 2.0**-14, 65504.0, 2.0**-24)
BFLOAT16 = Arithmetic("bfloat16", 2.0**-8, 2.0**-126, 2.0**127 * (2 - 2.0**-7), 2.0**-133)
FORMATS = {each.name: each for each in (FLOAT64, FLOAT32, FLOAT16, BFLOAT16)}


def of_results(*dtypes: str) -> Arithmetic:
    """Return the format of the arithmetic: float32, or float64 if an operand has it."""
    return FLOAT64 if "float64" in dtypes else FLOAT32

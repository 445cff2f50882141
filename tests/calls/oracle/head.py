"""The LM head of the linear forms: logits = h W^T + b + s (h A^T) B^T, and its gradients.

A GEMM rounds a product and its additions: with k terms, `sum_roundings(k)` unit roundoffs of the
sum of magnitudes. What enters with an error adds that error times the magnitude of the others.

The tensor cores of a GPU multiply 16-bit operands exactly and add in float32; what their products
round is `Entering`.
"""

import dataclasses

import numpy as np

from .bounded import BFLOAT16, FLOAT16, Arithmetic, Bounded, sum_roundings


@dataclasses.dataclass(frozen=True)
class Entering:
    """Relative errors with which numbers enter the products: they are rounded before."""

    gradient: float = 0.0  # of the logits
    #: hidden states and weight, in the products of logits and in those of gradients
    operands: float = 0.0
    in_gradients: float = 0.0
    low_rank: float = 0.0  # LoRA's hidden A^T and B, in the products of gradients


#: On the matrix tiles of a CPU the gradient of the logits is the sum of two bfloat16.
ON_TILES = Entering(gradient=2.0**-16)


def on_tensor_cores(operand: str, *, perhaps: bool = False) -> Entering:
    """Return what is rounded to bfloat16, the gradient of the logits and what multiplies it.

    Operands in float16 are, too, from what they were before. `perhaps`: the numbers are those
    before the operands are rounded, which depends on how many tokens a row has kept.
    """
    once = {"bfloat16": BFLOAT16.unit, "float16": FLOAT16.unit}[operand] if perhaps else 0.0
    again = BFLOAT16.unit + FLOAT16.unit if operand == "float16" else 0.0
    return Entering(BFLOAT16.unit, once, once + again, BFLOAT16.unit)


@dataclasses.dataclass(frozen=True)
class LinearHead:
    """The active hidden states `[n, H]` and the parameters, in float64."""

    hidden: np.ndarray
    weight: np.ndarray
    bias: np.ndarray | None
    lora: tuple[np.ndarray, np.ndarray, float] | None
    arithmetic: Arithmetic
    entering: Entering = Entering()
    #: what multiplies the gradients once they are made
    factor: float = 1.0

    def _rounds(self, terms: int) -> float:
        return (sum_roundings(terms) + 2) * self.arithmetic.unit

    def logits(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the logits and their error."""
        h, w = self.hidden, self.weight
        width = h.shape[1]
        x = h @ w.T
        magnitude = np.abs(h) @ np.abs(w).T
        error = self._rounds(width) * magnitude + self._underflow(width, w)
        off = self.entering.operands
        error = error + off * (2 + off) * (_rounded(h, off) @ _rounded(w, off).T)
        if self.bias is not None:
            x = x + self.bias
            error = error + self.arithmetic.unit * (magnitude + _finite(self.bias))
        if self.lora is not None:
            a, b, scale = self.lora
            x = x + scale * (h @ a.T) @ b.T
            inner = abs(scale) * (np.abs(h) @ np.abs(a).T) @ np.abs(b).T
            rounds = self._rounds(width) + self._rounds(len(a)) + 4 * self.arithmetic.unit
            error = error + rounds * inner + self.arithmetic.unit * magnitude
            error = error + self.entering.operands * inner
        return x, np.where(np.isnan(error), np.inf, error)

    def _underflow(self, terms: int, factor: np.ndarray) -> float:
        """The tiles of a CPU take a subnormal number for 0."""
        largest = np.abs(factor).max(initial=0.0)
        return self.arithmetic.smallest * terms * (1 + largest)

    def gradients(self, dx: Bounded) -> dict[str, Bounded]:
        """Return the gradients of hidden states and parameters, given dL/dlogits `[n, V]`."""
        value = dx.value
        magnitude = _finite(value)
        error = dx.error + self.entering.gradient * (magnitude + dx.error)
        n, vocabulary = value.shape
        h = np.where(
            magnitude.any(1, keepdims=True) | error.any(1, keepdims=True), self.hidden, 0.0
        )
        rows, columns = self._rounds(n), self._rounds(vocabulary)
        off, off_low = self.entering.in_gradients, self.entering.low_rank
        found = {
            "hidden": self._product(value, magnitude, error, self.weight, columns, off),
            "weight": self._product(value.T, magnitude.T, error.T, h, rows, off),
        }
        if self.bias is not None:
            found["bias"] = (value.sum(0), error.sum(0) + rows * magnitude.sum(0))
        if self.lora is not None:
            a, b, scale = self.lora
            down, down_error = self._product(value, magnitude, error, b, columns, off_low)
            down_magnitude = magnitude @ np.abs(b)
            # the error of the inner product, so that its rounding by magnitude is counted once
            through, through_error = self._product(
                down, down_magnitude, down_error, a, self._rounds(len(a))
            )
            straight, straight_error = found["hidden"]
            found["hidden"] = (
                straight + scale * through,
                straight_error
                + abs(scale) * through_error
                + 3
                * self.arithmetic.unit
                * (magnitude @ np.abs(self.weight) + abs(scale) * down_magnitude @ np.abs(a)),
            )
            of_a, a_error = self._product(down.T, down_magnitude.T, down_error.T, h, rows, off)
            inner = h @ a.T
            of_inner = (self._rounds(h.shape[1]) + self.entering.operands) * (1 + off_low)
            of_b, b_error = self._product(value.T, magnitude.T, error.T, inner, rows, off_low)
            b_error = b_error + magnitude.T @ (of_inner * np.abs(h) @ np.abs(a).T)
            found["lora_a"] = (
                scale * of_a,
                abs(scale) * a_error + _two(scale * of_a, self.arithmetic),
            )
            found["lora_b"] = (
                scale * of_b,
                abs(scale) * b_error + _two(scale * of_b, self.arithmetic),
            )
        return {name: self._bounded(*parts) for name, parts in found.items()}

    def _product(
        self,
        value: np.ndarray,
        magnitude: np.ndarray,
        error: np.ndarray,
        by: np.ndarray,
        rounds: float,
        off: float = 0.0,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return a product and its error; `off`: the relative error of `by`."""
        size = _finite(by)
        made = (1 + off) * (error @ size) + rounds * (magnitude @ size)
        made = made + off * (magnitude @ _rounded(by, off))
        some = (magnitude + error).any(1, keepdims=True)  # of nothing comes exactly nothing
        underflow = self._underflow(value.shape[1], by) * max(1.0, self.factor)
        return value @ by, made + np.where(some, underflow, 0.0)

    def _bounded(self, value: np.ndarray, error: np.ndarray) -> Bounded:
        error = np.where(np.isnan(error), np.inf, error)
        certain = ~np.isfinite(value) & np.isfinite(error)
        return Bounded(value, np.where(certain, 0.0, error), self.arithmetic)


def _finite(x: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(x), np.abs(x), 0.0)


def _rounded(x: np.ndarray, off: float) -> np.ndarray:
    """|x| to which a relative error applies; below it, rounding to float16 has an absolute one."""
    return np.maximum(_finite(x), FLOAT16.smallest) if off else _finite(x)


def _two(x: np.ndarray, arithmetic: Arithmetic) -> np.ndarray:
    return 2 * arithmetic.unit * np.abs(x)

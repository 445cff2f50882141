"""The LM head of the linear forms: logits = h W^T + b + s (h A^T) B^T, and its gradients.

A GEMM rounds a product and its additions: with k terms, `sum_roundings(k)` unit roundoffs of the
sum of magnitudes. What enters with an error adds that error times the magnitude of the others.
"""

import dataclasses

import numpy as np

from .bounded import Arithmetic, Bounded, sum_roundings


@dataclasses.dataclass(frozen=True)
class LinearHead:
    """The active hidden states `[n, H]` and the parameters, in float64."""

    hidden: np.ndarray
    weight: np.ndarray
    bias: np.ndarray | None
    lora: tuple[np.ndarray, np.ndarray, float] | None
    arithmetic: Arithmetic
    #: relative error with which the gradient of the logits enters its GEMMs
    entering: float = 0.0
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
        if self.bias is not None:
            x = x + self.bias
            error = error + self.arithmetic.unit * (magnitude + _finite(self.bias))
        if self.lora is not None:
            a, b, scale = self.lora
            x = x + scale * (h @ a.T) @ b.T
            inner = abs(scale) * (np.abs(h) @ np.abs(a).T) @ np.abs(b).T
            rounds = self._rounds(width) + self._rounds(len(a)) + 4 * self.arithmetic.unit
            error = error + rounds * inner + self.arithmetic.unit * magnitude
        return x, np.where(np.isnan(error), np.inf, error)

    def _underflow(self, terms: int, factor: np.ndarray) -> float:
        """The tiles of a CPU take a subnormal number for 0."""
        largest = np.abs(factor).max(initial=0.0)
        return self.arithmetic.smallest * terms * (1 + largest)

    def gradients(self, dx: Bounded) -> dict[str, Bounded]:
        """Return the gradients of hidden states and parameters, given dL/dlogits `[n, V]`."""
        value = dx.value
        magnitude = _finite(value)
        error = dx.error + self.entering * magnitude
        n, vocabulary = value.shape
        h = np.where(
            magnitude.any(1, keepdims=True) | error.any(1, keepdims=True), self.hidden, 0.0
        )
        rows, columns = self._rounds(n), self._rounds(vocabulary)
        found = {
            "hidden": self._product(value, magnitude, error, self.weight, columns),
            "weight": self._product(value.T, magnitude.T, error.T, h, rows),
        }
        if self.bias is not None:
            found["bias"] = (value.sum(0), error.sum(0) + rows * magnitude.sum(0))
        if self.lora is not None:
            a, b, scale = self.lora
            down, down_error = self._product(value, magnitude, error, b, columns)
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
            of_a, a_error = self._product(down.T, down_magnitude.T, down_error.T, h, rows)
            inner = h @ a.T
            inner_error = self._rounds(h.shape[1]) * np.abs(h) @ np.abs(a).T
            of_b, b_error = self._product(value.T, magnitude.T, error.T, inner, rows)
            b_error = b_error + magnitude.T @ inner_error
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
    ) -> tuple[np.ndarray, np.ndarray]:
        size = _finite(by)
        made = error @ size + rounds * (magnitude @ size)
        some = (magnitude + error).any(1, keepdims=True)  # of nothing comes exactly nothing
        underflow = self._underflow(value.shape[1], by) * max(1.0, self.factor)
        return value @ by, made + np.where(some, underflow, 0.0)

    def _bounded(self, value: np.ndarray, error: np.ndarray) -> Bounded:
        error = np.where(np.isnan(error), np.inf, error)
        certain = ~np.isfinite(value) & np.isfinite(error)
        return Bounded(value, np.where(certain, 0.0, error), self.arithmetic)


def _finite(x: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(x), np.abs(x), 0.0)


def _two(x: np.ndarray, arithmetic: Arithmetic) -> np.ndarray:
    return 2 * arithmetic.unit * np.abs(x)

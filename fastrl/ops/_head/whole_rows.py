"""Bias and low-rank factors, added to logits of whole rows `[C, V]`, and their gradients."""

from __future__ import annotations

from abc import abstractmethod
from typing import TypeVar

from torch import Tensor

_Self = TypeVar("_Self", bound="WholeRows")


class WholeRows:
    """The products of a chunk of rows with the whole vocabulary."""

    def taken(self: _Self, rows: Tensor) -> _Self:
        """Return the products for some rows of the chunk."""
        return self

    def add_low_rank(self, logits: Tensor, low_rank: Tensor, factor: Tensor) -> None:
        """Add low-rank states `[C, r]` times a factor `[V, r]`."""
        logits.addmm_(low_rank, factor.to(logits.dtype).t())

    def add_bias(self, logits: Tensor, bias: Tensor) -> None:
        """Add `[V]`."""
        logits.add_(bias)

    def add_bias_gradient(self, grad_logits: Tensor, total: Tensor) -> None:
        """Add to `[V]`."""
        total.add_(grad_logits.sum(0, dtype=total.dtype))

    def add_factor_gradient(self, grad_logits: Tensor, low_rank: Tensor, total: Tensor) -> None:
        """Add to `[V, r]`."""
        self.add_product(total, grad_logits.t(), low_rank)

    def add_low_rank_gradient(self, grad_logits: Tensor, factor: Tensor, total: Tensor) -> None:
        """Add to `[C, r]`."""
        self.add_product(total, grad_logits, factor)

    @abstractmethod
    def add_product(self, total: Tensor, a: Tensor, b: Tensor) -> None:
        """Add the product of two matrices."""

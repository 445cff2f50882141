"""A call: the arguments of a case by name, and what the oracle expects of it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from .case import Case
from .oracle.bounded import Bounded, Decision, Doubts, constant, unbounded
from .tokens import flat_tensor

#: The upstream gradient of a loss.
UPSTREAM = {"ones": 1.0, "zero": 0.0, "expanded": -0.375, "random": 2.5, "large": 2.0**40}
UPSTREAM |= {"nan": float("nan"), "some-zero": 1e-3, "strided": -1.0, "first": 0.5}


class Place(NamedTuple):
    """Where a case runs."""

    backend: str = "auto"
    device: str = "cpu"

    @property
    def on_gpu_kernels(self) -> bool:
        """Say whether the kernels are Triton's or CUDA's, by name or as what `auto` chooses."""
        chosen = self.backend == "auto" and self.device.startswith("cuda")
        return chosen or self.backend in ("triton", "cuda")


class Call:
    """The arguments of a case, which a subclass draws, and what the oracle expects.

    Attributes:
        function: the name of the function.
        given: the arguments by name.
        leaves: the names of those that want a gradient.
        waited_for: the upstream gradient of gradients that are made with a loss, or None.
        doubts: decisions of the oracle that are in doubt.
        differentiable: whether the result has gradients.
    """

    leaves: tuple[str, ...] = ()
    waited_for: float | None = None
    differentiable = True

    def __init__(self, case: Case, place: Place) -> None:
        self.case, self.place, self.function = case, place, case.function
        self.given: dict[str, Any] = {}
        self.doubts = Doubts()

    def arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return what the function takes, from arguments as in `given`."""
        return given

    def results(self, result: Any) -> dict[str, Tensor | None]:
        """Return what is compared by name."""
        return {"result": result} if isinstance(result, Tensor) else result._asdict()

    def expected(self) -> dict[str, Bounded | Decision]:
        """Return what is expected of the results by name."""
        raise NotImplementedError

    def upstream(self, results: dict[str, Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the results that are differentiated, and their upstream gradients."""
        return [], []

    def gradients(self) -> dict[str, Bounded]:
        """Return what is expected of the gradients by the names of leaves."""
        raise NotImplementedError


class LossCall(Call):
    """A call whose result has a loss and metrics."""

    def results(self, result: Any) -> dict[str, Tensor | None]:
        return {"loss": result.loss, **result.metrics}

    def upstream(self, results: dict[str, Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
        loss = results["loss"]
        dtype = str(loss.dtype).removeprefix("torch.")
        return [loss], [flat_tensor(self.case, np.array([self.asked]), dtype)[0]]

    @property
    def asked(self) -> float:
        """The upstream gradient of the loss."""
        return UPSTREAM[self.case.upstream]

    def scaled(self, slope: Bounded) -> Bounded:
        """Return slope times the upstream gradient of the loss; 0 times NaN is unspecified."""
        return zero_or_lost(slope, slope * constant(self.asked, slope.arithmetic))


def zero_or_lost(factor: Bounded, product: Bounded) -> Bounded:
    """Accept 0 and NaN as the product of 0 and NaN."""
    return unbounded(product, (factor.value == 0) & np.isnan(product.value))


class Function(NamedTuple):
    """How calls of a function are made, and how often the fuzzer draws it among others."""

    call: Callable[[Case, Place], Call]
    drawn: float

"""One case on one backend: the call in its mode, the backward, and what differs from the oracle."""

import contextlib
import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fastrl
from fastrl.reference import row_blocks

from .call import Call, Place
from .case import Case
from .oracle.bounded import FORMATS, Bounded, Decision, Doubts, unbounded
from .oracle.functions import stored
from .refusals import refused


class NoResultError(Exception):
    """The call of a case was wrong, and there is no result."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """One part of a result that differs from what the oracle expects."""

    part: str
    kind: str  # shape, dtype, nan, value, bool, missing, unexpected, refused, not refused, raised
    text: str

    def __str__(self) -> str:
        return f"{self.part}: {self.kind}: {self.text}"


@dataclasses.dataclass
class Trial:
    """A case, where it runs, what differs, and its decisions in doubt."""

    case: Case
    place: Place
    differences: list[Difference] = dataclasses.field(default_factory=list)
    doubts: Doubts = dataclasses.field(default_factory=Doubts)
    _before: list[tuple[Tensor, Tensor]] = dataclasses.field(default_factory=list)

    def compare(self, call: Call) -> None:
        """Call, differentiate, and note what differs from what is expected."""
        self.doubts = call.doubts
        leaves = {name: self.leaf(call.given[name]) for name in call.leaves}
        results = call.results(self._called(call, leaves))
        self.expect(results, call.expected())
        if self.differentiate(leaves, *call.upstream(results)):
            for name, want in call.gradients().items():
                dtype = str(leaves[name].dtype).removeprefix("torch.")
                self._compare(f"grad {name}", leaves[name].grad, want, dtype, call.waited_for)
        if not all(_same(now.detach(), before) for now, before in self._before):
            self._note("given tensors", "changed", "the call wrote into one of them")

    def _called(self, call: Call, leaves: dict[str, Tensor]) -> Any:
        """Call the function in the mode of the case; what is no leaf is moved to the device."""
        case, given_away = self.case, 1 if self.case.inplace else 0  # the logits, the first
        if given_away:  # what is given away is no leaf
            leaves = {name: leaf * 1 for name, leaf in leaves.items()}
        arguments = self.moved(call.arguments(call.given | leaves))
        self._before = [(x, x.detach().clone()) for x in _tensors(arguments)[given_away:]]
        modes = {"no-grad": torch.no_grad, "inference": torch.inference_mode}
        torch.set_num_threads(case.threads)
        row_blocks._CPU_BYTES = 2**9  # of the reference: several blocks in a case
        if case.function != "reduce_metrics":
            arguments["backend"] = self.place.backend
        with (
            modes.get(case.mode, contextlib.nullcontext)(),
            self._autocast(),
        ):
            if case.wrong is None:
                return self.invoke(call.function, arguments)
            found = refused(case.function, case.wrong, arguments, case.random("wrong"))
        if found is not None:
            self._note(*found)
        raise NoResultError

    def invoke(self, function: str, arguments: dict[str, Any]) -> Any:
        """Call a function of fastrl."""
        return getattr(fastrl, function)(**arguments)

    def _autocast(self) -> contextlib.AbstractContextManager:
        dtype = self.case.autocast
        kind = torch.empty(0, device=self.place.device).device.type
        return torch.autocast(kind, dtype and getattr(torch, dtype), enabled=dtype is not None)

    def moved(self, value: Any) -> Any:
        """Return a tensor on the device, or what a mapping or a list holds; a constant is made in
        inference mode where the case says so.
        """
        if isinstance(value, dict):
            return {name: self.moved(one) for name, one in value.items()}
        if isinstance(value, list | tuple):
            moved = map(self.moved, value)
            return value._make(moved) if hasattr(value, "_make") else type(value)(moved)
        if not isinstance(value, Tensor) or value.requires_grad:
            return value
        value = _on(self.place.device, value)
        if self.case.constants == "usual":
            return value
        with torch.inference_mode():
            return value.clone() if value.is_contiguous() else value[:]

    def leaf(self, value: Tensor) -> Tensor:
        """Return a tensor on the device that wants a gradient."""
        return _on(self.place.device, value).detach().requires_grad_()

    def differentiate(
        self, leaves: dict[str, Tensor], outputs: list[Tensor], upstream: list[Tensor]
    ) -> bool:
        """Differentiate once, or twice where the case says so: the second has to be the same.

        Returns:
            Whether there is anything to differentiate.
        """
        if self.case.mode != "grad" or not leaves or not outputs:
            return False
        upstream = self.moved(upstream)
        if self.case.twice:
            torch.autograd.backward(outputs, upstream, retain_graph=True)
            for leaf in leaves.values():
                leaf.grad = None
        torch.autograd.backward(outputs, upstream)
        return True

    def expect(self, got: dict[str, Tensor | None], want: dict[str, Bounded | Decision]) -> None:
        """Note what differs; None is not there. An output has the dtype of the arithmetic."""
        for name, expected in want.items():
            of_answers = isinstance(expected, Decision)
            dtype = "bool" if of_answers else expected.arithmetic.name
            self._compare(name, got.get(name), expected, dtype)
        for name, tensor in got.items():
            if name not in want and tensor is not None:
                self._note(name, "unexpected", "the oracle expects none")

    def _note(self, part: str, kind: str, text: str) -> None:
        self.differences.append(Difference(part, kind, text))

    def _compare(
        self,
        name: str,
        tensor: Tensor | None,
        want: Bounded | Decision,
        dtype: str,
        waited_for: float | None = None,
    ) -> None:
        if tensor is None:
            self._note(name, "missing", "there is none")
            return
        given = str(tensor.dtype).removeprefix("torch.")
        if given != dtype:
            self._note(name, "dtype", f"got {given}, want {dtype}")
        x = tensor.detach().cpu()
        got = (x if x.dtype == torch.bool else x.to(torch.float64)).numpy()
        if got.shape != want.shape:
            self._note(name, "shape", f"got {got.shape}, want {want.shape}")
            return
        if isinstance(want, Decision):
            self.doubts.add(name, want.doubtful)
            values, errors, kind = want.yes, np.zeros(want.shape), "bool"
        else:
            want = stored(want, dtype, waited_for) if dtype in FORMATS else want
            if waited_for is not None and np.isnan(waited_for):
                nothing = (want.value == 0) & (want.error == 0)
                self.doubts.add("unspecified: NaN as upstream gradient of a loss", nothing)
                want = unbounded(want, nothing)
            self.doubts.add("unbounded", np.isinf(want.error).any(-1))
            values, errors, kind = want.value, want.error, "value"
        wrong = ~want.covers(got)
        if not wrong.any():
            return
        if kind == "value" and (np.isnan(got) != np.isnan(values))[wrong].any():
            kind = "nan"
        # the worst, in units of its bound
        excess = np.abs(got.astype(float) - values) / (errors + 1e-300)
        excess = np.where(wrong, np.where(np.isnan(excess), np.inf, excess), -1.0)
        at = np.unravel_index(int(np.argmax(excess)), wrong.shape)
        place = "at " + ", ".join(str(int(i)) for i in at) if at else ""
        within = f"within {errors[at]:.3g}" if kind != "bool" else ""
        count = f"{wrong.sum()} of {wrong.size} wrong"
        self._note(name, kind, f"got {got[at]}, want {values[at]} {within} {place}; {count}")


def _on(device: str, x: Tensor) -> Tensor:
    """Return a tensor on a device as it lies in memory, with what is beside it."""
    if device == "cpu" or x.numel() == 0:
        return x.to(device)
    size = x.untyped_storage().nbytes() // x.element_size()
    memory = x.as_strided((size,), (1,), 0).to(device)
    return memory.as_strided(x.shape, x.stride(), x.storage_offset())


def _tensors(arguments: Any) -> list[Tensor]:
    if isinstance(arguments, Tensor):
        return [arguments]
    if isinstance(arguments, dict):
        arguments = tuple(arguments.values())
    if isinstance(arguments, tuple | list):
        return [tensor for one in arguments for tensor in _tensors(one)]
    return []


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _same(now: Tensor, before: Tensor) -> bool:
    """Compare the bits: NaN is equal to itself."""
    bits = _BITS[now.element_size()]
    return torch.equal(now.view(bits), before.view(bits))

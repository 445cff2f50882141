"""One case on one backend: the call, its mode, and a check that it leaves its inputs unchanged."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch
from torch import Tensor

import fastrl

from .bounded import Doubts
from .case import Case


@dataclasses.dataclass
class Trial:
    """A case, where it runs, and its decisions in doubt."""

    case: Case
    backend: str
    device: str
    doubts: Doubts = dataclasses.field(default_factory=Doubts)
    _before: list[tuple[Tensor, Tensor]] = dataclasses.field(default_factory=list)

    @property
    def on_gpu_kernels(self) -> bool:
        """Say whether the kernels are Triton's or CUDA's, by name or as what `auto` chooses."""
        chosen = self.backend == "auto" and self.device.startswith("cuda")
        return chosen or self.backend in ("triton", "cuda")

    def call(self, *given: Any, **options: Any) -> Any:
        """Call the function of the case in its mode."""
        case = self.case
        tensors = _tensors((*given, *options.values()))
        given_away = 1 if case.inplace else 0  # the logits, the first
        self._before = [(x, x.detach().clone()) for x in tensors[given_away:]]
        modes = {"no-grad": torch.no_grad, "inference": torch.inference_mode}
        torch.set_num_threads(case.threads)
        if case.function != "reduce_metrics":
            options["backend"] = self.backend
        with (
            modes.get(case.mode, contextlib.nullcontext)(),
            torch.autocast("cpu", torch.bfloat16, enabled=case.autocast),
        ):
            return getattr(fastrl, case.function)(*given, **options)

    def moved(self, value: Any) -> Any:
        """Return a tensor on the device, or what a mapping or a list holds; a constant is made in
        inference mode where the case says so.
        """
        if isinstance(value, dict):
            return {name: self.moved(one) for name, one in value.items()}
        if isinstance(value, list):
            return [self.moved(one) for one in value]
        if not isinstance(value, Tensor):
            return value
        value = value.to(self.device).detach().requires_grad_(value.requires_grad)
        if value.requires_grad or self.case.constants == "usual":
            return value
        with torch.inference_mode():
            return value.clone() if value.is_contiguous() else value[:]

    def leaf(self, value: Tensor, *, frozen: bool = False) -> Tensor:
        """Return a tensor on the device that wants a gradient, unless it is frozen."""
        return value.to(self.device).detach().requires_grad_(not frozen)

    def differentiates(self, *leaves: Tensor) -> bool:
        return self.case.mode == "grad" and any(leaf.requires_grad for leaf in leaves)

    def backward(self, leaves: list[Tensor], outputs: list[Tensor], upstream: list[Tensor]) -> None:
        """Differentiate once, or twice where the case says so: the second has to be the same."""
        upstream = self.moved(upstream)
        if self.case.twice:
            torch.autograd.backward(outputs, upstream, retain_graph=True)
            for leaf in leaves:
                leaf.grad = None
        torch.autograd.backward(outputs, upstream)

    def changed(self) -> bool:
        """Return whether the call or its backward wrote into one of its inputs."""
        return not all(_same(now.detach(), before) for now, before in self._before)


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

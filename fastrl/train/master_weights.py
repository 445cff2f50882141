"""An optimizer on float32 copies of the weights, on the same device or in host memory."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

MakeOptimizer = Callable[[list[Tensor]], torch.optim.Optimizer]


class MasterWeights(torch.optim.Optimizer):
    """Steps float32 copies of the weights, and rounds each of them to its weight.

    A weight that is float32 and in the right place is its own copy. The copies are made by the
    first step, not before: a warm start may change the weights in between. There is an optimizer
    for each weight, so that only one gradient at a time exists in float32.

    Args:
        parameters: The weights, in any dtype. Their gradients stay in place, where the norm is
            taken.
        make: Makes the optimizer of a list of copies.
        device: Where the copies and the optimizer's state are; None for the weight's device.
        options: The defaults of the groups: learning rate and weight decay.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        make: MakeOptimizer,
        *,
        device: torch.device | None,
        options: dict[str, Any],
    ) -> None:
        super().__init__(parameters, options)
        self._make, self._device = make, device
        self._copies: list[tuple[Tensor, torch.optim.Optimizer]] | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every weight that has a gradient."""
        for group, weight, master, optimizer in self._each():
            if weight.grad is None:
                continue
            master.grad = weight.grad.to(master)
            optimizer.param_groups[0]["lr"] = group["lr"]
            optimizer.step()
            master.grad = None
            weight.copy_(master)

    def state_dict(self) -> dict[str, Any]:
        """Return the copies, None for a weight that is its own, and their optimizers' states."""
        each = list(self._each())
        return {
            "masters": [None if _is_same(w, master) else master for _, w, master, _ in each],
            "optimizers": [optimizer.state_dict() for *_, optimizer in each],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; the weights are restored separately."""
        states = zip(state_dict["masters"], state_dict["optimizers"], strict=True)
        for (_, _, master, optimizer), (saved, state) in zip(self._each(), states, strict=True):
            if saved is not None:
                master.copy_(saved)
            optimizer.load_state_dict(state)

    def _each(self) -> Iterator[tuple[dict[str, Any], Tensor, Tensor, torch.optim.Optimizer]]:
        """Yield group, weight, copy and the copy's optimizer."""
        weights = [(group, weight) for group in self.param_groups for weight in group["params"]]
        if self._copies is None:
            masters = [self._master(weight) for _, weight in weights]
            self._copies = [(master, self._make([master])) for master in masters]
        for (group, weight), (master, optimizer) in zip(weights, self._copies, strict=True):
            yield group, weight, master, optimizer

    def _master(self, weight: Tensor) -> Tensor:
        device = self._device or weight.device
        master = weight.detach().to(device, torch.float32)
        if device.type == "cpu" and weight.device.type == "cuda":
            return master.pin_memory()  # copied up and down in each step
        return master


def _is_same(weight: Tensor, master: Tensor) -> bool:
    return weight.device == master.device and weight.data_ptr() == master.data_ptr()

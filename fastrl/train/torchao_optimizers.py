"""torchao's AdamW: 8-bit moments, and stochastic rounding of bfloat16 weights."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torchao.optim import AdamW8bit
from torchao.optim.adam import _AdamW
from torchao.optim.subclass_8bit import OptimState8bit


class _Corrected(torch.optim.Optimizer):
    """Corrections of torchao's optimizers for the training loops.

    - Moments that are not quantized are float32. In bfloat16, as torchao makes them for bfloat16
      weights, the second moment could not decay: 0.999 of a value rounds to that value.
    - A second moment never becomes 0 next to larger ones, see `_without_zero`.
    - A learning rate may be set as a number.
    - On a CPU nothing is compiled: it would take half a minute, and a C++ compiler.
    """

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32)
        with _eager_on_cpu(self.param_groups[0]["params"][0].device):
            return super().step(closure)

    def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
        moment: Tensor = super()._new_buffer(p, signed)  # type: ignore[misc]
        return _without_zero(moment if isinstance(moment, OptimState8bit) else moment.float())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        parameters = [p for group in self.param_groups for p in group["params"]]
        for i, parameter in enumerate(parameters):  # torch casts moments to the weight's dtype
            for name in ("exp_avg", "exp_avg_sq"):
                if i in state_dict["state"]:
                    saved = state_dict["state"][i][name]
                    self.state[parameter][name] = _without_zero(saved.to(parameter.device))


class EightBitAdamW(_Corrected, AdamW8bit):  # type: ignore[misc]
    """AdamW with 8-bit moments (float32 below 4096 elements, or if 256 does not divide them)."""


class StochasticAdamW(_Corrected, _AdamW):  # type: ignore[misc]
    """AdamW with float32 moments that can round bfloat16 weights stochastically."""


def _without_zero(moment: Tensor) -> Tensor:
    """Return the moment; in a quantized second moment, code 0 becomes the smallest positive value.

    256 neighbors share a scale. torchao rounds a second moment below 1.6e-7 of the largest to 0,
    but keeps the first moment, so only eps limits their quotient, the update. The row of a rare
    token in the embeddings, next to the row of a frequent token, moved by hundreds of learning
    rates in a step without the rare token.
    """
    if isinstance(moment, OptimState8bit) and not moment.signed:
        moment.qmap = moment.qmap.clone()
        moment.qmap[0] = moment.qmap[1]
    return moment


def _eager_on_cpu(device: torch.device) -> AbstractContextManager[Any]:
    if device.type == "cpu":
        return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]
    return nullcontext()

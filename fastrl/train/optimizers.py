"""The optimizer that the settings name: AdamW, its precision, memory, learning rate and step."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from fastrl.train.config import RunConfig

MakeOptimizer = Callable[[list[Tensor]], torch.optim.Optimizer]


def make_optimizer(
    parameters: Iterable[Tensor], config: RunConfig, **options: Any
) -> torch.optim.Optimizer:
    """Return the optimizer of the parameters that require gradients.

    ``config.rounding`` determines how bfloat16 parameters keep updates below their precision. Other
    parameters (an adapter, a value head) are stepped directly.

    Raises:
        ValueError: Nothing is trained, torchao is missing, or the device has no memory of its own
            to offload from.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        raise ValueError("freeze_head, lora_targets: no parameter is left to train")
    options = {"lr": config.peak_learning_rate, "weight_decay": 0.0, **options}
    device = trained[0].device.type
    if config.optimizer == "adamw_offloaded":
        # torchao's CPUOffloadOptimizer copies gradients to the host before they can be clipped
        if device == "cpu":
            raise ValueError(
                'optimizer must not be "adamw_offloaded" on the device cpu, whose memory is the '
                "host's already"
            )
        return MasterWeights(
            trained,
            lambda copies: torch.optim.AdamW(copies, fused=True, **options),
            device=torch.device("cpu"),
            options=options,
        )
    make = _adamw(config, options, device)
    if config.rounding == "master" and any(p.dtype != torch.float32 for p in trained):
        return MasterWeights(trained, make, device=None, options=options)
    return make(trained)


def learning_rate(config: RunConfig, step: int) -> float:
    """Return the learning rate after ``step`` finished steps; it is never 0.

    It depends only on step and settings: a run that is resumed for more steps continues with the
    rate that a longer run has at this step.
    """
    warm = min(1.0, (step + 1) / (config.warmup_steps + 1))
    after = max(0, step - config.warmup_steps)
    progress = min(1.0, after / max(1, config.steps - 1 - config.warmup_steps))
    falling = {
        "constant": 1.0,
        "linear": 1 - progress,
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
    }[config.schedule]
    return config.peak_learning_rate * warm * (0.1 + 0.9 * falling)


def apply(optimizer: torch.optim.Optimizer, config: RunConfig, step: int) -> float:
    """Clip the gradients, step the optimizer at the learning rate of ``step``, clear the gradients.

    Returns:
        The norm of the gradients before clipping.

    Raises:
        FloatingPointError: The norm is not finite; the weights are unchanged.
    """
    rate = learning_rate(config, step)
    for group in optimizer.param_groups:
        group["lr"] = rate
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        if parameter.grad is None:  # every completion was left out: step with a gradient of 0
            parameter.grad = torch.zeros_like(parameter)
    norm = torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
    if not norm.isfinite():
        raise FloatingPointError(f"the gradients of step {step + 1} are not finite")
    optimizer.step()
    optimizer.zero_grad()
    return float(norm)


def _adamw(config: RunConfig, options: dict[str, Any], device: str) -> MakeOptimizer:
    """Return a function that makes the optimizer of parameters on their device."""
    if config.optimizer == "adamw_8bit" or config.rounding == "stochastic":
        try:
            from fastrl.train import torchao_optimizers as torchao
        except ModuleNotFoundError as error:
            raise ValueError(
                "optimizer=adamw_8bit and rounding=stochastic need torchao: pip install "
                "'fastrl-kernels[lowbit]'"
            ) from error
        eight_bit = config.optimizer == "adamw_8bit"
        kind: Any = torchao.EightBitAdamW if eight_bit else torchao.StochasticAdamW
        stochastic = config.rounding == "stochastic"
        return lambda parameters: kind(parameters, bf16_stochastic_round=stochastic, **options)
    # on a GPU the default holds temporary copies of all moments
    fused = device == "cuda" or None
    return lambda parameters: torch.optim.AdamW(parameters, fused=fused, **options)


class MasterWeights(torch.optim.Optimizer):
    """An optimizer that steps float32 copies of the weights, and rounds each copy to its weight.

    A weight that is float32 and in the right place is its own copy. The first step makes the
    copies, because a warm start may change the weights before it. Each weight has its own
    optimizer, so that only one gradient at a time exists in float32.
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
        """Return the copies, None for weights without one, and the states of the optimizers."""
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

"""The optimizer that the settings name: AdamW, in which precision and in which memory."""

from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fastrl.train import extras
from fastrl.train.config import LoopConfig
from fastrl.train.master_weights import MakeOptimizer, MasterWeights
from fastrl.train.schedules import learning_rate


def make_optimizer(
    parameters: Iterable[Tensor], config: LoopConfig, **options: Any
) -> torch.optim.Optimizer:
    """The optimizer of those parameters that require gradients.

    bfloat16 parameters take updates smaller than their precision as ``config.rounding`` says; the
    others (an adapter, a value head) are stepped as they are.

    Args:
        parameters: What to train: weights, adapters, a value head.
        config: Names optimizer, rounding, learning rate and weight decay.
        options: Arguments of AdamW that replace those of ``config``: lr, betas, weight_decay.

    Raises:
        ValueError: Nothing is trained; torchao is missing; the device has nothing to offload from;
            the schedule has no such options.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        raise ValueError("freeze_head, lora_targets: no parameter is left to train")
    for step in (0, config.steps - 1):  # options that the schedule does not have fail here
        learning_rate(config, step)
    options = {"lr": config.learning_rate, "weight_decay": config.weight_decay, **options}
    if config.optimizer == "adamw_offloaded":
        if trained[0].device.type == "cpu":
            raise ValueError(
                'optimizer must not be "adamw_offloaded" on the device cpu, whose memory is the '
                "host's already"
            )
        return offloaded(trained, options)
    make = _adamw(config, options)
    if config.rounding == "master" and any(p.dtype != torch.float32 for p in trained):
        return MasterWeights(trained, make, device=None, options=options)
    return make(trained)


def offloaded(parameters: list[Tensor], options: dict[str, Any]) -> MasterWeights:
    """AdamW whose moments, float32 copies of the weights and updates are in host memory.

    torchao's ``CPUOffloadOptimizer`` copies gradients to the host as the backward yields them,
    before they can be clipped, and copies the weights before the warm start.
    """

    def make(copies: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(copies, fused=True, **options)

    return MasterWeights(parameters, make, device=torch.device("cpu"), options=options)


def _adamw(config: LoopConfig, options: dict[str, Any]) -> MakeOptimizer:
    """What makes the optimizer of parameters on their device."""
    stochastic = {"bf16_stochastic_round": config.rounding == "stochastic"}
    if config.optimizer == "adamw_8bit":
        eight_bit = _torchao("optimizer=adamw_8bit").EightBitAdamW
        return lambda parameters: eight_bit(parameters, **options, **stochastic)
    if config.rounding == "stochastic":
        rounded = _torchao("rounding=stochastic").StochasticAdamW
        return lambda parameters: rounded(parameters, **options, **stochastic)
    return lambda parameters: torch.optim.AdamW(
        # on a GPU the default holds temporary copies of all moments
        parameters,
        fused=parameters[0].device.type == "cuda" or None,
        **options,
    )


def _torchao(setting: str) -> ModuleType:
    """The module `low_bit_adamw`."""
    extras.require("torchao", extra="lowbit", setting=setting)
    from fastrl.train import low_bit_adamw

    return low_bit_adamw

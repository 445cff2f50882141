"""Around the loss: precision, minibatches, denominator, optimizer step."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from fastrl.train.config import LoopConfig
from fastrl.train.distributed.sharding import whole
from fastrl.train.schedules import learning_rate


def autocast(config: LoopConfig, device: torch.device) -> AbstractContextManager[Any]:
    """The precision of forward and backward."""
    return torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bfloat16")


def minibatches(samples: int, config: LoopConfig, group_size: int = 1) -> Iterator[Tensor]:
    """Row indices for each optimizer step: every group once per epoch, shuffled."""
    rows = torch.arange(samples).view(-1, group_size)
    for _ in range(config.epochs):
        for groups in torch.randperm(len(rows)).tensor_split(config.minibatches):
            yield rows[groups].flatten()


def normalizer(mask: Tensor, aggregation: str) -> Tensor:
    """The loss's denominator over an optimizer step: its tokens, or its non-empty sequences.

    With it, the gradients of the micro-batches add up to the gradient of the whole minibatch.
    """
    counted = mask if aggregation == "token-mean" else mask.any(1)
    return counted.sum().clamp(min=1)


def apply(optimizer: torch.optim.Optimizer, config: LoopConfig, step: int) -> float:
    """Clip the gradients, step the optimizer at the learning rate of ``step``, clear the gradients.

    Returns:
        The norm of the gradients before clipping.

    Raises:
        FloatingPointError: That norm is not finite; the weights are unchanged.
    """
    rate = learning_rate(config, step)
    for group in optimizer.param_groups:
        group["lr"] = rate
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        if parameter.grad is None:  # every completion was left out: a gradient of 0, not no step
            parameter.grad = torch.zeros_like(parameter)
    norm = whole(torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm))
    if not norm.isfinite():
        raise FloatingPointError(f"the gradients of step {step + 1} are not finite")
    optimizer.step()
    optimizer.zero_grad()
    return float(norm)

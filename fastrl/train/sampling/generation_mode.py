"""The state of a model while it generates."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fastrl.train.attention import BY_SEQUENCE
from fastrl.train.config import RunConfig
from fastrl.train.distributed.sharding import gathered
from fastrl.train.gradients import autocast


@contextmanager
def generation_mode(model: Any, config: RunConfig) -> Iterator[None]:
    """No gradients, ``eval``, the run's precision, and an attention that supports padding.

    In ``eval``, gradient checkpointing does not disable the cache. Sharded weights are gathered, so
    that no rank waits for another in between. Everything is put back after.
    """
    modes = [(module, module.training) for module in model.modules()]
    attention = model.config._attn_implementation
    switched = config.attention == BY_SEQUENCE and attention != "sdpa"
    try:
        model.eval()
        if switched:
            model.set_attn_implementation("sdpa")
        with torch.no_grad(), gathered(model), autocast(config, model.device):
            yield
    finally:
        if switched:
            model.set_attn_implementation(attention)
        for module, training in modes:
            module.training = training

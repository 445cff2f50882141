"""The learning rate of each step, by the schedules of `transformers`.

It is a function of the step and the settings alone, and so the same when a run is resumed.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache

import torch
from transformers import get_scheduler

from fastrl.train.config import LoopConfig

#: This schedule has no rate of 0 at its beginning already.
_COUNTS_FROM_0 = "cosine_warmup_with_min_lr"


def learning_rate(config: LoopConfig, step: int) -> float:
    """The learning rate of the step after ``step`` whole ones.

    Steps are counted from 1 and the rate would be 0 at step 0 and, if it decays to 0, at step
    ``steps + 1``: no step is without effect. The warm-up rises to ``learning_rate`` at step
    ``warmup_steps + 1``, whatever the schedule.

    Raises:
        ValueError: The schedule has no such options, or yields no learning rate with them.
    """
    peak, options = config.learning_rate, config.schedule_options
    factor = _schedule(config.schedule, options, peak, config.warmup_steps, config.steps)
    rate = peak * factor(step + (config.schedule != _COUNTS_FROM_0))
    if not (math.isfinite(rate) and rate >= 0):
        raise ValueError(
            f"schedule_options must give a learning rate of at least 0, got {rate:g} in step "
            f"{step + 1}"
        )
    return rate


@lru_cache
def _schedule(
    name: str, options: tuple[str, ...], peak: float, warmup_steps: int, steps: int
) -> Callable[[int], float]:
    """What the peak is multiplied by, given the step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    try:
        schedule = get_scheduler(
            "constant_with_warmup" if name == "constant" else name,
            optimizer,
            num_warmup_steps=warmup_steps + 1,
            num_training_steps=steps + (name != _COUNTS_FROM_0),
            scheduler_specific_kwargs=dict(map(_named_value, options)),
        )
        factor: Callable[[int], float] = schedule.lr_lambdas[0]
        factor(steps)
    except (TypeError, ValueError, KeyError, ArithmeticError) as error:
        raise ValueError(
            f"schedule_options must be those of the schedule {name}, got "
            f"{' '.join(options) or 'none'}: {error}"
        ) from error
    if name == "warmup_stable_decay" and factor(warmup_steps + 1) < 1:
        raise ValueError(
            "schedule_options must leave room for the warm-up: it and the decay take more than "
            f"{steps} steps, got {' '.join(options)}"
        )
    return factor


def _named_value(option: str) -> tuple[str, float | str]:
    name, _, text = option.partition("=")
    for read in (int, float):
        with suppress(ValueError):
            value = read(text)
            break
    else:
        return name, text
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {text}")
    return name, value

"""Log-ratios that the fused loss holds where TRL's overflow: counted, logged, warned of once."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

#: The metric in TRL's logs: the share of tokens with a log-ratio that is held.
METRIC = "fastrl/saturated_ratio_fraction"

#: Where a log-ratio is held; each of the two in the bias-corrected KL at half of it.
HELD_WITHIN = 80.0


@torch.no_grad()
def count_saturated(trainer: Any, inputs: dict[str, Any], logprobs: Tensor) -> Tensor | None:
    """Return how many tokens have a log-ratio that is held, and how many there are, as `[2]`.

    A log-ratio is that to the old policy, or to the reference; None where there is neither.
    """
    others = [inputs.get("old_per_token_logps")]
    others += [inputs["ref_per_token_logps"]] if trainer.beta else []
    distances = [(logprobs - other).abs() for other in others if other is not None]
    if not distances:
        return None
    valid = inputs["completion_mask"].bool()
    held = torch.stack(distances).amax(0) > held_within(trainer)
    return torch.stack([(held & valid).sum(), valid.sum()]).float()


def held_within(trainer: Any) -> float:
    """Return how far from 0 a log-ratio of this trainer's loss may be."""
    corrected = trainer.beta and getattr(trainer.args, "use_bias_correction_kl", False)
    return HELD_WITHIN / 2 if corrected else HELD_WITHIN


def log_saturated(trainer: Any, counts: Tensor) -> float:
    """Append the share of saturated tokens, of all ranks, to TRL's metrics, and return it."""
    held, tokens = trainer.accelerator.reduce(counts, reduction="sum").tolist()
    fraction: float = held / max(tokens, 1.0)
    trainer._metrics["train" if trainer.model.training else "eval"][METRIC].append(fraction)
    return fraction


def warn_of_saturation(trainer: Any, fraction: float) -> None:
    """Say what a share above 0 means, on the main process."""
    if trainer.accelerator.is_main_process:
        warnings.warn(
            f"{fraction:.2%} of the tokens of a batch have a log-ratio to the old policy or the "
            f"reference beyond {held_within(trainer):g}: the run has diverged. TRL's own loss can "
            "become inf or NaN there; fastrl holds the log-ratio, so loss and gradient stay "
            f"finite and the run goes on. {METRIC} is logged at every step.",
            RuntimeWarning,
            stacklevel=2,
        )

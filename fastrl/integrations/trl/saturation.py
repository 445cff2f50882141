"""The metric and warning of log-ratios that saturate in the fused loss, where TRL's overflow."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from fastrl.integrations.trl.loss import loss_mask
from fastrl.integrations.trl.rules import is_rloo

#: The metric in TRL's logs: the share of tokens with a saturated log-ratio.
METRIC = "fastrl/saturated_ratio_fraction"

#: The size at which a log-ratio saturates; both in the bias-corrected KL saturate at half of it.
SATURATES_AT = 80.0


def has_ratios(trainer: Any, inputs: dict[str, Any]) -> bool:
    """Return whether a loss has log-ratios that can saturate; ranks must agree."""
    has_old = is_rloo(trainer) or inputs.get("old_per_token_logps") is not None
    return has_old or bool(trainer.beta)


@torch.no_grad()
def count_saturated(trainer: Any, inputs: dict[str, Any], logprobs: Tensor) -> Tensor:
    """Return the numbers of tokens with a saturated log-ratio and of all tokens, as `[2]`.

    It counts log-ratios to the old policy (of sequences in GSPO and RLOO) and to the reference.
    """
    valid = loss_mask(inputs).bool()
    distances = []
    if is_rloo(trainer):
        ratios = torch.where(valid, logprobs, 0.0).sum(-1) - inputs["old_logps"]
        distances.append(ratios[:, None].expand_as(logprobs).abs())
    elif (old := inputs.get("old_per_token_logps")) is not None:
        ratios = logprobs - old
        if trainer.importance_sampling_level == "sequence":
            lengths = valid.sum(-1, keepdim=True).clamp(min=1)
            mean = torch.where(valid, ratios, 0.0).sum(-1, keepdim=True) / lengths
            ratios = mean.expand_as(ratios)
        distances.append(ratios.abs())
    if trainer.beta and not is_rloo(trainer):  # in RLOO the KL is part of the reward
        distances.append((logprobs - inputs["ref_per_token_logps"]).abs())
    saturated = torch.stack(distances).amax(0) > saturates_at(trainer)
    return torch.stack([(saturated & valid).sum(), valid.sum()]).float()


def saturates_at(trainer: Any) -> float:
    """Return the distance from 0 at which a log-ratio of this trainer's loss saturates."""
    corrected = trainer.beta and getattr(trainer.args, "use_bias_correction_kl", False)
    return SATURATES_AT / 2 if corrected else SATURATES_AT


def log_saturated(trainer: Any, counts: Tensor) -> float:
    """Add the share of saturated tokens on all ranks to TRL's metrics, and return it."""
    saturated, tokens = trainer.accelerator.reduce(counts, reduction="sum").tolist()
    fraction: float = saturated / max(tokens, 1.0)
    trainer._metrics["train" if trainer.model.training else "eval"][METRIC].append(fraction)
    return fraction


def warn_of_saturation(trainer: Any, fraction: float) -> None:
    """Warn on the main process about a share above 0."""
    if trainer.accelerator.is_main_process:
        warnings.warn(
            f"{fraction:.2%} of the tokens of a batch have a log-ratio to the old policy or the "
            f"reference beyond {saturates_at(trainer):g}: the run has diverged. TRL's own loss can "
            "become inf or NaN there; fastrl saturates the log-ratio, so loss and gradient stay "
            f"finite and the run continues. {METRIC} is logged at every step.",
            RuntimeWarning,
            stacklevel=2,
        )

"""Score centering in the loss of TRL's `GRPOTrainer`: its options, arguments and metrics."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import torch
from torch import Tensor

from fastrl import Objective, RolloutCorrection, TopKLogprobs
from fastrl.integrations.support import Support
from fastrl.integrations.trl.replay import TOP_K
from fastrl.integrations.trl.rules import objective_of, refuse, why_no_objective
from fastrl.ops.metrics import CENTERING_METRICS

_SEQUENCE_WEIGHTS = Support(
    option='`score_centering=K` with `vllm_importance_sampling_mode="sequence_mask"` or '
    '`"sequence_truncate"`',
    handling="refused",
    note="the weight of a token must be a function of its own ratio: set `token_mask` or "
    "`token_truncate`, or `vllm_importance_sampling_correction=False`",
    applies=lambda t: _corrects(t) and t.vllm_importance_sampling_mode.startswith("sequence"),
)

_OFF_POLICY = Support(
    option="`score_centering=K` with several optimizer steps per generation (`num_iterations` "
    "times `steps_per_generation` does not divide `gradient_accumulation_steps`)",
    handling="refused",
    note="off policy the expected score has no agreed form, except with "
    '`loss_type="cispo"`, `replay_kept_tokens=True` and generation by `transformers`, whose '
    "log-probabilities are then the old ones",
    applies=lambda t: _is_off_policy(t),
)

SUPPORT: tuple[Support, ...] = (
    Support(
        option="`GRPOTrainer` with `use_fastrl(trainer, score_centering=K)`, generation by "
        "`transformers` or a colocated vLLM",
        handling="fused",
        note="the loss is not TRL's: the sampler's expected score is subtracted. Losses that "
        "fastrl does not compute in one pass over the hidden states are refused",
    ),
    _SEQUENCE_WEIGHTS,
    _OFF_POLICY,
)


def refuse_uncentered(trainer: Any, choices: Any, reason: str | None) -> None:
    """Raise if a loss is to be centered and cannot be; `reason` is why TRL computes it, or None."""
    if choices.score_centering is None:
        return
    refuse(trainer, _SEQUENCE_WEIGHTS)
    if trainer.loss_type != "cispo" or trainer.use_vllm or not choices.replay_kept_tokens:
        refuse(trainer, _OFF_POLICY)
    if reason := reason or why_no_objective(trainer, _objective):
        raise ValueError(f"score_centering must be None: {reason}")


def centered_arguments(trainer: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the loss that score centering changes.

    On policy, TRL's factor between trainer and vLLM becomes the objective's, which then has the
    same function of the ratio for the tokens that were not sampled.
    """
    objective = _objective(trainer)
    top_k = TopKLogprobs(*(inputs[name] for name in TOP_K))
    changed = {"objective": objective, "rollout_top_k": top_k, "policy_weights": None}
    if objective.rollout_corrections:
        changed["rollout_logprobs"] = inputs["sampling_per_token_logps"]
    if not _is_off_policy(trainer):
        changed["old_logprobs"] = None
    return changed


def log_centering(trainer: Any, found: Tensor) -> None:
    """Add the means of `centering` over the tokens of all ranks to TRL's metrics."""
    tokens, *means = found[1:]
    sums = torch.stack([tokens, *(tokens * mean for mean in means)])
    tokens, *sums = trainer.accelerator.reduce(sums, reduction="sum").tolist()
    metrics = trainer._metrics["train" if trainer.model.training else "eval"]
    for name, value in zip(CENTERING_METRICS, sums, strict=True):
        metrics[f"fastrl/{name}"].append(value / max(tokens, 1.0))


def _objective(trainer: Any) -> Objective:
    """Return the objective with TRL's correction between trainer and vLLM."""
    correction = None
    if _corrects(trainer):
        level, kind = trainer.vllm_importance_sampling_mode.split("_")
        low, high = (getattr(trainer, f"vllm_importance_sampling_clip_{x}") for x in ("min", "max"))
        high = inf if high is None else high
        correction = RolloutCorrection(kind=kind, level=level, low=low or 0.0, high=high)
    return replace(objective_of(trainer), score_centering=True, rollout_correction=correction)


def _corrects(trainer: Any) -> bool:
    return bool(trainer.use_vllm and trainer.vllm_importance_sampling_correction)


def _is_off_policy(trainer: Any) -> bool:
    """Return whether a generation serves several optimizer steps of a `GRPOTrainer`."""
    steps = trainer.args.steps_per_generation * trainer.num_iterations
    return bool(trainer.args.gradient_accumulation_steps % steps)

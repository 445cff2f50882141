"""The loss of `GRPOTrainer` in one pass over hidden states and LM head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import fastrl
from fastrl import Objective, PolicyLoss
from fastrl.backend import Backend
from fastrl.integrations.trl.rules import objective_of
from fastrl.integrations.trl.scoring import completions, precision_of_head

#: What a batch may hold; one with anything else (a tool mask, images) is left to TRL.
FUSED_INPUTS = frozenset(
    {
        "prompt_ids",
        "prompt_mask",
        "completion_ids",
        "completion_mask",
        "advantages",
        "old_per_token_logps",
        "ref_per_token_logps",
        "num_items_in_batch",
        "sampling_per_token_logps",
        "importance_sampling_ratio",
    }
)


def fused_loss(
    trainer: Any, model: nn.Module, inputs: dict[str, Any], backend: Backend
) -> PolicyLoss:
    """Return the loss of a batch, with log-probabilities and entropies `[B, K]`."""
    mask = inputs["completion_mask"]
    tokens = completions(
        trainer,
        model,
        torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
        torch.cat([inputs["prompt_mask"], mask], dim=1),
        mask.shape[1],
    )
    objective = objective_of(trainer)
    with precision_of_head(trainer):
        return fastrl.linear_policy_loss(
            tokens.hidden,
            token_ids=tokens.token_ids,
            advantages=inputs["advantages"],
            mask=tokens.mask,
            temperature=trainer.temperature,
            old_logprobs=inputs.get("old_per_token_logps"),
            ref_logprobs=inputs["ref_per_token_logps"] if trainer.beta else None,
            policy_weights=_correction(trainer, inputs),
            objective=objective,
            normalizer=normalizers(trainer, inputs, objective),
            backend=backend,
            **tokens.head.arguments(),
        )


def normalizers(
    trainer: Any, inputs: dict[str, Any], objective: Objective
) -> dict[str, float | Tensor]:
    """Return TRL's global counts: of tokens, or of sequences, empty ones included."""
    parts = _accumulated(trainer)
    tokens = inputs["completion_mask"].sum().clamp(min=1.0) * parts
    sequences = inputs["completion_mask"].shape[0] * parts
    counts: dict[str, float | Tensor] = {"policy": float(sequences)}
    if trainer.loss_type == "bnpo":
        counts["policy"] = tokens
    elif trainer.loss_type in ("cispo", "dapo"):
        # one rank's share of the generation batch, and of that one accumulation window's share
        share = parts / trainer.args.steps_per_generation if trainer.model.training else 1.0
        counted = inputs["num_items_in_batch"].clamp(min=1.0)
        counts["policy"] = counted * float(share / trainer.accelerator.num_processes)
    if objective.entropy_coef:
        counts["entropy"] = tokens
    return counts


def _correction(trainer: Any, inputs: dict[str, Any]) -> Tensor | None:
    """Return the ratio between trainer and vLLM, a factor of the policy term alone."""
    if not (trainer.use_vllm and trainer.vllm_importance_sampling_correction):
        return None
    ratio: Tensor = inputs["importance_sampling_ratio"]  # [B, K], or [B, 1] per sequence
    return ratio.expand_as(inputs["completion_mask"])


def _accumulated(trainer: Any) -> int:
    """Return the number of micro-batches in one optimizer step."""
    parts: int = trainer.current_gradient_accumulation_steps if trainer.model.training else 1
    return parts

"""The loss of `GRPOTrainer` in one pass over hidden states and LM head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastrl.backend import Backend
from fastrl.integrations.trl.rules import objective_of
from fastrl.integrations.trl.scoring import completions
from fastrl.ops.linear_policy_loss import one_pass
from fastrl.ops.linear_token_stats import chunk_options, linear_inputs
from fastrl.ops.policy_loss import loss_inputs

#: What a batch may hold; anything more (a tool mask, images) is TRL's to understand.
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss, and log-probabilities and entropies `[B, K]` without gradient."""
    mask = inputs["completion_mask"]
    tokens = completions(
        trainer,
        model,
        torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
        torch.cat([inputs["prompt_mask"], mask], dim=1),
        mask.shape[1],
    )
    head = tokens.head
    rows, linear = linear_inputs(
        tokens.hidden,
        head.weight,
        tokens.token_ids,
        head.bias,
        head.lora,
        tokens.mask,
        trainer.temperature,
        head.logit_scale,
        head.logit_softcap,
        -100,
    )
    objective = objective_of(trainer)
    denominator = normalizer(trainer, inputs)
    loss = loss_inputs(
        tokens.token_ids,
        rows.active,
        inputs["advantages"],
        old_logprobs=inputs.get("old_per_token_logps"),
        ref_logprobs=inputs["ref_per_token_logps"] if trainer.beta else None,
        rollout_logprobs=None,
        policy_weights=_correction(trainer, inputs),
        objective=objective,
        normalizer=denominator
        if not objective.entropy_coef
        else {"policy": denominator, "entropy": _tokens(inputs) * _accumulated(trainer)},
        group_size=None,
        group_ids=None,
        cu_seqlens=None,
        dtype=linear.dtype,
    )
    options = chunk_options(None, True, backend, linear)
    result, logprobs, entropy = one_pass(rows, linear, loss, options, options.backend, metrics=True)
    return result.loss, logprobs, entropy


def _correction(trainer: Any, inputs: dict[str, Any]) -> Tensor | None:
    """Return the ratio between trainer and vLLM, which weighs the policy term alone."""
    if not (trainer.use_vllm and trainer.vllm_importance_sampling_correction):
        return None
    ratio: Tensor = inputs["importance_sampling_ratio"]  # [B, K], or [B, 1] of sequences
    return ratio.expand_as(inputs["completion_mask"])


def _tokens(inputs: dict[str, Any]) -> Tensor:
    count: Tensor = inputs["completion_mask"].sum().clamp(min=1.0)
    return count


def _accumulated(trainer: Any) -> int:
    """Return how many micro-batches one step of the optimizer adds up."""
    parts: int = trainer.current_gradient_accumulation_steps if trainer.model.training else 1
    return parts


def normalizer(trainer: Any, inputs: dict[str, Any]) -> float | Tensor:
    """Return TRL's denominator in place of the count of tokens (grpo, sapo: of sequences).

    Its counts are of all sequences, those without a valid token too.
    """
    mask = inputs["completion_mask"]
    sequences = mask.shape[0]
    parts = _accumulated(trainer)
    if trainer.loss_type == "bnpo":
        return _tokens(inputs) * parts
    if trainer.loss_type == "dr_grpo":
        return float(sequences * trainer.max_completion_length * parts)
    if trainer.loss_type in ("cispo", "dapo"):
        # of one rank, over the generation batch; one accumulation window has its share of it
        share = parts / trainer.args.steps_per_generation if trainer.model.training else 1.0
        counted: Tensor = inputs["num_items_in_batch"].clamp(min=1.0)
        return counted * float(share / trainer.accelerator.num_processes)
    return float(sequences * parts)

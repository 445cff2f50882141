"""The loss of TRL's trainers, with its gradient, from hidden states and LM head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

import fastrl
from fastrl import KeptTokens, Objective
from fastrl.backend import Backend
from fastrl.integrations.transformers import LmHead
from fastrl.integrations.trl.centering import centered_arguments
from fastrl.integrations.trl.replay import KEPT, TOP_K
from fastrl.integrations.trl.rules import is_rloo, objective_of
from fastrl.integrations.trl.token_outputs import precision_of_head, token_outputs
from fastrl.ops.metrics import CENTERING_METRICS

#: Inputs of the loss that a batch may hold; TRL computes the loss of a batch with any others.
LOSS_INPUTS = frozenset(
    {
        "prompt_ids",
        "prompt_mask",
        "completion_ids",
        "completion_mask",
        "tool_mask",
        "advantages",
        "old_per_token_logps",
        "old_logps",
        "ref_per_token_logps",
        "num_items_in_batch",
        "sampling_per_token_logps",
        "importance_sampling_ratio",
        KEPT,
        *TOP_K,
    }
)

#: Inputs of the model that a batch may hold, which TRL passes on.
MODEL_INPUTS = frozenset(
    {
        "pixel_values",
        "pixel_attention_mask",
        "image_grid_thw",
        "image_position_ids",
        "image_sizes",
        "num_images",
        "num_tiles",
        "spatial_shapes",
        "token_type_ids",
        "mm_token_type_ids",
    }
)


def can_be_fused(inputs: dict[str, Any]) -> bool:
    """Return whether a batch holds only inputs that the fused loss knows."""
    known = LOSS_INPUTS | MODEL_INPUTS
    return known.issuperset(name for name, value in inputs.items() if value is not None)


def loss_of(
    trainer: Any,
    inputs: dict[str, Any],
    temperature: float,
    backend: Backend,
    kept: KeptTokens | None,
) -> Callable[[Tensor, LmHead], dict[str, Tensor]]:
    """Return a function that computes a batch's `policy_loss`, `log_probs` and `entropy` `[B, K]`.

    Its arguments are the hidden states `[B, K, H]` that predict the completions, and the head. With
    the sampler's `TOP_K`, `centering` are the term of score centering and its metrics.
    """
    if is_rloo(trainer):
        return _rloo_loss(trainer, inputs, temperature, backend, kept)
    return _grpo_loss(trainer, inputs, temperature, backend, kept)


def _rloo_loss(
    trainer: Any,
    inputs: dict[str, Any],
    temperature: float,
    backend: Backend,
    kept: KeptTokens | None,
) -> Callable[[Tensor, LmHead], dict[str, Tensor]]:
    objective = objective_of(trainer)
    token_ids = inputs["completion_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
    of_tokens = token_outputs(
        trainer,
        token_ids,
        ("log_probs", "entropy"),
        temperature=temperature,
        backend=backend,
        kept=kept,
    )

    def compute(hidden: Tensor, head: LmHead) -> dict[str, Tensor]:
        found = of_tokens(hidden, head)
        of_sequences = found["log_probs"].sum(1, keepdim=True)  # [B, 1]; 0 where masked
        loss = fastrl.policy_loss(
            of_sequences,
            advantages=inputs["advantages"],
            mask=torch.ones_like(of_sequences),
            old_logprobs=inputs["old_logps"][:, None],
            objective=objective,
        ).loss
        return {"policy_loss": loss} | {name: x.detach() for name, x in found.items()}

    return compute


def _grpo_loss(
    trainer: Any,
    inputs: dict[str, Any],
    temperature: float,
    backend: Backend,
    kept: KeptTokens | None,
) -> Callable[[Tensor, LmHead], dict[str, Tensor]]:
    objective = objective_of(trainer)
    arguments: dict[str, Any] = {
        "advantages": inputs["advantages"],
        "mask": loss_mask(inputs),
        "old_logprobs": inputs.get("old_per_token_logps"),
        "ref_logprobs": inputs["ref_per_token_logps"] if trainer.beta else None,
        "rollout_logprobs": _sampled(trainer, inputs),
        "policy_weights": _correction(trainer, inputs),
        "objective": objective,
        "normalizer": normalizers(trainer, inputs, objective),
        "backend": backend,
    }
    centered = centered_arguments(trainer, inputs) if TOP_K[0] in inputs else {}

    def compute(hidden: Tensor, head: LmHead) -> dict[str, Tensor]:
        with precision_of_head(trainer):
            result = fastrl.linear_policy_loss(
                hidden,
                token_ids=inputs["completion_ids"],
                temperature=temperature,
                kept=kept,
                **(arguments | centered),
                **head.arguments(),
            )
        logprobs = _unscored(result.logprobs, inputs)
        entropy = cast("Tensor", result.entropy)
        found = {"policy_loss": result.loss, "log_probs": logprobs, "entropy": entropy}
        if centered:
            plain = fastrl.policy_loss(result.logprobs, entropy=entropy, **arguments).loss
            metrics = [result.metrics[name] for name in ("active_tokens", *CENTERING_METRICS)]
            found["centering"] = torch.stack([(result.loss - plain).detach(), *metrics])
        return found

    return compute


def loss_mask(inputs: dict[str, Any]) -> Tensor:
    """Return the tokens that the policy has written, `[B, K]`."""
    mask: Tensor = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if inputs.get("tool_mask") is not None else mask


def _unscored(logprobs: Tensor, inputs: dict[str, Any]) -> Tensor:
    """Give tokens written by tools their old log-probability, since TRL computes their ratio."""
    old = inputs.get("old_per_token_logps")
    if old is None or inputs.get("tool_mask") is None:
        return logprobs
    return torch.where(loss_mask(inputs).bool(), logprobs, old.to(logprobs.dtype))


def normalizers(
    trainer: Any, inputs: dict[str, Any], objective: Objective
) -> dict[str, float | Tensor]:
    """Return TRL's global counts of tokens, or of sequences including empty ones."""
    parts = accumulated(trainer)
    tokens = loss_mask(inputs).sum().clamp(min=1.0) * parts
    sequences = inputs["completion_mask"].shape[0] * parts
    counts: dict[str, float | Tensor] = {"policy": float(sequences)}
    if trainer.loss_type == "bnpo":
        counts["policy"] = tokens
    elif trainer.loss_type in ("cispo", "dapo"):
        # one rank's share of the generation batch, and one accumulation window's share of that
        share = parts / trainer.args.steps_per_generation if trainer.model.training else 1.0
        counted = inputs["num_items_in_batch"].clamp(min=1.0)
        counts["policy"] = counted * float(share / trainer.accelerator.num_processes)
    if objective.entropy_coef:
        counts["entropy"] = tokens
    return counts


def _correction(trainer: Any, inputs: dict[str, Any]) -> Tensor | None:
    """Return the ratio between trainer and vLLM, a factor of only the policy term."""
    if not (trainer.use_vllm and trainer.vllm_importance_sampling_correction):
        return None
    ratio: Tensor = inputs["importance_sampling_ratio"]  # [B, K], or [B, 1] per sequence
    return ratio.expand_as(inputs["completion_mask"])


def _sampled(trainer: Any, inputs: dict[str, Any]) -> Tensor | None:
    """Return vLLM's log-probabilities, from which the off-policy mask measures the distance."""
    if trainer.off_policy_mask_threshold is None:
        return None
    return inputs.get("sampling_per_token_logps")


def accumulated(trainer: Any) -> int:
    """Return the number of micro-batches by which the trainer divides its loss."""
    if is_rloo(trainer):  # it leaves the division to the Trainer
        return 1
    parts: int = trainer.current_gradient_accumulation_steps if trainer.model.training else 1
    return parts

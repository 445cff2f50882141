"""The policy on a rollout: log-probabilities and loss, from hidden states or from logits.

With ``loss="linear"`` only the model's backbone is called: the loss takes hidden states and the
weight of the head, and the logits are never materialized. ``loss="logits"`` calls the whole model
and supports every head.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl import (
    Objective,
    PolicyLoss,
    linear_policy_loss,
    linear_token_logprobs,
    logits_policy_loss,
    token_logprobs,
)
from fastrl.integrations.transformers import LmHead, last_hidden_states, lm_head
from fastrl.train.config import RunConfig
from fastrl.train.gradients import autocast
from fastrl.train.rollout import Rollout


class PolicyOutputs(NamedTuple):
    """The model's outputs at the sampled tokens; either logits or head is None."""

    states: Tensor  # [N, T, H], the last hidden states
    logits: Tensor | None  # [N, T, V]
    head: LmHead | None


def check_head(model: Any, config: RunConfig) -> None:
    """Raise a `ValueError` if ``loss="linear"`` does not support the model's LM head."""
    if config.loss == "linear":
        try:
            lm_head(model)
        except ValueError as error:
            raise ValueError(f'loss must be "logits" for this model: {error}') from error


def policy_outputs(model: Any, rollout: Rollout, config: RunConfig) -> PolicyOutputs:
    """Run the model over the sequences, in the precision of the configuration.

    Positions count only real tokens, so that the outputs do not depend on the padding.
    """
    sampled = slice(-rollout.token_ids.shape[1] - 1, -1)
    inputs = {
        "input_ids": rollout.input_ids,
        "attention_mask": rollout.attention_mask,
        "position_ids": (rollout.attention_mask.cumsum(1) - 1).clamp(min=0),
    }
    with autocast(config, model.device):
        if config.loss == "linear":
            states = last_hidden_states(model, **inputs)[:, sampled]
            return PolicyOutputs(states, None, lm_head(model))
        out = model(
            **inputs,
            logits_to_keep=rollout.token_ids.shape[1] + 1,
            output_hidden_states=True,
            use_cache=False,
        )
    return PolicyOutputs(out.hidden_states[-1][:, sampled], out.logits[:, :-1], None)


def policy_logprobs(outputs: PolicyOutputs, rollout: Rollout, config: RunConfig) -> Tensor:
    """Log-probabilities [N, T] of the sampled tokens."""
    options: dict[str, Any] = {"temperature": config.temperature, "mask": rollout.mask}
    if outputs.logits is not None:
        return token_logprobs(outputs.logits, rollout.token_ids, **options)
    assert outputs.head is not None
    states, head = outputs.states, outputs.head.arguments()
    with autocast(config, states.device):  # on a GPU the head multiplies in the same precision
        return linear_token_logprobs(states, token_ids=rollout.token_ids, **head, **options)


def policy_loss(
    outputs: PolicyOutputs,
    rollout: Rollout,
    config: RunConfig,
    advantages: Tensor,
    *,
    old_logprobs: Tensor | None,
    ref_logprobs: Tensor | None = None,
    objective: Objective,
    normalizer: Tensor,
) -> PolicyLoss:
    """The loss of the sampled tokens, fused with its gradient."""
    options: dict[str, Any] = {
        "temperature": config.temperature,
        "old_logprobs": old_logprobs,
        "ref_logprobs": ref_logprobs,
        "objective": objective,
        "normalizer": normalizer,
    }
    tokens: dict[str, Any] = {
        "token_ids": rollout.token_ids,
        "advantages": advantages,
        "mask": rollout.mask,
    }
    if outputs.logits is not None:
        return logits_policy_loss(outputs.logits, **tokens, **options)
    assert outputs.head is not None
    states, head = outputs.states, outputs.head.arguments()
    with autocast(config, states.device):
        return linear_policy_loss(states, **head, **tokens, **options)


@torch.no_grad()
def rollout_logprobs(model: Any, rollout: Rollout, config: RunConfig) -> Tensor:
    """Log-probabilities [N, T] of the sampled tokens, a micro-batch at a time."""
    parts = []
    for rows in torch.arange(len(rollout.mask)).split(config.micro_batch):
        batch = rollout.rows(rows)
        parts.append(policy_logprobs(policy_outputs(model, batch, config), batch, config))
    return torch.cat(parts)

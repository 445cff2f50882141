"""The policy on a packed batch: log-probabilities and loss, from hidden states or from logits.

With ``loss="linear"`` only the model's backbone is called: the loss takes hidden states and the
weight of the head, and the logits never exist as a whole. ``loss="logits"`` calls the whole model
and supports every head.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu

from fastrl import (
    Objective,
    PolicyLoss,
    Teacher,
    TopKLogprobs,
    linear_policy_loss,
    linear_token_logprobs,
    logits_policy_loss,
    token_logprobs,
)
from fastrl.integrations.transformers import LmHead, backbone, lm_head
from fastrl.integrations.transformers.by_sequence import BY_SEQUENCE
from fastrl.train.config import PpoConfig, RunConfig
from fastrl.train.loading import autocast
from fastrl.train.packing import PackedBatch, micro_batches
from fastrl.train.prompts import Prompt
from fastrl.train.rollout import Completion, Rollout, rollout_of
from fastrl.train.vocabulary import limited, row_count, row_limit


class PolicyOutputs(NamedTuple):
    """The model's outputs at the positions that predict scored tokens; logits or head is None."""

    states: Tensor | None  # [n, H], the last hidden states; None if the loss needs only logits
    logits: Tensor | None  # [n, V]
    head: LmHead | None


def offloaded(config: RunConfig) -> AbstractContextManager[Any]:
    """Return a context in which autograd keeps tensors in pinned host memory, if configured.

    With gradient checkpointing, these tensors are the inputs of the layers.
    """
    return save_on_cpu(pin_memory=True) if config.offload_checkpoints else nullcontext()


def check_head(model: Any, config: RunConfig) -> None:
    """Raise a `ValueError` if ``loss="linear"`` does not support the model's LM head."""
    if config.loss == "linear":
        try:
            lm_head(model)
        except ValueError as error:
            raise ValueError(f'loss must be "logits" for this model: {error}') from error


def batches(
    rollout: Rollout, rows: Tensor, mask: Tensor, config: RunConfig
) -> Iterator[PackedBatch]:
    """Return the micro-batches of some completions; ``mask`` ``[N, T]`` selects tokens to score.

    Completions of a prompt in one row share its tokens wherever the attention allows it.
    """
    tokens, shares = config.tokens_per_micro_batch, config.attention == BY_SEQUENCE
    return micro_batches(rollout, rows, mask, tokens=tokens, share_prompts=shares)


def policy_outputs(model: Any, batch: PackedBatch, config: RunConfig) -> PolicyOutputs:
    """Run the model over a packed row, in the precision of the configuration."""
    if config.loss == "linear":
        states = hidden_states(backbone(model), batch, config)
        return PolicyOutputs(states, None, limited(lm_head(model), model))
    with_states = isinstance(config, PpoConfig) and config.has_values
    with autocast(config, model.device), offloaded(config):
        out = model(
            **_inputs(batch, config),
            logits_to_keep=batch.predictors,
            output_hidden_states=with_states,
        )
    of_tokens = out.hidden_states[-1][0, batch.predictors] if with_states else None
    return PolicyOutputs(of_tokens, out.logits[0, :, : row_limit(model)], None)


def hidden_states(backbone: Any, batch: PackedBatch, config: RunConfig) -> Tensor:
    """Return the last hidden states ``[n, H]`` at the positions that predict scored tokens."""
    with autocast(config, batch.input_ids.device), offloaded(config):
        out = backbone(**_inputs(batch, config))
    return out.last_hidden_state[0, batch.predictors]  # type: ignore[no-any-return]


def _inputs(batch: PackedBatch, config: RunConfig) -> dict[str, Any]:
    inputs: dict[str, Any] = {
        "input_ids": batch.input_ids,
        "position_ids": batch.position_ids,
        "use_cache": False,
    }
    if config.attention == BY_SEQUENCE:
        inputs["sequences"] = batch.layout
    return inputs


def policy_logprobs(outputs: PolicyOutputs, batch: PackedBatch, config: RunConfig) -> Tensor:
    """Return the log-probabilities ``[n]`` of the scored tokens."""
    options: dict[str, Any] = {
        "token_ids": batch.token_ids,
        "temperature": config.temperature,
        "kept": batch.kept,
    }
    if outputs.logits is not None:
        return token_logprobs(outputs.logits, **options)
    states, head = _states_and_head(outputs)
    with autocast(config, states.device):  # on a GPU the head multiplies in the same precision
        return linear_token_logprobs(states, **head.arguments(), **options)


def policy_loss(
    outputs: PolicyOutputs,
    batch: PackedBatch,
    config: RunConfig,
    advantages: Tensor | None,
    *,
    old_logprobs: Tensor | None,
    ref_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    rollout_top_k: TopKLogprobs | None = None,
    teacher: Teacher | None = None,
    objective: Objective,
    normalizer: Tensor,
) -> PolicyLoss:
    """Return the loss of the scored tokens, fused with its gradient.

    Advantages are ``[S]`` or ``[n]``, or None with only a teacher; log-probabilities are ``[n]``.
    """
    options: dict[str, Any] = {
        "temperature": config.temperature,
        "kept": batch.kept,
        "old_logprobs": old_logprobs,
        "ref_logprobs": ref_logprobs,
        "rollout_logprobs": rollout_logprobs,
        "rollout_top_k": rollout_top_k,
        "teacher": teacher,
        "objective": objective,
        "normalizer": normalizer,
        "cu_seqlens": batch.cu_seqlens,
    }
    tokens: dict[str, Any] = {
        "token_ids": batch.token_ids,
        "advantages": advantages,
        "mask": torch.ones_like(batch.token_ids, dtype=torch.bool),
    }
    if outputs.logits is not None:
        return logits_policy_loss(outputs.logits, **tokens, **options)
    states, head = _states_and_head(outputs)
    with autocast(config, states.device):
        return linear_policy_loss(states, **head.arguments(), **tokens, **options)


@torch.no_grad()
def completion_logprobs(model: Any, rollout: Rollout, rows: Tensor, config: RunConfig) -> Tensor:
    """Return log-probabilities ``[N, T]`` of the completions ``rows``, 0 elsewhere."""
    logprobs = torch.zeros_like(rollout.logprobs)
    for batch in batches(rollout, rows, rollout.mask, config):
        outputs = policy_outputs(model, batch, config)
        batch.put(policy_logprobs(outputs, batch, config), into=logprobs)
    return logprobs


def _states_and_head(outputs: PolicyOutputs) -> tuple[Tensor, LmHead]:
    assert outputs.states is not None
    assert outputs.head is not None
    return outputs.states, outputs.head


@torch.no_grad()
def check_packing(model: Any, config: RunConfig) -> None:
    """Raise a `ValueError` if a sequence's log-probabilities depend on others in the same row.

    The check runs three short sequences, two of which share a prompt, in one row. Other tokens in
    the first sequence must not change the other sequences, and each sequence must have the same
    result alone with the model's own attention.
    """
    if config.attention == BY_SEQUENCE and getattr(model.config, "attention_chunk_size", None):
        raise ValueError(
            f"attention must be sdpa or eager for this model: {BY_SEQUENCE} has no attention in "
            f"chunks of {model.config.attention_chunk_size} tokens"
        )
    config = replace(config, temperature=1.0)
    half = (config.precision, config.weights) != ("float32", "float32")
    rollout, changed = _sequences(model)
    if config.tokens_per_micro_batch > 1:
        packed = replace(config, tokens_per_micro_batch=1024)
        one, other = (_logprobs(model, r, packed) for r in (rollout, changed))
        leak = (one - other)[1:].abs().max()
        if not leak <= (1e-3 if half else 1e-5):
            raise ValueError(
                f"tokens_per_micro_batch must be 1 for this model: with attention "
                f"{config.attention}, sequences in one row affect each other (log-probabilities "
                f"differ by {leak:.2g})"
            )
    else:
        one = _logprobs(model, rollout, config)
    alone = _own_logprobs(model, rollout, config)
    if not torch.allclose(one, alone, rtol=0, atol=0.25 if half else 1e-3):
        raise ValueError(
            f"attention must not be {config.attention} for this model: log-probabilities differ "
            f"from those of the model's own attention by {(one - alone).abs().max():.2g}"
        )


def _logprobs(model: Any, rollout: Rollout, config: RunConfig) -> torch.Tensor:
    return completion_logprobs(model, rollout, torch.arange(3), config)


def _sequences(model: Any) -> tuple[Rollout, Rollout]:
    """Return three sequences, longest first, and a copy with another first completion."""
    tokens = row_count(model)
    ids = torch.randint(tokens, (3, 6), generator=torch.Generator().manual_seed(0))
    completions = [
        Completion(own[:n], torch.zeros(n), True) for own, n in zip(ids, (6, 5, 3), strict=True)
    ]
    prompts = [Prompt({}, ids[0, :4].tolist()), Prompt({}, ids[1, :2].tolist())]
    first = rollout_of(prompts, completions, model.device, [2, 1])
    changed = first.token_ids.clone()
    changed[0] = (changed[0] + 1 + torch.arange(6, device=model.device)) % tokens
    return first, first._replace(token_ids=changed)


def _own_logprobs(model: Any, rollout: Rollout, config: RunConfig) -> torch.Tensor:
    """Return the log-probabilities of each sequence alone, with transformers' own attention."""
    own = replace(config, tokens_per_micro_batch=1)
    if config.attention == BY_SEQUENCE:
        for name in ("sdpa", "eager"):
            try:
                model.set_attn_implementation(name)
            except ValueError:
                continue
            own = replace(own, attention=name)
            break
    try:
        return _logprobs(model, rollout, own)
    finally:
        model.set_attn_implementation(config.attention)

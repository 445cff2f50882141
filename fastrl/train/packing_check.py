"""Whether a model treats each sequence of a packed row as if it were alone."""

from dataclasses import replace
from typing import Any

import torch

from fastrl.train.attention import BY_SEQUENCE
from fastrl.train.config import RunConfig
from fastrl.train.policy import rollout_logprobs
from fastrl.train.rollout import Rollout


@torch.no_grad()
def check_packing(model: Any, config: RunConfig) -> None:
    """Raise a `ValueError` if the log-probabilities of a sequence depend on what is packed with it.

    Three short sequences, two of which share a prompt, are run in one row. Other tokens in the
    first of them must not move the others; and each must be what the model computes of it alone,
    with its own attention.
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
    return rollout_logprobs(model, rollout, torch.arange(3), config)


def _sequences(model: Any) -> tuple[Rollout, Rollout]:
    """Three sequences, the longest first, and the same with another completion in the first."""
    generator = torch.Generator().manual_seed(0)
    tokens = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(tokens, (3, 6), generator=generator)
    lengths = torch.tensor([[6], [3], [5]], device=model.device)

    first = Rollout(
        prompts=[ids[0, :4].tolist(), ids[1, :2].tolist()],
        prompt_of=torch.tensor([0, 1, 0]),
        token_ids=ids.to(model.device),
        mask=torch.arange(6, device=model.device) < lengths,
        logprobs=torch.zeros(3, 6, device=model.device),
        truncated=torch.zeros(3, dtype=torch.bool, device=model.device),
    )
    changed = first.token_ids.clone()
    changed[0] = (changed[0] + 1 + torch.arange(6, device=model.device)) % tokens
    return first, first._replace(token_ids=changed)


def _own_logprobs(model: Any, rollout: Rollout, config: RunConfig) -> torch.Tensor:
    """Log-probabilities of each sequence alone, with an attention of transformers."""
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

"""The outputs of TRL's models for tokens, from hidden states and LM head, without the logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor

from fastrl import KeptTokens
from fastrl.backend import Backend
from fastrl.integrations.transformers import LmHead
from fastrl.ops.linear_token_stats import linear_token_stats

#: TRL's names of statistics, and those in `TokenStats`.
_STATS = {
    "log_probs": "logprobs",
    "entropy": "entropy",
    "log_sum_sq_probs": "sum_sq_probs",
    "is_top1": "is_top1",
}


def token_outputs(
    trainer: Any,
    token_ids: Tensor,
    wanted: Sequence[str],
    *,
    temperature: float = 1.0,
    backend: Backend = "auto",
    kept: KeptTokens | None = None,
    mean_of_all: bool = False,
) -> Callable[[Tensor, LmHead], dict[str, Tensor]]:
    """Return a function that computes TRL's outputs for tokens; all are 0 where a token is -100.

    Only `log_probs` and `entropy` have a gradient. A token counts as `is_top1` if no logit is
    greater; TRL counts only the first of equal logits.

    Args:
        trainer: the trainer, which decides the precision of the LM head.
        token_ids: integers `[B, T]`: the token that each position predicts.
        wanted: some of the names `log_probs`, `entropy`, `log_sum_sq_probs`, `mean_logits`,
            `is_top1`.
        temperature: divides the logits.
        backend: `auto`, or the backend for the chunks.
        kept: the sets of the tokens, over which probabilities are normalized.
        mean_of_all: whether `mean_logits` are computed even where a token is -100.

    Returns:
        A function of the hidden states `[B, T, H]` that predict the tokens, and the head.
    """

    def compute(hidden: Tensor, head: LmHead) -> dict[str, Tensor]:
        mask = token_ids != -100
        with precision_of_head(trainer):
            stats = linear_token_stats(
                hidden,
                token_ids=token_ids,
                temperature=temperature,
                outputs=[_STATS[name] for name in wanted if name in _STATS],
                kept=kept,
                backend=backend,
                **head.arguments(),
            )
            found: dict[str, Tensor] = {n: getattr(stats, _STATS[n]) for n in wanted if n in _STATS}
            if "mean_logits" in wanted:
                rows = None if mean_of_all else mask
                found["mean_logits"] = head.mean_logits(hidden, rows) / temperature
        if "log_sum_sq_probs" in found:
            logs = found["log_sum_sq_probs"].detach().log()
            found["log_sum_sq_probs"] = logs.masked_fill(~mask, 0.0)
        return found

    return compute


def precision_of_head(trainer: Any) -> AbstractContextManager[Any]:
    """Return the autocast under which a GPU multiplies the LM head."""
    if is_head_float32(trainer):
        return torch.autocast(trainer.accelerator.device.type, enabled=False)
    return cast("AbstractContextManager[Any]", trainer.accelerator.autocast())


def is_head_float32(trainer: Any) -> bool:
    """Return whether the LM head multiplies in float32."""
    return bool(getattr(trainer.args, "cast_lm_head_to_fp32", False))

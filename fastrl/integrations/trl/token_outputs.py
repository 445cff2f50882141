"""The outputs of TRL's models for tokens, from hidden states and LM head, without the logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from fastrl.backend import Backend
from fastrl.integrations.transformers import LmHead
from fastrl.integrations.trl.scoring import precision_of_head
from fastrl.ops.linear_token_stats import linear_token_stats

#: TRL's names of statistics, and those in `TokenStats`.
_STATS = {
    "log_probs": "logprobs",
    "entropy": "entropy",
    "log_sum_sq_probs": "sum_sq_probs",
    "is_top1": "is_top1",
}
#: Most logits with a softcap that exist at once, for their mean.
_LOGITS = 2**24


def token_outputs(
    trainer: Any,
    token_ids: Tensor,
    wanted: Sequence[str],
    *,
    temperature: float = 1.0,
    backend: Backend = "auto",
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
                backend=backend,
                **head.arguments(),
            )
            found: dict[str, Tensor] = {n: getattr(stats, _STATS[n]) for n in wanted if n in _STATS}
            if "mean_logits" in wanted:
                rows = None if mean_of_all else mask
                found["mean_logits"] = mean_logits(hidden, head, rows) / temperature
        if "log_sum_sq_probs" in found:
            logs = found["log_sum_sq_probs"].detach().log()
            found["log_sum_sq_probs"] = logs.masked_fill(~mask, 0.0)
        return found

    return compute


@torch.no_grad()
def mean_logits(hidden: Tensor, head: LmHead, mask: Tensor | None = None) -> Tensor:
    """Return the mean of each position's logits over the vocabulary, in fp32, without gradient.

    Without a softcap this is the logit of the mean row of the head. With one, the logits are
    computed once more, a chunk at a time.

    Args:
        hidden: last hidden states, `[B, T, H]`.
        head: the LM head.
        mask: `[B, T]`; the result is 0 where it is false. None means all positions.
    """
    if head.logit_softcap is None:
        means = _mean_without_softcap(hidden, head)
        return means if mask is None else means.masked_fill(~mask, 0.0)
    mask = (
        torch.ones(hidden.shape[:-1], dtype=torch.bool, device=hidden.device)
        if mask is None
        else mask
    )
    rows = hidden[mask]
    chunks = rows.split(max(1, _LOGITS // len(head.weight)))
    means = torch.cat([_mean_with_softcap(chunk, head) for chunk in chunks])
    return means.new_zeros(mask.shape).masked_scatter(mask, means)


def _mean_without_softcap(hidden: Tensor, head: LmHead) -> Tensor:
    row = head.weight.mean(0, dtype=torch.float32)  # [H]
    if head.lora is not None:
        a, b, scale = head.lora
        row = row + scale * (b.mean(0, dtype=torch.float32)[:, None] * a).sum(0)
    with torch.autocast(hidden.device.type, enabled=False):
        means = hidden.float() @ row
    if head.bias is not None:
        means = means + head.bias.mean(dtype=torch.float32)
    return means * head.logit_scale


def _mean_with_softcap(rows: Tensor, head: LmHead) -> Tensor:
    logits = linear(rows, head.weight.to(rows.dtype)).float()
    if head.bias is not None:
        logits += head.bias
    if head.lora is not None:
        a, b, scale = head.lora
        logits += scale * linear(linear(rows, a.to(rows.dtype)), b.to(rows.dtype))
    cap = head.logit_softcap or math.inf
    return cap * (logits * (head.logit_scale / cap)).tanh().mean(-1)

"""Fakes of the operators for traces: shapes and dtypes of the results, without values."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from fastrl.contract import FLAGS, METRICS, Coefficients, RowStats
from fastrl.library import qualified_names


def _fake(name: str) -> Callable[[Callable[..., object]], Callable[..., object]]:
    def register(fake: Callable[..., object]) -> Callable[..., object]:
        for qualified_name in qualified_names(name):
            torch.library.register_fake(qualified_name, fake)
        return fake

    return register


def _per_token(like: Tensor, *dtypes: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(like.new_empty(like.shape, dtype=dtype) for dtype in dtypes)


def _stats(like: Tensor, dtype: torch.dtype) -> RowStats:
    dtypes = (torch.bool if name in FLAGS else dtype for name in RowStats._fields)
    return RowStats._make(_per_token(like, *dtypes))


@_fake("token_stats_fwd")
def _(logits: Tensor, token_ids: Tensor, *_: object) -> tuple[Tensor, ...]:
    return tuple(_stats(token_ids, torch.float32))


@_fake("sequence_weights")
def _(
    mask: Tensor, token_ids: Tensor | None, ignore_index: int, cu_seqlens: Tensor | None, *_: object
) -> tuple[Tensor, Tensor]:
    count = mask.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    differs = token_ids is not None or mask.dtype != torch.bool
    return (
        mask.new_empty(count, dtype=torch.float32),
        mask.new_empty(mask.shape if differs else (0,), dtype=torch.bool),
    )


@_fake("divergence_fwd")
def _(logits: Tensor, teacher_logits: Tensor, token_ids: Tensor, *_: object) -> tuple[Tensor, ...]:
    return _per_token(token_ids, torch.float32, torch.float32, torch.bool)


@_fake("token_stats_bwd")
@_fake("divergence_bwd")
def _(logits: Tensor, *_: object) -> Tensor:
    return logits.new_empty(logits.shape)


@_fake("token_stats_bwd_")
@_fake("divergence_bwd_")
def _(logits: Tensor, *_: object) -> None:
    return None


@_fake("logits_policy_loss_fwd")
def _(logits: Tensor, token_ids: Tensor, *_: object) -> tuple[Tensor, ...]:
    stats = _per_token(token_ids, torch.float32, torch.float32)
    return (*stats, logits.new_empty(logits.shape))


@_fake("logits_policy_loss_fwd_")
def _(logits: Tensor, token_ids: Tensor, *_: object) -> tuple[Tensor, ...]:
    return _per_token(token_ids, torch.float32, torch.float32)


@_fake("policy_loss_fwd")
def _(logprobs: Tensor, *others: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    coefficients = Coefficients._make(cast("list[float]", others[-1]))
    return (
        logprobs.new_empty(()),
        logprobs.new_empty(logprobs.shape),
        logprobs.new_empty(logprobs.shape if coefficients.entropy_coef else (0,)),
        logprobs.new_empty((len(METRICS),)),
    )


@_fake("scale_")
@_fake("huge_pages_")
@_fake("mixed_matmul_")
@_fake("gathered_dots_")
@_fake("gathered_sums_")
@_fake("scattered_sums_")
def _(*_: object) -> None:
    return None


@_fake("gae_fwd")
def _(rewards: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return rewards.new_empty(rewards.shape), rewards.new_empty(rewards.shape)


@_fake("group_advantages_fwd")
def _(rewards: Tensor, *_: object) -> tuple[Tensor, ...]:
    f32 = torch.float32
    return _per_token(rewards, f32, f32, f32, torch.bool)


@_fake("objective_eval")
def _(logprobs: Tensor, *_: object) -> tuple[Tensor, ...]:
    return _per_token(logprobs, *([torch.float64] * 5))

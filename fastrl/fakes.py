"""Fakes of the operators for traces: shapes and dtypes of the results, without values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from fastrl.contract import FLAGS, METRICS, Coefficients, RowStats
from fastrl.library import arithmetic_dtype, qualified_names, stored_dtype


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


@_fake("kept_token_stats_fwd")
def _(logits: Tensor, token_ids: Tensor, *_: object) -> tuple[Tensor, ...]:
    return tuple(_stats(token_ids, arithmetic_dtype(logits, logits)))


@_fake("divergence_fwd")
def _(logits: Tensor, teacher_logits: Tensor, token_ids: Tensor, *_: object) -> tuple[Tensor, ...]:
    return _per_token(token_ids, torch.float32, torch.float32, torch.bool)


@_fake("token_stats_bwd")
@_fake("divergence_bwd")
@_fake("compared_token_stats_bwd")
@_fake("kept_token_stats_bwd")
def _(logits: Tensor, *_: object) -> Tensor:
    return logits.new_empty(logits.shape)


@_fake("token_stats_bwd_")
@_fake("divergence_bwd_")
@_fake("compared_token_stats_bwd_")
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
@_fake("kept_token_stats_bwd_")
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


def _linear_gradients(
    hidden: Tensor, weight: Tensor, *parameters: Tensor | None, needs: list[bool]
) -> list[Tensor]:
    tensors = (hidden, weight, *parameters)
    return [
        (hidden if x is hidden else weight).new_empty(0)
        if x is None or not need
        else torch.empty_like(x, dtype=stored_dtype(x), memory_format=torch.contiguous_format)
        for x, need in zip(tensors, needs, strict=True)
    ]


def _named(name: str, arguments: tuple[object, ...]) -> dict[str, Any]:
    """Return the arguments of an operator in Python by their names."""
    schema = getattr(torch.ops.fastrl, name).default._schema
    return dict(zip((argument.name for argument in schema.arguments), arguments, strict=False))


def _teacher_stats(given: dict[str, Any], real: torch.dtype) -> tuple[Tensor, ...]:
    """Return divergence, entropy, agreement of the top tokens, and inputs of the backward."""
    like = given["token_ids"]
    names = ("teacher_hidden", "teacher_logits", "teacher_logprobs")
    if all(given[name] is None for name in names):
        like = like.new_empty(0)
    return _per_token(like, real, real, torch.bool, real, real, real)


def _parameters(given: dict[str, Any]) -> tuple[Tensor, ...]:
    names = ("hidden", "weight", "bias", "lora_a", "lora_b")
    return tuple(_linear_gradients(*(given[x] for x in names), needs=given["needs"]))


@_fake("compared_token_stats_fwd")
def _(*arguments: object) -> tuple[Tensor, ...]:
    given = _named("compared_token_stats_fwd", arguments)
    real = arithmetic_dtype(given["logits"], given["logits"])
    return (*_stats(given["token_ids"], real), *_teacher_stats(given, real))


@_fake("linear_token_stats_fwd")
def _(*arguments: object) -> tuple[Tensor, ...]:
    given = _named("linear_token_stats_fwd", arguments)
    real = arithmetic_dtype(given["hidden"], given["weight"])
    return (*_stats(given["token_ids"], real), *_teacher_stats(given, real))


@_fake("linear_token_stats_bwd")
def _(*arguments: object) -> tuple[Tensor, ...]:
    return _parameters(_named("linear_token_stats_bwd", arguments))


@_fake("linear_policy_loss_fwd")
def _(*arguments: object) -> tuple[Tensor, ...]:
    given = _named("linear_policy_loss_fwd", arguments)
    real = arithmetic_dtype(given["hidden"], given["weight"])
    logprobs, entropy = _per_token(given["token_ids"], real, real)
    return (logprobs, entropy, *_teacher_stats(given, real)[:3], *_parameters(given))

"""The registered operators: every `torch.library` schema and fake, once for all backends.

Backends only implement what stands here, each in a namespace of its own. Per-token tensors are
`[B, T]`, logits `[B, T, V]` with any batch strides and vocabulary stride 1; the public functions
in `fastrl.ops` see to both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

#: Order of the metrics vector that `policy_loss_fwd` returns.
METRICS = (
    "policy_loss",
    "kl",
    "kl_old",
    "entropy",
    "ratio_mean",
    "ratio_max",
    "ratio_min",
    "clip_low",
    "clip_high",
    "clip_fraction",
    "active_tokens",
    "zero_grad_fraction",
)

_LOGITS = (
    "Tensor token_ids, Tensor active, Tensor? temperatures, "
    "float temperature, float logit_scale, float logit_softcap"
)
_OBJECTIVE = "int ratio, int kl_estimator, int kl_gradient, float[] coefficients"
# `weights` multiply the policy term; those of KL and entropy, where absent, are the same.
_WEIGHTS = "Tensor weights, Tensor? kl_weights, Tensor? entropy_weights"
_STATS_BACKWARD = (
    f"{_LOGITS}, Tensor row_max, Tensor log_sum, Tensor entropy, "
    "Tensor? grad_logprobs, Tensor? grad_entropy, Tensor? grad_logsumexp"
)
_ONE_PASS = (
    f"{_LOGITS}, Tensor advantages, {_WEIGHTS}, "
    f"Tensor? old_logprobs, Tensor? ref_logprobs, {_OBJECTIVE}"
)
# Linear forms: hidden [N, H], per-token tensors [N]; an absent chunk size is chosen.
_LINEAR = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor? lora_a, Tensor? lora_b, "
    f"float lora_scale, {_LOGITS}, int? chunk_tokens, bool compact, str backend"
)
_LINEAR_GRADIENTS = (
    "(Tensor grad_hidden, Tensor grad_weight, Tensor grad_bias, "
    "Tensor grad_lora_a, Tensor grad_lora_b)"
)

_SCHEMAS = {
    "token_stats_fwd": (
        f"(Tensor logits, {_LOGITS}, bool with_entropy, bool with_sum_sq_probs) -> "
        "(Tensor logprobs, Tensor entropy, Tensor logsumexp, Tensor sum_sq_probs, "
        "Tensor is_top1, Tensor row_max, Tensor log_sum)"
    ),
    "token_stats_bwd": f"(Tensor logits, {_STATS_BACKWARD}) -> Tensor",
    "token_stats_bwd_": f"(Tensor(a!) logits, {_STATS_BACKWARD}) -> ()",
    "logits_policy_loss_fwd": (
        f"(Tensor logits, {_ONE_PASS}) -> (Tensor logprobs, Tensor entropy, Tensor grad_logits)"
    ),
    "logits_policy_loss_fwd_": (
        f"(Tensor(a!) logits, {_ONE_PASS}) -> (Tensor logprobs, Tensor entropy)"
    ),
    "policy_loss_fwd": (
        f"(Tensor logprobs, Tensor advantages, Tensor mask, {_WEIGHTS}, Tensor? old_logprobs, "
        "Tensor? ref_logprobs, Tensor? entropy, Tensor? cu_seqlens, int level, "
        f"{_OBJECTIVE}) -> (Tensor loss, Tensor slope, Tensor metrics)"
    ),
    "gae_fwd": (
        "(Tensor rewards, Tensor values, Tensor? mask, Tensor? terminated, Tensor? truncated, "
        "Tensor? bootstrap_values, Tensor? cu_seqlens, float gamma, float lam) -> "
        "(Tensor advantages, Tensor returns)"
    ),
    "group_advantages_fwd": (
        "(Tensor rewards, Tensor? group_ids, int group_size, int baseline, int scale, "
        "float correction, float eps, int singleton) -> "
        "(Tensor advantages, Tensor mean, Tensor std, Tensor informative)"
    ),
    "linear_token_stats_fwd": (
        f"({_LINEAR}) -> (Tensor logprobs, Tensor entropy, Tensor logsumexp, "
        "Tensor sum_sq_probs, Tensor is_top1, Tensor row_max, Tensor log_sum)"
    ),
    "linear_token_stats_bwd": (
        f"({_LINEAR}, Tensor row_max, Tensor log_sum, Tensor entropy, Tensor? grad_logprobs, "
        f"Tensor? grad_entropy, Tensor? grad_logsumexp, bool[] needs) -> {_LINEAR_GRADIENTS}"
    ),
    "linear_policy_loss_fwd": (
        f"({_LINEAR}, Tensor advantages, {_WEIGHTS}, Tensor? old_logprobs, "
        f"Tensor? ref_logprobs, {_OBJECTIVE}, bool[] needs, bool metrics) -> "
        f"(Tensor logprobs, Tensor entropy, {_LINEAR_GRADIENTS[1:]}"
    ),
    # Which vector code the CPU kernels use here: avx512, avx2 or plain.
    "cpu_capability": "() -> str",
    # Whether the CPU multiplies bfloat16 on matrix tiles (AMX); then out (+)= a b with sums in
    # float32, b in bfloat16, a in bfloat16 or in float32 taken as the sum of two bfloat16.
    "has_matrix_tiles": "() -> bool",
    # Ask for large pages under a new tensor on the CPU that nobody has written to yet.
    "large_pages_": "(Tensor(a!) tensor) -> ()",
    "mixed_matmul_": "(Tensor(a!) out, Tensor a, Tensor b, bool accumulate) -> ()",
    # For the tests: the scalar objective of the C++ header, point by point in float64.
    "objective_eval": (
        "(Tensor logprobs, Tensor log_ratio, Tensor advantages, Tensor ref_minus_logprob, "
        f"{_OBJECTIVE}) -> (Tensor loss, Tensor slope, Tensor clip, Tensor kl, Tensor kl_slope)"
    ),
}

#: Where the operators of each compiled backend stand. The loops of the linear forms, which take
#: the backend of their chunks as an argument, stand in the first alone.
NAMESPACES = {"cpu": "fastrl", "triton": "fastrl_triton", "cuda": "fastrl_cuda"}
_ONLY_ONCE = ("linear_", "cpu_", "has_", "large_", "mixed_", "objective_eval")


def operators(backend: str) -> Any:
    """Return the namespace that holds a compiled backend's operators."""
    return getattr(torch.ops, NAMESPACES[backend])


def _places(name: str) -> list[str]:
    once = name.startswith(_ONLY_ONCE)
    return [f"{space}::{name}" for space in NAMESPACES.values() if space == "fastrl" or not once]


#: The names of all operators.
OPERATORS = tuple(_SCHEMAS)

for _name, _schema in _SCHEMAS.items():
    for _place in _places(_name):
        torch.library.define(_place, _schema, tags=(torch.Tag.pt2_compliant_tag,))


def _fake(name: str) -> Callable[[Callable[..., object]], Callable[..., object]]:
    def register(fake: Callable[..., object]) -> Callable[..., object]:
        for place in _places(name):
            torch.library.register_fake(place, fake)
        return fake

    return register


def _per_token(like: Tensor, *dtypes: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(like.new_empty(like.shape, dtype=dtype) for dtype in dtypes)


@_fake("token_stats_fwd")
def _(logits: Tensor, token_ids: Tensor, *_: object) -> tuple[Tensor, ...]:
    f32 = torch.float32
    return _per_token(token_ids, f32, f32, f32, f32, torch.bool, f32, f32)


@_fake("token_stats_bwd")
def _(logits: Tensor, *_: object) -> Tensor:
    return logits.new_empty(logits.shape)


@_fake("token_stats_bwd_")
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
def _(logprobs: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return (
        logprobs.new_empty(()),
        logprobs.new_empty(logprobs.shape),
        logprobs.new_empty((len(METRICS),)),
    )


@_fake("large_pages_")
@_fake("mixed_matmul_")
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
    hidden: Tensor, *parameters: Tensor | None, needs: list[bool]
) -> list[Tensor]:
    return [
        hidden.new_empty(0)
        if parameter is None or not need
        else torch.empty_like(
            parameter,
            dtype=stored_dtype(parameter),
            memory_format=torch.contiguous_format,
        )
        for parameter, need in zip((hidden, *parameters), needs, strict=True)
    ]


def arithmetic_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype of logits, sums and accumulated gradients: float32, or float64 where one is."""
    double = torch.float64 in (hidden.dtype, weight.dtype)
    return torch.float64 if double else torch.float32


def stored_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype a gradient waits in for the backward: that of its parameter, wide enough."""
    return torch.float32 if parameter.dtype == torch.float16 else parameter.dtype


@_fake("linear_token_stats_fwd")
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_a: Tensor | None,
    lora_b: Tensor | None,
    lora_scale: float,
    token_ids: Tensor,
    *_: object,
) -> tuple[Tensor, ...]:
    real = arithmetic_dtype(hidden, weight)
    return _per_token(token_ids, real, real, real, real, torch.bool, real, real)


@_fake("linear_token_stats_bwd")
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_a: Tensor | None,
    lora_b: Tensor | None,
    *others: object,
) -> tuple[Tensor, ...]:
    needs = cast("list[bool]", others[-1])
    return tuple(_linear_gradients(hidden, weight, bias, lora_a, lora_b, needs=needs))


@_fake("linear_policy_loss_fwd")
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_a: Tensor | None,
    lora_b: Tensor | None,
    lora_scale: float,
    token_ids: Tensor,
    *others: object,
) -> tuple[Tensor, ...]:
    real = arithmetic_dtype(hidden, weight)
    needs = cast("list[bool]", others[-2])
    gradients = _linear_gradients(hidden, weight, bias, lora_a, lora_b, needs=needs)
    return (*_per_token(token_ids, real, real), *gradients)

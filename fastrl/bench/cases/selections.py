"""What a run measures if nothing is named: shapes of real models, the most telling first.

A run may stop at its limit of time, so that kinds of work take turns.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch

from fastrl.bench.case import Size
from fastrl.bench.inputs import AUTOCAST, FROZEN, MASKED, PACKED, SLICED, WITH_TEACHER

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
BOTH = (FLOAT32, BFLOAT16)
Shapes = Sequence[tuple[str, int]]  # models and rows


def _sizes(
    op: str, shapes: Shapes, dtypes: Iterable[torch.dtype], variants: Iterable[str] = ("",)
) -> list[Size]:
    return [
        Size(op, model, rows, dtype, variant)
        for variant in variants
        for model, rows in shapes
        for dtype in dtypes
    ]


def _in_turn(*kinds: list[Size]) -> list[Size]:
    turns = itertools.zip_longest(*kinds)
    return [size for turn in turns for size in turn if size is not None]


def _tokens(op: str, *shapes: tuple[int, int], level: str = "") -> list[Size]:
    return [Size(op, "", B * T, FLOAT32, f"{level}{T} tokens each") for B, T in shapes]


def _groups(*shapes: tuple[int, int]) -> list[Size]:
    return [
        Size("group_advantages", "", prompts * group, FLOAT32, f"groups of {group}{by_id}")
        for prompts, group in shapes
        for by_id in ("", " by id")
    ]


_CPU_LOGITS = [
    ("qwen3-0.6b", 256), ("mistral-7b", 1024), ("gpt2", 512), ("llama-3.1-8b", 256),
    ("deepseek-v3", 256), ("gemma-3-1b", 128),
]  # fmt: skip
_CPU_LINEAR = [("smollm2-135m", 1024), ("qwen2.5-0.5b", 512), ("qwen3-0.6b", 256)]
_CPU_SMALL = [("smollm2-135m", 1024)]
_ROLLOUTS = ((32, 1024), (8, 128), (256, 4096))

_LOGITS = [
    ("qwen3-0.6b", 8192), ("llama-3.1-8b", 8192), ("mistral-7b", 8192), ("gpt2", 4096),
    ("gemma-3-1b", 4096), ("qwen3-0.6b", 256), ("qwen3-0.6b", 64), ("mistral-7b", 32768),
]  # fmt: skip
_LINEAR = [("llama-3.1-8b", 8192), ("qwen2.5-0.5b", 8192)]
_LARGE = _LOGITS[:1]
_TOKENS = ((16, 4096), (64, 16384), (16, 640), (256, 40960))
_LONG = ((16, 131072), (8192, 2048), (4096, 128), (512, 4096), (16, 32768), (1, 1048576))

SELECTIONS = {
    "cpu": _in_turn(
        _sizes("token_logprobs", _CPU_LOGITS, BOTH),
        _sizes("logits_policy_loss", _CPU_LOGITS, BOTH),
        _sizes("linear_policy_loss", _CPU_LINEAR, BOTH),
        _sizes("linear_policy_loss", _CPU_SMALL, BOTH, (MASKED, "32 kept", "512 kept"))
        + _sizes("linear_policy_loss", _CPU_SMALL, BOTH, (WITH_TEACHER, FROZEN)),
        _sizes("token_stats", _CPU_LOGITS, BOTH),
        _sizes("linear_token_logprobs", _CPU_LINEAR, BOTH),
        _sizes("linear_divergence", _CPU_SMALL, BOTH, ("", "forward KL", "Jensen-Shannon"))
        + _sizes("token_divergence", _CPU_LOGITS[:1], BOTH),
        _tokens("gae", (256, 4096), (4096, 128), (16, 32768), (1, 262144), (32, 1024), (8, 128)),
        _groups((1024, 8), (16, 4), (1024, 64)),
        _tokens("policy_loss", *_ROLLOUTS)
        + _tokens("policy_loss", *_ROLLOUTS, level="sequence level, "),
    ),
    "cuda": _in_turn(
        _sizes("logits_policy_loss", _LOGITS[:6], [BFLOAT16])
        + _sizes("logits_policy_loss", _LARGE, [BFLOAT16], [MASKED, PACKED])
        + _sizes("logits_policy_loss", [("qwen3-0.6b", 4096)], [FLOAT32])
        + _sizes("logits_policy_loss", [("deepseek-v3", 2048)], [BFLOAT16], [SLICED])
        + _sizes("logits_policy_loss", _LOGITS[6:], [BFLOAT16]),
        _sizes("linear_policy_loss", _LINEAR, [BFLOAT16], ("", MASKED, FROZEN, AUTOCAST))
        + _sizes("linear_policy_loss", _LINEAR, [BFLOAT16], (WITH_TEACHER, "32 kept", "512 kept")),
        _sizes("token_stats", _LOGITS, [BFLOAT16])
        + _sizes("token_stats", [("deepseek-v3", 2048)], [BFLOAT16], [SLICED]),
        _tokens("gae", *_LONG),
        _sizes("linear_token_logprobs", _LINEAR, [BFLOAT16])
        + _sizes("linear_divergence", _LINEAR, [BFLOAT16]),
        _groups((128, 8), (16, 4), (1024, 16), (256, 64)),
        _tokens("policy_loss", *_TOKENS)
        + _tokens("policy_loss", *_TOKENS, level="sequence level, "),
        _sizes("token_logprobs", _LOGITS, [BFLOAT16])
        + _sizes("token_logprobs", [("qwen3-0.6b", 4096)], [FLOAT32])
        + _sizes("token_divergence", [("qwen3-0.6b", 4096)], [BFLOAT16]),
    ),
    "quick-cpu": [
        Size("linear_policy_loss", "smollm2-135m", 256, FLOAT32),
        Size("logits_policy_loss", "qwen3-0.6b", 256, BFLOAT16),
        Size("logits_policy_loss", "qwen3-0.6b", 256, FLOAT32),
        Size("token_logprobs", "qwen3-0.6b", 256, FLOAT32),
        *_tokens("gae", (256, 4096)),
        *_groups((1024, 8))[:1],
    ],
    "quick-cuda": [
        Size("linear_policy_loss", "qwen2.5-0.5b", 4096, BFLOAT16),
        Size("logits_policy_loss", "qwen3-0.6b", 4096, BFLOAT16),
        Size("token_logprobs", "qwen3-0.6b", 4096, BFLOAT16),
        *_tokens("gae", (512, 4096)),
        *_groups((1024, 16))[:1],
        *_tokens("policy_loss", (64, 16384)),
    ],
    "smoke": [
        Size("token_logprobs", "tiny", 16, FLOAT32),
        Size("token_stats", "tiny", 16, BFLOAT16, SLICED),
        Size("logits_policy_loss", "tiny", 16, FLOAT32, MASKED),
        Size("logits_policy_loss", "tiny", 128, BFLOAT16, PACKED),
        Size("linear_token_logprobs", "tiny", 16, FLOAT32),
        Size("linear_policy_loss", "tiny", 96, FLOAT32),
        *_sizes("linear_policy_loss", [("tiny", 16)], [BFLOAT16], (FROZEN, MASKED, AUTOCAST)),
        *_sizes("linear_policy_loss", [("tiny", 16)], [FLOAT32], (WITH_TEACHER, "32 kept")),
        Size("token_divergence", "tiny", 16, FLOAT32, "forward KL"),
        Size("linear_divergence", "tiny", 16, FLOAT32),
        Size("linear_divergence", "tiny", 16, BFLOAT16, "Jensen-Shannon"),
        Size("policy_loss", "", 120, FLOAT32),
        *_tokens("policy_loss", (3, 40), level="sequence level, "),
        *_tokens("gae", (3, 40)),
        *_groups((4, 4)),
    ],
}

"""Calls that must be refused: a legal call of each function, and what can be wrong with it.

A refusal is a `ValueError` or `TypeError` that names the argument.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

import fastrl
from fastrl import Objective, RolloutCorrection

from .case import Case
from .compare import Difference

NAN = float("nan")
LOSSES = ("policy_loss", "logits_policy_loss", "linear_policy_loss")
TOKENS = ("token_logprobs", "token_stats", "linear_token_logprobs", "linear_token_stats")
WITH_IDS = (*TOKENS, *LOSSES[1:])
LINEAR = (*TOKENS[2:], LOSSES[2])
WITH_LOGITS = (*TOKENS[:2], LOSSES[1])
COMPILED = (*TOKENS, *LOSSES, "group_advantages", "gae", "discounted_returns")
PLAIN = ("value_loss", "kl_divergence", "token_weights", "whiten", "masked_mean")


def legal(function: str) -> dict[str, Any]:
    """Return the arguments of a legal call, `[2, 3]` tokens and a vocabulary of 4."""
    tokens = torch.full((2, 3), -1.0)
    mask = torch.ones(2, 3, dtype=torch.bool)
    given: dict[str, Any] = {}
    if function in LINEAR:
        given |= {"hidden": torch.ones(2, 3, 2), "weight": torch.ones(4, 2)}
    if function in WITH_LOGITS:
        given["logits"] = torch.zeros(2, 3, 4)
    if function in WITH_IDS:
        given["token_ids"] = torch.zeros(2, 3, dtype=torch.int64)
    if function in LOSSES:
        given |= {"advantages": torch.ones(2), "mask": mask, "objective": "ppo"}
    of_others = {
        "policy_loss": {"logprobs": tokens},
        "value_loss": {"values": tokens, "returns": tokens, "mask": mask},
        "kl_divergence": {"logprobs": tokens, "ref_logprobs": tokens},
        "token_weights": {"mask": mask, "aggregation": "token-mean"},
        "whiten": {"x": tokens, "mask": mask},
        "masked_mean": {"x": tokens, "mask": mask},
        "group_advantages": {"rewards": torch.ones(6), "group_size": 3},
        "gae": {"rewards": tokens, "values": tokens},
        "discounted_returns": {"rewards": tokens},
    }
    return {**given, **of_others.get(function, {})}


@dataclasses.dataclass(frozen=True)
class Wrong:
    """What is wrong with a call, and the word that the error message must contain."""

    functions: tuple[str, ...]
    says: str
    change: Callable[[dict[str, Any], str], dict[str, Any]]


def _with(**changes: Any) -> Callable[[dict[str, Any], str], dict[str, Any]]:
    return lambda given, backend: changes


def _objective(**fields: Any) -> Callable[[dict[str, Any], str], dict[str, Any]]:
    return lambda given, backend: {"objective": Objective(**fields)}


def _own(given: dict[str, Any], backend: str) -> dict[str, Any]:
    named = backend if backend in ("cpu", "triton", "cuda") else "cpu"
    return {"objective": lambda logprobs, old, ref, advantages: -logprobs, "backend": named}


IDS = torch.zeros(2, 3, dtype=torch.int64)
OTHERS = torch.zeros(2, 2)
WRONG: dict[str, Wrong] = {
    "ids beyond the vocabulary": Wrong(WITH_IDS, "token_ids", _with(token_ids=IDS + 4)),
    "ids below 0": Wrong(WITH_IDS, "token_ids", _with(token_ids=IDS - 1)),
    "ids of floats": Wrong(WITH_IDS, "token_ids", _with(token_ids=IDS.float())),
    "ids of another shape": Wrong(WITH_IDS, "token_ids", _with(token_ids=IDS[:, :2])),
    "logits of integers": Wrong(WITH_LOGITS, "logits", _with(logits=torch.zeros(2, 3, 4).long())),
    "logits without vocabulary": Wrong(WITH_LOGITS, "logits", _with(logits=torch.zeros(2, 3, 0))),
    "a weight of another width": Wrong(LINEAR, "weight", _with(weight=torch.ones(4, 3))),
    "a bias of another length": Wrong(LINEAR, "bias", _with(bias=torch.ones(3))),
    "a lora of two parts": Wrong(LINEAR, "lora", _with(lora=(torch.ones(1, 2), torch.ones(4, 1)))),
    "chunks of nothing": Wrong(LINEAR, "chunk_tokens", _with(chunk_tokens=0)),
    "temperature 0": Wrong(WITH_IDS, "temperature", _with(temperature=0.0)),
    "temperature NaN": Wrong(WITH_IDS, "temperature", _with(temperature=NAN)),
    "temperatures with a 0": Wrong(WITH_IDS, "temperature", _with(temperature=torch.zeros(2))),
    "temperatures of another shape": Wrong(
        WITH_IDS, "temperature", _with(temperature=torch.ones(3))
    ),
    "a temperature too small": Wrong(WITH_IDS, "temperature", _with(temperature=1e-39)),
    "a temperature far too small": Wrong(WITH_IDS, "temperature", _with(temperature=1e-300)),
    "a softcap over a small temperature": Wrong(
        WITH_IDS, "temperature", _with(logit_softcap=1e10, temperature=1e-30)
    ),
    "logit_scale 0": Wrong(WITH_IDS, "logit_scale", _with(logit_scale=0.0)),
    "a negative softcap": Wrong(WITH_IDS, "logit_softcap", _with(logit_softcap=-1.0)),
    "an unknown output": Wrong(("token_stats",), "outputs", _with(outputs=("logprob",))),
    "an unknown backend": Wrong((*COMPILED, *PLAIN), "backend", _with(backend="gpu")),
    "a compiled backend of plain torch": Wrong(PLAIN, "backend", _with(backend="cpu")),
    "float64 on a compiled backend": Wrong(
        ("token_stats", "logits_policy_loss"),
        "float64",
        _with(logits=torch.zeros(2, 3, 4, dtype=torch.float64), backend="cpu"),
    ),
    "a mask of twos": Wrong((*LOSSES, "value_loss", "whiten"), "mask", _with(mask=IDS + 2)),
    "a mask of another shape": Wrong((*LOSSES, "value_loss"), "mask", _with(mask=OTHERS)),
    "no mask": Wrong(LOSSES, "mask", _with(mask=None)),
    "advantages of integers": Wrong(LOSSES, "advantages", _with(advantages=IDS)),
    "advantages of another shape": Wrong(LOSSES, "advantages", _with(advantages=torch.ones(3))),
    "old_logprobs of another shape": Wrong(LOSSES, "old_logprobs", _with(old_logprobs=OTHERS)),
    "a KL without reference": Wrong(LOSSES, "ref_logprobs", _objective(kl_coef=0.1)),
    "rollout_logprobs without use": Wrong(
        LOSSES, "rollout_logprobs", _with(rollout_logprobs=torch.ones(2, 3))
    ),
    "a correction without rollout_logprobs": Wrong(
        LOSSES, "rollout_logprobs", _objective(rollout_correction=RolloutCorrection())
    ),
    "a bonus without entropy": Wrong(LOSSES[:1], "entropy", _objective(entropy_coef=0.1)),
    "a quantile without entropy": Wrong(
        LOSSES[:1], "entropy", _objective(top_entropy_quantile=0.5)
    ),
    "an unknown preset": Wrong(LOSSES, "objective", _with(objective="pppo")),
    "an objective that is none": Wrong(LOSSES, "objective", _with(objective=1.0)),
    "cu_seqlens of padded tokens": Wrong(
        (*LOSSES, "gae", "value_loss"), "cu_seqlens", _with(cu_seqlens=torch.tensor([0, 6]))
    ),
    "groups without use": Wrong(LOSSES, "group_size", _with(group_size=1)),
    "prompts without groups": Wrong(LOSSES, "group", _objective(aggregation="prompt-mean")),
    "a normalizer of 0": Wrong((*LOSSES, "token_weights"), "normalizer", _with(normalizer=0.0)),
    "a normalizer of a sum": Wrong(
        LOSSES,
        "normalizer",
        lambda given, backend: {"objective": Objective(aggregation="token-sum"), "normalizer": 2.0},
    ),
    "a function on a compiled backend": Wrong(LOSSES, "function", _own),
    "a normalizer of no term": Wrong(LOSSES, "normalizer", _with(normalizer={})),
    "rows that overlap, in place": Wrong(
        ("token_logprobs", "token_stats"),
        "inplace_backward",
        lambda given, backend: {
            "logits": torch.zeros(1, 3, 4, requires_grad=True).expand(2, 3, 4),
            "inplace_backward": True,
        },
    ),
    "a leaf, in place": Wrong(
        WITH_LOGITS[2:],
        "inplace",
        lambda given, backend: {
            "logits": torch.zeros(2, 3, 4, requires_grad=True),
            "inplace": True,
        },
    ),
    "groups that do not divide": Wrong(("group_advantages",), "group_size", _with(group_size=4)),
    "no groups": Wrong(("group_advantages",), "group_size", _with(group_size=None)),
    "a negative eps": Wrong(("group_advantages",), "eps", _with(eps=-1.0)),
    "an unknown baseline": Wrong(("group_advantages",), "baseline", _with(baseline="median")),
    "gamma above 1": Wrong(("gae", "discounted_returns"), "gamma", _with(gamma=1.5)),
    "bootstrap values of another shape": Wrong(
        ("gae", "discounted_returns"), "bootstrap_values", _with(bootstrap_values=torch.ones(3))
    ),
    "values of another shape": Wrong(("gae",), "values", _with(values=OTHERS)),
    "clip without old_values": Wrong(("value_loss",), "old_values", _with(clip=0.2)),
    "old_values without clip": Wrong(
        ("value_loss",), "clip", _with(old_values=torch.full((2, 3), -1.0))
    ),
    "an unknown estimator": Wrong(("kl_divergence",), "estimator", _with(estimator="k4")),
    "a clamp of 0": Wrong(("kl_divergence",), "clamp", _with(clamp=0.0)),
    "an unknown aggregation": Wrong(("token_weights",), "aggregation", _with(aggregation="mean")),
    "a dimension too many": Wrong(("masked_mean",), "dim", _with(dim=2)),
}
#: Fields of an objective that would have no effect, or that contradict each other.
IDLE_FIELDS: dict[str, dict[str, Any]] = {
    "kl_estimator": {"kl_estimator": "k1"},
    "kl_clamp": {"kl_clamp": 1.0},
    "kl_gradient": {"kl_gradient": "straight-through"},
    "kl_aggregation": {"kl_aggregation": "token-sum"},
    "entropy_aggregation": {"entropy_aggregation": "token-sum"},
    "rollout_weighs": {"rollout_weighs": "policy"},
    "delta": {"delta": 1.1},
    "dual_clip": {"dual_clip": 1.0},
    "level": {"surrogate": "gmpo"},
    "log_ratio_clamp": {"log_ratio_clamp": (1.0, 2.0)},
    "clip_low": {"clip_low": 1.5},
    "length_norm": {"length_norm": 8.0},
    "count_empty": {"count_empty": True},
    "sapo_temperature_pos": {"sapo_temperature_pos": 2.0},
    "top_entropy_quantile": {"top_entropy_quantile": 0.0},
}
WRONG |= {
    f"field {name}": Wrong(
        LOSSES[:1], name, lambda given, backend, fields=fields: {"objective": Objective(**fields)}
    )
    for name, fields in IDLE_FIELDS.items()
}


def wrongs_of(function: str) -> list[str]:
    return [name for name, wrong in WRONG.items() if function in wrong.functions]


def refusal_differences(case: Case, backend: str) -> list[Difference]:
    """Return no difference if the call of this case is refused as expected."""
    wrong = WRONG[case.wrong]
    given = legal(case.function)
    if case.function not in PLAIN:
        given["backend"] = backend
    try:
        getattr(fastrl, case.function)(**{**given, **wrong.change(given, backend)})
    except (ValueError, TypeError) as refusal:
        if wrong.says in str(refusal):
            return []
        return [Difference("call", f"refused without {wrong.says!r}", str(refusal))]
    return [Difference("call", "not refused", case.wrong)]

"""Calls that must be refused: a legal call of each function, and what can be wrong with it.

A refusal is a `ValueError` or `TypeError` that names the argument.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

import fastrl
from fastrl import Objective, RolloutCorrection

LOSSES = ("policy_loss", "logits_policy_loss", "linear_policy_loss")
TOKENS = ("token_logprobs", "token_stats", "linear_token_logprobs", "linear_token_stats")
WITH_IDS = (*TOKENS, *LOSSES[1:])
LINEAR = (*TOKENS[2:], LOSSES[2])
WITH_LOGITS = (*TOKENS[:2], LOSSES[1])
REWARDS = ("gae", "discounted_returns")
PLAIN = ("value_loss", "kl_divergence", "token_weights", "whiten", "masked_mean")

NAN = float("nan")
TWO_BY_THREE = torch.full((2, 3), -1.0)
MASK = torch.ones(2, 3, dtype=torch.bool)
IDS = torch.zeros(2, 3, dtype=torch.int64)
LOGITS = torch.zeros(2, 3, 4)
OTHERS = torch.zeros(2, 2)
LEGAL_OF_OTHERS: dict[str, dict[str, Any]] = {
    "policy_loss": {"logprobs": TWO_BY_THREE},
    "value_loss": {"values": TWO_BY_THREE, "returns": TWO_BY_THREE, "mask": MASK},
    "kl_divergence": {"logprobs": TWO_BY_THREE, "ref_logprobs": TWO_BY_THREE},
    "token_weights": {"mask": MASK, "aggregation": "token-mean"},
    "whiten": {"x": TWO_BY_THREE, "mask": MASK},
    "masked_mean": {"x": TWO_BY_THREE, "mask": MASK},
    "group_advantages": {"rewards": torch.ones(6), "group_size": 3},
    "gae": {"rewards": TWO_BY_THREE, "values": TWO_BY_THREE},
    "discounted_returns": {"rewards": TWO_BY_THREE},
}


def legal(function: str) -> dict[str, Any]:
    """Return the arguments of a legal call, `[2, 3]` tokens and a vocabulary of 4."""
    given: dict[str, Any] = {}
    if function in LINEAR:
        given |= {"hidden": torch.ones(2, 3, 2), "weight": torch.ones(4, 2)}
    if function in WITH_LOGITS:
        given["logits"] = LOGITS
    if function in WITH_IDS:
        given["token_ids"] = IDS
    if function in LOSSES:
        given |= {"advantages": torch.ones(2), "mask": MASK, "objective": "ppo"}
    return {**given, **LEGAL_OF_OTHERS.get(function, {})}


class Wrong(NamedTuple):
    """What is wrong with a call of these functions; the message has the first of its names."""

    functions: tuple[str, ...]
    changes: dict[str, Any]
    says: str | None = None

    def message(self) -> str:
        return self.says or next(iter(self.changes))


def _of_objective(functions: tuple[str, ...], says: str, **fields: Any) -> Wrong:
    return Wrong(functions, {"objective": fields}, says)


def _own(logprobs: Any, old: Any, ref: Any, advantages: Any) -> Any:
    return -logprobs


def _given_away(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, 3, 4, requires_grad=True)


WRONG: dict[str, Wrong] = {
    "ids beyond the vocabulary": Wrong(WITH_IDS, {"token_ids": IDS + 4}),
    "ids below 0": Wrong(WITH_IDS, {"token_ids": IDS - 1}),
    "ids of floats": Wrong(WITH_IDS, {"token_ids": IDS.float()}),
    "ids of another shape": Wrong(WITH_IDS, {"token_ids": IDS[:, :2]}),
    "logits of integers": Wrong(WITH_LOGITS, {"logits": LOGITS.long()}),
    "logits without vocabulary": Wrong(WITH_LOGITS, {"logits": LOGITS[..., :0]}),
    "a weight of another width": Wrong(LINEAR, {"weight": torch.ones(4, 3)}),
    "a bias of another length": Wrong(LINEAR, {"bias": torch.ones(3)}),
    "a lora of two parts": Wrong(LINEAR, {"lora": (torch.ones(1, 2), torch.ones(4, 1))}),
    "chunks of nothing": Wrong(LINEAR, {"chunk_tokens": 0}),
    "temperature 0": Wrong(WITH_IDS, {"temperature": 0.0}),
    "temperature NaN": Wrong(WITH_IDS, {"temperature": NAN}),
    "temperatures with a 0": Wrong(WITH_IDS, {"temperature": torch.zeros(2)}),
    "temperatures of another shape": Wrong(WITH_IDS, {"temperature": torch.ones(3)}),
    "a temperature too small": Wrong(WITH_IDS, {"temperature": 1e-39}),
    "a temperature far too small": Wrong(WITH_IDS, {"temperature": 1e-300}),
    "a softcap over a small temperature": Wrong(
        WITH_IDS, {"temperature": 1e-30, "logit_softcap": 1e10}
    ),
    "logit_scale 0": Wrong(WITH_IDS, {"logit_scale": 0.0}),
    "a negative softcap": Wrong(WITH_IDS, {"logit_softcap": -1.0}),
    "an unknown output": Wrong(("token_stats",), {"outputs": ("logprob",)}),
    "an unknown backend": Wrong(
        (*TOKENS, *LOSSES, "group_advantages", *REWARDS, *PLAIN), {"backend": "gpu"}
    ),
    "a compiled backend of plain torch": Wrong(PLAIN, {"backend": "cpu"}),
    "float64 on a compiled backend": Wrong(
        ("token_stats", "logits_policy_loss"),
        {"logits": LOGITS.double(), "backend": "cpu"},
        "float64",
    ),
    "a mask of twos": Wrong((*LOSSES, "value_loss", "whiten"), {"mask": IDS + 2}),
    "a mask of another shape": Wrong((*LOSSES, "value_loss"), {"mask": OTHERS}),
    "no mask": Wrong(LOSSES, {"mask": None}),
    "advantages of integers": Wrong(LOSSES, {"advantages": IDS}),
    "advantages of another shape": Wrong(LOSSES, {"advantages": torch.ones(3)}),
    "old_logprobs of another shape": Wrong(LOSSES, {"old_logprobs": OTHERS}),
    "a KL without reference": _of_objective(LOSSES, "ref_logprobs", kl_coef=0.1),
    "rollout_logprobs without use": Wrong(LOSSES, {"rollout_logprobs": TWO_BY_THREE}),
    "a correction without rollout_logprobs": _of_objective(
        LOSSES, "rollout_logprobs", rollout_correction=RolloutCorrection()
    ),
    "a bonus without entropy": _of_objective(LOSSES[:1], "entropy", entropy_coef=0.1),
    "a quantile without entropy": _of_objective(LOSSES[:1], "entropy", top_entropy_quantile=0.5),
    "an unknown preset": Wrong(LOSSES, {"objective": "pppo"}),
    "an objective that is none": Wrong(LOSSES, {"objective": 1.0}),
    "cu_seqlens of padded tokens": Wrong(
        (*LOSSES, "gae", "value_loss"), {"cu_seqlens": torch.tensor([0, 6])}
    ),
    "groups without use": Wrong(LOSSES, {"group_size": 1}),
    "prompts without groups": _of_objective(LOSSES, "group", aggregation="prompt-mean"),
    "a normalizer of 0": Wrong((*LOSSES, "token_weights"), {"normalizer": 0.0}),
    "a normalizer of a sum": Wrong(
        LOSSES, {"normalizer": 2.0, "objective": {"aggregation": "token-sum"}}
    ),
    "a function on a compiled backend": Wrong(
        LOSSES, {"objective": _own, "backend": "cpu"}, "function"
    ),
    "a normalizer of no term": Wrong(LOSSES, {"normalizer": {}}),
    "rows that overlap, in place": Wrong(
        TOKENS[:2],
        {"inplace_backward": True, "logits": _given_away(1).expand(2, 3, 4)},
    ),
    "a leaf, in place": Wrong(WITH_LOGITS[2:], {"inplace": True, "logits": _given_away(2)}),
    "groups that do not divide": Wrong(("group_advantages",), {"group_size": 4}),
    "no groups": Wrong(("group_advantages",), {"group_size": None}),
    "a negative eps": Wrong(("group_advantages",), {"eps": -1.0}),
    "an unknown baseline": Wrong(("group_advantages",), {"baseline": "median"}),
    "gamma above 1": Wrong(REWARDS, {"gamma": 1.5}),
    "bootstrap values of another shape": Wrong(REWARDS, {"bootstrap_values": torch.ones(3)}),
    "values of another shape": Wrong(("gae",), {"values": OTHERS}),
    "clip without old_values": Wrong(("value_loss",), {"clip": 0.2}, "old_values"),
    "old_values without clip": Wrong(("value_loss",), {"old_values": TWO_BY_THREE}, "clip"),
    "an unknown estimator": Wrong(("kl_divergence",), {"estimator": "k4"}),
    "a clamp of 0": Wrong(("kl_divergence",), {"clamp": 0.0}),
    "an unknown aggregation": Wrong(("token_weights",), {"aggregation": "mean"}),
    "a dimension too many": Wrong(("masked_mean",), {"dim": 2}),
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
    f"field {name}": _of_objective(LOSSES[:1], name, **fields)
    for name, fields in IDLE_FIELDS.items()
}


def wrongs_of(function: str) -> list[str]:
    return [name for name, wrong in WRONG.items() if function in wrong.functions]


def refused(function: str, wrong: str, backend: str) -> tuple[str, str] | None:
    """Return None if the call is refused as it should be, else what happens and a text."""
    changes = WRONG[wrong].changes
    named = {} if function in PLAIN else {"backend": backend}
    try:
        fields = changes.get("objective")
        built = {"objective": Objective(**fields)} if isinstance(fields, dict) else {}
        getattr(fastrl, function)(**{**legal(function), **named, **changes, **built})
    except (ValueError, TypeError) as refusal:
        says = WRONG[wrong].message()
        return None if says in str(refusal) else (f"refused without {says!r}", str(refusal))
    return "not refused", wrong

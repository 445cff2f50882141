"""The objective of a case: as passed to fastrl, and the fields that the oracle reads.

The presets repeat the table in `docs/losses.md`.
"""

from __future__ import annotations

from math import inf
from typing import Any

from fastrl import Objective, RolloutCorrection

from .case import Case
from .own_objectives import OWN

DEFAULTS: dict[str, Any] = {
    "surrogate": "ppo_clip",
    "level": "token",
    "clip_low": 0.2,
    "clip_high": 0.2,
    "dual_clip": None,
    "delta": None,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "kl_coef": 0.0,
    "kl_estimator": "k3",
    "kl_clamp": None,
    "kl_gradient": "exact",
    "entropy_coef": 0.0,
    "log_ratio_clamp": None,
    "aggregation": "token-mean",
    "kl_aggregation": None,
    "entropy_aggregation": None,
    "length_norm": None,
    "count_empty": False,
    "rollout_correction": None,
    "rollout_weighs": "policy-and-kl",
    "off_policy_threshold": None,
    "top_entropy_quantile": 1.0,
}

_SEQUENCE = {"level": "sequence", "clip_low": 0.0003, "clip_high": 0.0004}
_SEQUENCE_MEAN = {"aggregation": "seq-mean-token-mean"}
PRESETS: dict[str, dict[str, Any]] = {
    "ppo": {},
    "grpo": _SEQUENCE_MEAN,
    "bnpo": {"aggregation": "token-mean"},
    "dr_grpo": {"aggregation": "seq-mean-token-sum-norm"},
    "dapo": {"aggregation": "token-mean", "clip_high": 0.28},
    "gspo": {**_SEQUENCE, **_SEQUENCE_MEAN},
    "gmpo": {
        "surrogate": "gmpo",
        "level": "sequence",
        "clip_low": 0.4,
        "clip_high": 0.4,
        **_SEQUENCE_MEAN,
    },
    "cispo": {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 4.0, "aggregation": "token-mean"},
    "sapo": {"surrogate": "sapo", **_SEQUENCE_MEAN},
    "luspo": {**_SEQUENCE, "aggregation": "seq-mean-token-sum"},
    "reinforce": {"surrogate": "reinforce", "aggregation": "token-mean"},
}

_EMPTY = {"count_empty": True}
_BY_TOKEN = {"aggregation": "token-mean"}
_HELD = {"log_ratio_clamp": 20.0}
_VERL_PPO = {"dual_clip": 3.0, **_HELD}
_OTHERS_BY_TOKEN = {"kl_aggregation": "token-mean", "entropy_aggregation": "token-mean"}
_ALL = {
    "trl": {"entropy_aggregation": "token-mean", "rollout_weighs": "policy"},
    "verl": {"kl_clamp": 10.0, "rollout_weighs": "policy"},
    "openrlhf": {"kl_clamp": 10.0, "rollout_weighs": "policy"},
}
CONVENTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "trl": {
        "grpo": _EMPTY,
        "bnpo": {},
        "dr_grpo": _EMPTY,
        "dapo": {"clip_high": 0.2},
        "gspo": _EMPTY,
        "gmpo": _EMPTY,
        "cispo": {},
        "sapo": _EMPTY,
        "luspo": _EMPTY,
    },
    "verl": {
        "ppo": _VERL_PPO,
        "grpo": {**_BY_TOKEN, **_VERL_PPO},
        "dr_grpo": _VERL_PPO,
        "dapo": _VERL_PPO,
        "gspo": {
            "level": "sequence-token",
            "log_ratio_clamp": (-inf, 10.0),
            **_OTHERS_BY_TOKEN,
        },
        "gmpo": {**_EMPTY, **_OTHERS_BY_TOKEN},
        "cispo": {"clip_low": 0.2, "clip_high": 0.2, **_HELD},
        "sapo": {**_HELD, **_OTHERS_BY_TOKEN},
        "reinforce": {},
    },
    "openrlhf": {
        "ppo": _HELD,
        "grpo": {**_BY_TOKEN, **_HELD},
        "dapo": _HELD,
        "gspo": _OTHERS_BY_TOKEN,
    },
}
CONVENTIONS = {
    convention: {name: {**_ALL[convention], **changes} for name, changes in presets.items()}
    for convention, presets in CONVENTIONS.items()
}
CONVENTIONS["fastrl"] = {name: {} for name in PRESETS}


def fields_of(case: Case) -> dict[str, Any]:
    """Return every field of the objective of a case, according to the docs."""
    given = dict(case.fields)
    if case.objective in OWN:
        return {**DEFAULTS, **given, "surrogate": case.objective}
    fields = {**DEFAULTS, **PRESETS[case.objective], **CONVENTIONS[case.convention][case.objective]}
    if case.convention == "verl" and given.get("kl_estimator", "k3") != "k3":
        fields["kl_clamp"] = None  # verl holds its k3 alone
    return {**fields, **given}


def objective_of(case: Case) -> object:
    """Return the objective as passed to fastrl."""
    changes = dict(case.fields)
    corrections = changes.get("rollout_correction")
    if corrections is not None:
        built = tuple(RolloutCorrection(**correction) for correction in corrections)
        changes["rollout_correction"] = built[0] if len(built) == 1 else built
    if case.objective in OWN:
        function = OWN[case.objective].function
        return Objective(surrogate=function, **changes) if changes else function
    if not changes and case.convention == "fastrl":
        return case.objective
    return Objective.preset(case.objective, convention=case.convention, **changes)

"""The combinations of fields that an `Objective` refuses."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from fastrl.objective.presets import values_of

if TYPE_CHECKING:
    from fastrl.objective.objective import Objective

#: The surrogates that use a field; fields that are not listed apply to all.
_USED_BY = {
    **dict.fromkeys(("clip_low", "clip_high"), ("ppo_clip", "cispo", "gmpo")),
    **dict.fromkeys(("dual_clip", "delta"), ("ppo_clip",)),
    **dict.fromkeys(("sapo_temperature_pos", "sapo_temperature_neg"), ("sapo",)),
    "log_ratio_clamp": ("ppo_clip", "cispo", "sapo", "gmpo"),
    "gamma_weights": ("reinforce",),
}
#: The field that must be set for another to have an effect.
_NEEDS = {
    **dict.fromkeys(("kl_estimator", "kl_clamp", "kl_gradient", "kl_level"), "kl_coef"),
    "kl_aggregation": "kl_coef",
    "entropy_aggregation": "entropy_coef",
    "rollout_weighs": "rollout_correction",
}


def refuse_what_has_no_effect(o: Objective) -> None:
    """Raise ValueError if fields contradict each other, or one has no effect beside the others."""
    surrogate = "a function" if callable(o.surrogate) else o.surrogate
    if surrogate == "gmpo" and o.level != "sequence":
        raise ValueError(f"level must be 'sequence' with surrogate gmpo, got {o.level!r}")
    if surrogate in ("a function", "reinforce") and o.level != "token":
        raise ValueError(f"level must be 'token' with surrogate {surrogate}, got {o.level!r}")
    if surrogate == "gmpo" and o.kl_gradient == "bias-corrected":
        raise ValueError(
            "kl_gradient must not be 'bias-corrected' with surrogate gmpo: its ratio is not an "
            "importance weight"
        )
    of_gmpo: dict[str, Any] = {"top_entropy_quantile": 1, "trust_region": None}
    of_kl = {"kl_gradient": "exact", "kl_clamp": None, "teacher_coef": 0}
    gmpo = "surrogate gmpo, whose tokens share one ratio", surrogate == "gmpo", of_gmpo
    for where, holds, values in (gmpo, ("kl_estimator 'exact'", o.has_exact_kl, of_kl)):
        for name, value in values.items():
            if holds and (given := getattr(o, name)) != value:
                raise ValueError(f"{name} must be {value!r} with {where}, got {given!r}")
    for correction in o.rollout_corrections if o.gamma_weights else ():
        if correction.kind != "filter" and correction.level != "token":
            where, level = f"with gamma_weights and kind {correction.kind}", correction.level
            raise ValueError(f"rollout_correction.level must be 'token' {where}, got {level!r}")
    if o.score_centering:
        _refuse_uncentered(o, surrogate)
    aggregations = (o.aggregation, o.kl_aggregation, o.entropy_aggregation)
    if o.length_norm is not None and "seq-mean-token-sum-norm" not in aggregations:
        raise ValueError(
            "length_norm has no effect with aggregation "
            f"{o.aggregation}; it is used by seq-mean-token-sum-norm"
        )
    if o.count_empty and not any(str(name).startswith("seq-mean") for name in aggregations):
        raise ValueError(
            f"count_empty has no effect with aggregation {o.aggregation}; "
            "it is used by the means over sequences"
        )
    for field in dataclasses.fields(o):
        value = getattr(o, field.name)
        if value == field.default:
            continue
        users, needed = _USED_BY.get(field.name), _NEEDS.get(field.name)
        if users and surrogate not in users:
            raise ValueError(
                f"{field.name} has no effect with surrogate {surrogate}; "
                f"it is used by {', '.join(users)}"
            )
        if needed is None or getattr(o, needed):
            continue
        # the values that a trainer's presets set may remain while their term is off
        if value not in values_of(o.convention, field.name):
            raise ValueError(
                f"{field.name} has no effect without {needed}; got {field.name}={value!r} "
                f"and {needed}={getattr(o, needed)}"
            )
    has_level = o.kl_gradient == "bias-corrected" and o.level != "token"
    known = ("token", *values_of(o.convention, "kl_level"))
    if not has_level and o.kl_level not in known:
        raise ValueError(
            f"kl_level has no effect with kl_gradient {o.kl_gradient!r} and level "
            f"{o.level!r}; it is used by 'bias-corrected' with another level than 'token'"
        )


def _refuse_uncentered(o: Objective, surrogate: object) -> None:
    """Raise if the expected score of the sampler has no agreed form."""
    if surrogate in ("a function", "gmpo"):
        raise ValueError(
            f"score_centering must be False with surrogate {surrogate}, whose slope is not a "
            "weight of log p"
        )
    for name, value in (("level", "token"), ("trust_region", None), ("gamma_weights", None)):
        if (given := getattr(o, name)) != value:
            raise ValueError(f"{name} must be {value!r} with score_centering, got {given!r}")
    if surrogate == "cispo" and o.clip_high is not None and o.clip_high < 0:
        raise ValueError(
            f"clip_high must be at least 0 with score_centering, got {o.clip_high}: the weight of "
            "equal policies must be 1"
        )
    weights = [c for c in o.rollout_corrections if c.kind != "filter"]
    for c in weights:
        if c.level != "token":
            raise ValueError(
                f"rollout_correction.level must be 'token' with score_centering and kind {c.kind}, "
                f"got {c.level!r}: the weight must be a function of the token's own ratio"
            )
    if len(weights) > 1:
        raise ValueError(
            "rollout_correction must have one element at most that is not a filter with "
            f"score_centering, got {len(weights)}"
        )

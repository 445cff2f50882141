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

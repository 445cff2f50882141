"""The losses by name, in the papers and in other trainers: data for `Objective.preset`."""

from __future__ import annotations

from math import inf
from typing import Any, Literal

from fastrl.checks import one_of
from fastrl.objective.gamma_weights import GammaWeights
from fastrl.objective.trust_region import TrustRegion

Preset = Literal[
    "ppo",
    "grpo",
    "bnpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "gmpo",
    "cispo",
    "sapo",
    "luspo",
    "reinforce",
    "m2po",
    "dppo_tv",
    "dppo_kl",
    "vespo",
]
Convention = Literal["fastrl", "trl", "verl", "openrlhf"]
Fields = dict[str, Any]

_SEQUENCE_RATIO: Fields = {"level": "sequence", "clip_low": 3e-4, "clip_high": 4e-4}
_GEOMETRIC: Fields = {"surrogate": "gmpo", "level": "sequence", "clip_low": 0.4, "clip_high": 0.4}
_UNCLIPPED: Fields = {"clip_low": 1.0, "clip_high": None, "aggregation": "token-mean"}

#: The losses of the papers.
PRESETS: dict[str, Fields] = {
    "ppo": {},
    "grpo": {"aggregation": "seq-mean-token-mean"},
    "bnpo": {"aggregation": "token-mean"},
    "dr_grpo": {"aggregation": "seq-mean-token-sum-norm"},
    "dapo": {"clip_high": 0.28, "aggregation": "token-mean"},
    "gspo": {**_SEQUENCE_RATIO, "aggregation": "seq-mean-token-mean"},
    "gmpo": {**_GEOMETRIC, "aggregation": "seq-mean-token-mean"},
    "cispo": {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 4.0, "aggregation": "token-mean"},
    "sapo": {"surrogate": "sapo", "aggregation": "seq-mean-token-mean"},
    "luspo": {**_SEQUENCE_RATIO, "aggregation": "seq-mean-token-sum"},
    "reinforce": {"surrogate": "reinforce", "aggregation": "token-mean"},
    "m2po": {**_UNCLIPPED, "trust_region": TrustRegion(kind="m2", high=0.04)},
    "dppo_tv": {**_UNCLIPPED, "trust_region": TrustRegion(kind="tv", high=0.2)},
    "dppo_kl": {**_UNCLIPPED, "trust_region": TrustRegion(kind="kl", high=0.05)},
    "vespo": {
        "surrogate": "reinforce",
        "gamma_weights": GammaWeights(),
        "aggregation": "token-mean",
    },
}


def _changed(names: str, changes: Fields, **further: Fields) -> dict[str, Fields]:
    """Return the presets in `names`, each with `changes` and with `further[name]`."""
    return {name: {**PRESETS[name], **changes, **further.get(name, {})} for name in names.split()}


# TRL: rollout corrections and masks do not affect the KL, which is multiplied by the ratio of the
# policy term (not in gmpo); the entropy bonus is always a mean over tokens, and a mean over
# sequences counts those without an active token.
_TRL: Fields = {
    "rollout_weighs": "policy",
    "kl_level": "policy",
    "entropy_aggregation": "token-mean",
}
_KL_TIMES_RATIO: Fields = {"kl_gradient": "bias-corrected"}
_BY_SEQUENCE: Fields = {"count_empty": True}

# verl: log-ratios within 20, KL (k3) within 10. In losses with a fixed aggregation of the policy
# term, KL and entropy still use the configured aggregation, by default token-mean.
_VERL: Fields = {"rollout_weighs": "policy", "kl_clamp": 10.0}
_WITHIN_20: Fields = {"log_ratio_clamp": 20.0}
_OTHERS_BY_TOKEN: Fields = {"kl_aggregation": "token-mean", "entropy_aggregation": "token-mean"}

# OpenRLHF: log-ratios within 20 except for gspo, KL within 10; KL and entropy always token-mean.
_OPENRLHF: Fields = {"rollout_weighs": "policy", "kl_clamp": 10.0}

CONVENTIONS: dict[str, dict[str, Fields]] = {
    "fastrl": PRESETS,
    "trl": {
        **_changed("bnpo dapo cispo vespo", {**_TRL, **_KL_TIMES_RATIO}, dapo={"clip_high": 0.2}),
        **_changed("grpo dr_grpo gspo sapo luspo", {**_TRL, **_KL_TIMES_RATIO, **_BY_SEQUENCE}),
        **_changed("gmpo", {**_TRL, **_BY_SEQUENCE}),
    },
    "verl": {
        **_changed(
            "ppo grpo dr_grpo dapo", {**_VERL, **_WITHIN_20, "dual_clip": 3.0}, grpo=PRESETS["bnpo"]
        ),
        **_changed("cispo", {**_VERL, **_WITHIN_20, "clip_low": 0.2, "clip_high": 0.2}),
        **_changed(
            "gspo sapo gmpo",
            {**_VERL, **_OTHERS_BY_TOKEN},
            gspo={"level": "sequence-token", "log_ratio_clamp": (-inf, 10.0)},
            sapo=_WITHIN_20,
            gmpo=_BY_SEQUENCE,
        ),
        **_changed("reinforce", _VERL),
        **_changed(
            "dppo_tv dppo_kl",
            {**_VERL, **_WITHIN_20, "surrogate": "cispo", "clip_high": 19.0},
            dppo_kl={"trust_region": TrustRegion(kind="kl", high=0.2)},
        ),
    },
    "openrlhf": {
        **_changed("ppo grpo dapo", {**_OPENRLHF, **_WITHIN_20}, grpo=PRESETS["bnpo"]),
        **_changed("gspo", {**_OPENRLHF, **_OTHERS_BY_TOKEN}),
    },
}

#: correction, eps and singleton of `group_advantages`
ADVANTAGE_CONVENTIONS: dict[str, tuple[float, float, str]] = {
    "fastrl": (1.0, 1e-4, "zero"),
    "trl": (1.0, 1e-4, "zero"),
    "verl": (1.0, 1e-6, "raw"),
    "openrlhf": (1.0, 1e-9, "zero"),
}


def preset_fields(name: str, convention: str, changes: Fields) -> Fields:
    """Return the fields of a loss in the convention of a trainer, with changes."""
    one_of("objective", name, tuple(PRESETS))
    presets = CONVENTIONS[one_of("convention", convention, tuple(CONVENTIONS))]
    if name not in presets:
        raise ValueError(
            f"convention {convention!r} has no {name}; it has {', '.join(sorted(presets))}"
        )
    fields = {**presets[name], **changes}
    estimator = fields.get("kl_estimator", "k3")
    if convention == "verl" and estimator != "k3":
        fields["kl_clamp"] = changes.get("kl_clamp")  # verl clamps only k3
    # the ratio of gmpo is no importance weight, and an exact KL is no sample to be weighted
    if convention == "trl" and (fields.get("surrogate") == "gmpo" or estimator == "exact"):
        fields["kl_gradient"] = changes.get("kl_gradient", "exact")
    return fields


def values_of(convention: str, field: str) -> set[Any]:
    """Return the values that the presets of a convention set for a field."""
    return {fields[field] for fields in CONVENTIONS[convention].values() if field in fields}


def convention_table() -> str:
    """Return the table in `docs/conventions.md`: presets, and the differences of trainers."""
    trainers = {name: presets for name, presets in CONVENTIONS.items() if name != "fastrl"}
    shared = {
        name: set.intersection(*(_changes(presets, loss) for loss in presets))
        for name, presets in trainers.items()
    }
    rows = [
        ["preset", "fields", *(f"`{name}`" for name in trainers)],
        ["---"] * (2 + len(trainers)),
        ["every one", "", *(", ".join(sorted(shared[name])) for name in trainers)],
    ]
    for loss, fields in PRESETS.items():
        cells = [
            ", ".join(sorted(_changes(presets, loss) - shared[name])) or "as `fastrl`"
            if loss in presets
            else "-"
            for name, presets in trainers.items()
        ]
        rows.append([f"`{loss}`", ", ".join(sorted(map(_as_code, fields.items()))), *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def _changes(presets: dict[str, Fields], loss: str) -> set[str]:
    original = PRESETS[loss]
    return {
        _as_code((name, value))
        for name, value in presets[loss].items()
        if name not in original or original[name] != value
    }


def _as_code(field: tuple[str, Any]) -> str:
    return f"`{field[0]}={field[1]!r}`"

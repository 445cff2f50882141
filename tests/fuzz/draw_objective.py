"""Draws objectives in which every field has an effect, with the inputs that they need."""

from math import inf
from typing import Any

from tests.calls.objectives import CONVENTIONS, DEFAULTS, OWN

from .chance import Chance

AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "prompt-mean",
)
#: Aggregations that need no sequences, for packed tokens whose sequences are unknown.
OF_TOKENS = AGGREGATIONS[:2]
SHARE_CENTERED = 0.25
DISTANCES = ("equal", "near", "far", "bounds", "huge")


def objective_options(chance: Chance, function: str, options: dict) -> dict[str, Any]:
    """Return the objective of a case and the tensors that it needs."""
    convention = chance.weighed({"fastrl": 3, "trl": 1, "verl": 1, "openrlhf": 0.6})
    objective = chance.pick(sorted(CONVENTIONS[convention]))
    if convention == "fastrl" and chance.of(0.15):
        objective = chance.pick(sorted(OWN))
    usual = {**DEFAULTS, **CONVENTIONS[convention].get(objective, {"surrogate": objective})}
    fields: dict[str, Any] = {}
    fields |= _bounds(chance, usual)
    fields |= _level(chance, usual)
    fields |= _kl(chance, {**usual, **fields})
    if not chance.of(0.8):
        fields["entropy_coef"] = chance.pick((0.01, 0.5, -0.25))
    fields |= _masks(chance, usual)
    needs = _aggregations(chance, options, {**usual, **fields}, fields)
    if needs is None:  # packed without sequences: an objective of tokens alone
        return objective_options(chance, function, {**options, "layout": "cut"}) | {"layout": "cut"}
    full = {**usual, **fields}
    uses_rollout = full["rollout_correction"] or full["off_policy_threshold"] is not None
    old = chance.pick((None, *DISTANCES))
    on_threshold = full["off_policy_threshold"] is not None and function == "policy_loss"
    if on_threshold and chance.of(0.5):  # where the log-probabilities have no error
        fields["off_policy_threshold"], old = 0.0, chance.pick(("equal", None))
        uses_rollout = full["rollout_correction"]
    rollout = chance.pick(DISTANCES) if full["rollout_correction"] else None
    if not rollout and uses_rollout and chance.of(0.5):
        rollout = chance.pick(DISTANCES)
    drawn = {
        "objective": objective,
        "convention": convention,
        "fields": fields,
        "old": old,
        "ref": chance.pick(DISTANCES) if full["kl_coef"] or chance.of(0.1) else None,
        "rollout": rollout,
        "entropy": function == "policy_loss" and (_needs_entropy(full) or chance.of(0.1)),
        "values": chance.pick(("grid", "grid", "real")),
        "policy_weights": chance.weighed({None: 6, "token": 1, "sequence": 1}),
        "advantages": chance.pick(("token", "sequence")),
        **needs,
        **(_of_tokens(chance) if options["layout"] == "packed" else {}),
    }
    # of its own numbers, so that the other options are as they were
    own = Chance(f"centering {options['seed']}")
    if function != "policy_loss" and objective not in OWN and own.of(SHARE_CENTERED):
        drawn |= _centering(own, usual, drawn, options["layout"])
    return drawn


def _centering(chance: Chance, usual: dict, drawn: dict, layout: str) -> dict[str, Any]:
    """Return what makes the objective one with score centering; nothing if none can be."""
    if usual["surrogate"] == "gmpo" or usual["level"] != "token":
        return {}
    if usual["trust_region"] or usual["gamma_weights"]:
        return {}
    without = ("level", "kl_level", "trust_region", "gamma_weights")
    fields = {name: x for name, x in drawn["fields"].items() if name not in without}
    corrections = list(fields.get("rollout_correction", ()))
    if not corrections and chance.of(0.6):
        corrections = [_correction(chance) for _ in range(1 if chance.of(0.8) else 2)]
    weights = [one for one in corrections if one["kind"] != "filter"][:1]
    corrections = weights + [one for one in corrections if one["kind"] == "filter"]
    for one in corrections:
        if one["kind"] != "filter" or layout == "packed":
            one["level"] = "token"
    old, rollout = drawn["old"], drawn["rollout"]
    if corrections:
        fields["rollout_correction"] = corrections
        rollout = rollout or chance.pick(DISTANCES)
    of_tokens = any(one["level"] == "token" for one in corrections)
    if of_tokens or usual["surrogate"] in ("ppo_clip", "sapo"):
        old = None
    elif usual["surrogate"] == "cispo":
        old = chance.pick((None, *DISTANCES))
    return {
        "fields": {**fields, "score_centering": True},
        "old": old,
        "rollout": rollout,
        "sampler": chance.pick(("equal", "near", "far", "bounds", "own", "tail")),
        "sampler_dtype": chance.weighed({"float32": 4, "bfloat16": 1, "float16": 1, "float64": 1}),
    }


def _of_tokens(chance: Chance) -> dict[str, Any]:
    return {"advantages": "token", "policy_weights": chance.pick((None, None, "token"))}


def _needs_entropy(fields: dict) -> bool:
    return bool(fields["entropy_coef"]) or fields["top_entropy_quantile"] < 1


def _bounds(chance: Chance, usual: dict) -> dict[str, Any]:
    ratio, fields = usual["surrogate"], {}
    if ratio in ("ppo_clip", "cispo", "gmpo") and chance.of(0.35):
        fields["clip_low"] = chance.pick((0.0, 0.2, 0.5, 1.0))
        fields["clip_high"] = chance.pick((0.0, 0.2, 0.5, 3.0, None))
    high = fields.get("clip_high", usual["clip_high"])
    if ratio == "ppo_clip":
        fields |= chance.some({"dual_clip": (0.15, (1.5, 3.0, 10.0))})
    if ratio == "ppo_clip" and high is not None:
        beyond = [1 + high + more for more in (0.125, 0.5, 4.0)]
        fields |= chance.some({"delta": (0.15, beyond)})
    if ratio in ("ppo_clip", "cispo", "sapo", "gmpo") and chance.of(0.2):
        fields["log_ratio_clamp"] = chance.pick((0.5, 2.0, 20.0, (-1.0, 2.0), (-inf, 10.0)))
    if ratio == "sapo" and chance.of(0.3):
        fields["sapo_temperature_pos"] = chance.pick((0.5, 1.0, 3.0))
        fields["sapo_temperature_neg"] = chance.pick((0.5, 1.05, 10.0))
    return fields


def _level(chance: Chance, usual: dict) -> dict[str, Any]:
    if usual["surrogate"] not in ("ppo_clip", "cispo", "sapo") or chance.of(0.8):
        return {}
    return {"level": chance.pick(("token", "sequence", "sequence-token"))}


def _kl(chance: Chance, usual: dict) -> dict[str, Any]:
    if chance.of(0.6):
        return {}
    kinds = ["straight-through"] + ["bias-corrected"] * (usual["surrogate"] != "gmpo")
    drawn = {"kl_coef": chance.pick((0.04, 0.5, 1.0))} | chance.some(
        {
            "kl_estimator": (0.6, ("k1", "k2", "k3", "abs")),
            "kl_clamp": (0.25, (0.5, 2.0, 10.0)),
            "kl_gradient": (0.35, kinds),
        }
    )
    full = {**usual, **drawn}
    if full["kl_gradient"] == "bias-corrected" and full["level"] != "token" and chance.of(0.5):
        drawn["kl_level"] = chance.pick(("token", "policy"))
    return drawn


def _masks(chance: Chance, usual: dict) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if chance.of(0.2):
        several = 1 if chance.of(0.8) else 2
        fields["rollout_correction"] = [_correction(chance) for _ in range(several)]
        fields |= chance.some({"rollout_weighs": (0.4, ("policy", "policy-and-kl"))})
    fields |= chance.some({"off_policy_threshold": (0.08, (-0.5, 0.0, 0.25, 2.0))})
    if usual["surrogate"] != "gmpo":
        fields |= chance.some({"top_entropy_quantile": (0.08, (0.2, 0.5, 0.25, 0.9))})
        if chance.of(0.08):
            fields["trust_region"] = _trust_region(chance)
    if usual["surrogate"] == "reinforce" and chance.of(0.3):
        fields["gamma_weights"] = {"k_pos": chance.pick((0.0, 1.0)), "lambda_neg": 0.5}
    if {**usual, **fields}["gamma_weights"] is not None:
        for correction in fields.get("rollout_correction", ()):
            if correction["kind"] != "filter":
                correction["level"] = "token"
    return fields


def _correction(chance: Chance) -> dict[str, Any]:
    kind = chance.pick(("truncate", "mask", "filter"))
    low, high = chance.pick(((0.0, 2.0), (0.5, 2.0), (0.5, 1.5), (1.0, 3.0), (0.0, 1.0)))
    if chance.of(0.15) and (kind == "truncate" or low > 0):
        high = inf
    level = chance.pick(("token", "sequence", "geometric"))
    correction = {"kind": kind, "level": level, "low": low, "high": high}
    if kind == "filter" and chance.of(0.7):
        estimator = chance.pick(("ratio", "k1", "k2", "k3", "reverse-k3"))
        correction |= {"estimator": estimator, "level": chance.pick((level, "max"))}
        if estimator == "k1":
            correction["low"] = chance.pick((-0.5, -0.125, -2.0, -inf))
            correction["high"] = chance.pick((0.125, 0.5, 2.0))
    return correction


def _trust_region(chance: Chance) -> dict[str, Any]:
    kind = chance.pick(("tv", "kl", "m2"))
    region = {"kind": kind, "high": chance.pick((0.04, 0.2, 0.5, 2.0**-6))}
    return region | ({"low": 0.125} if kind != "m2" and chance.of(0.3) else {})


def _aggregations(chance: Chance, options: dict, full: dict, fields: dict) -> dict[str, Any] | None:
    """Draw aggregations into `fields`; return the options that they need, or None if impossible."""
    unknown = options["layout"] == "packed"
    corrections = full["rollout_correction"] or ()
    if unknown and (
        full["level"] != "token"
        or full["off_policy_threshold"] is not None
        or full["gamma_weights"] is not None
        or any(correction["level"] != "token" for correction in corrections)
    ):
        return None
    choices = OF_TOKENS if unknown else AGGREGATIONS
    if chance.of(0.35) or unknown:
        fields["aggregation"] = chance.pick(choices)
    for term in ("kl", "entropy"):
        if full[f"{term}_coef"] and (chance.of(0.15) or (unknown and full[f"{term}_aggregation"])):
            fields[f"{term}_aggregation"] = chance.pick(choices)
    full = {**full, **fields}
    used = {"policy": full["aggregation"]}
    for term in ("kl", "entropy"):
        if full[f"{term}_aggregation"] is not None:
            used[term] = full[f"{term}_aggregation"]
    if unknown and not set(used.values()) <= set(OF_TOKENS):
        return None
    by_sequence = any(name.startswith("seq-mean") for name in used.values())
    if full["count_empty"] and not by_sequence:
        fields["count_empty"] = False
    elif by_sequence and chance.of(0.15):
        fields["count_empty"] = True
    with_norm = "seq-mean-token-sum-norm" in used.values()
    if with_norm and (chance.of(0.4) or options["layout"] != "padded"):
        fields["length_norm"] = chance.pick((1.0, 8.0, 100.0, 7))
    needs: dict[str, Any] = {}
    if "prompt-mean" in used.values():
        needs |= _grouping(chance, options)
    divided = {
        term: name
        for term, name in used.items()
        if name != "token-sum" and (term == "policy" or full[f"{term}_coef"])
    }
    if divided and chance.of(0.3):
        terms = {term for term in used if term == "policy" or full[f"{term}_coef"]}
        if terms == {"policy"} and chance.of(0.7):
            needs["normalizer"] = _number(chance)
        else:
            given = {term: _number(chance) for term in divided if chance.of(0.8)}
            needs["normalizer"] = given or None
    return needs


def _grouping(chance: Chance, options: dict) -> dict[str, Any]:
    divisors = [k for k in (1, 2, 3, 4) if options["sequences"] % k == 0]
    if chance.of(0.5) or not divisors:
        return {"groups": "ids", "groups_dtype": chance.pick(("int64", "int32"))}
    return {"groups": chance.pick(divisors)}


def _number(chance: Chance) -> Any:
    value = chance.pick((1.0, 3.0, 17, 0.5, 1000.0))
    return (value,) if chance.of(0.3) else value


def normalizer(chance: Chance, aggregation: str) -> Any:
    """Return a normalizer, or None."""
    return _number(chance) if aggregation != "token-sum" and chance.of(0.3) else None


def weight_options(chance: Chance, options: dict) -> tuple[dict[str, Any], str]:
    """Return the options of a weighing by itself, `fields` among them, and its aggregation."""
    aggregation = chance.pick(OF_TOKENS if options["layout"] == "packed" else AGGREGATIONS)
    fields: dict[str, Any] = {}
    if aggregation.startswith("seq-mean") and chance.of(0.3):
        fields["count_empty"] = True
    if aggregation.endswith("norm") and (chance.of(0.5) or options["layout"] != "padded"):
        fields["length_norm"] = chance.pick((1.0, 8.0, 100.0, 7))
    drawn: dict[str, Any] = {"fields": fields}
    if aggregation == "prompt-mean":
        drawn |= _grouping(chance, options)
    return drawn, aggregation

"""Draws options of values, rewards and masks: functions without a vocabulary or an objective."""

from typing import Any

from .chance import Chance
from .draw_objective import normalizer, weight_options

ESTIMATORS = ("k1", "k2", "k3", "abs")
VALUES = ("grid", "real")
GROUPS = {
    "baseline": (0.4, ("leave_one_out", "none", "mean")),
    "scale": (0.4, ("batch", "none", "group", "mean")),
    "correction": (0.3, (0, 1, 0.5, 2)),
    "eps": (0.4, (0.0, 0.0, 0, 1e-8, 1e-4, 1.0)),
    "singleton": (0.3, ("raw", "zero")),
    "convention": (0.3, ("fastrl", "trl", "verl", "openrlhf")),
}
GAE = {
    "gamma": (0.7, (0.0, 0.5, 0.9, 0.99, 1.0, 1)),
    "lam": (0.7, (0.0, 0.5, 0.95, 1.0)),
    "terminated": (0.4, (0.0, 0.2, 0.7)),
    "truncated": (0.4, (0.0, 0.2, 0.7)),
    "bootstrap": (0.5, ("token", "sequence")),
}


def _groups(chance: Chance, options: dict) -> dict[str, Any]:
    return {
        "parameters": chance.some(GROUPS),
        "groups": "ids" if chance.of(0.4) else None,
        "mask": "absent" if chance.of(0.5) else options["mask"],
        "layout": chance.pick(("padded", "packed")),
        "tokens": max(options["tokens"], 1),
        "values": chance.pick(VALUES),
        "spread": chance.pick((1.0, 1e-3, 100.0)),
        "ids_dtype": chance.pick(("int64", "int32")),
    }


def _other_dtypes(chance: Chance, options: dict) -> dict[str, Any]:
    """Return dtypes of all arguments in half of the cases, including float64 mixed with others."""
    if chance.of(0.5):
        return {}
    known = ["float32", "float32", "bfloat16", "float16"]
    first, second = options["dtype"], chance.pick(known)
    if first == "float64":
        known.append(first)
        if chance.of(0.5):
            first, second = second, first
    return {"dtype": first, "second_dtype": second, "third_dtype": chance.pick(known)}


def _gae(chance: Chance, options: dict) -> dict[str, Any]:
    parameters = chance.some(GAE)
    if options["layout"] == "packed" and parameters.get("bootstrap") == "sequence":
        parameters["bootstrap"] = "token"
    return {
        **_other_dtypes(chance, options),
        "parameters": parameters,
        "mask": "absent" if chance.of(0.2) else options["mask"],
        "values": chance.pick(VALUES),
    }


def _returns(chance: Chance, options: dict) -> dict[str, Any]:
    drawn = _gae(chance, options)
    drawn["parameters"].pop("lam", None)
    if options["dtype"] == "float64":  # there is no second
        drawn["dtype"] = "float64"
    return drawn


def _weights(chance: Chance, options: dict) -> dict[str, Any]:
    drawn, aggregation = weight_options(chance, options)
    parameters = {"aggregation": aggregation} | drawn.pop("fields")
    return {**drawn, "parameters": parameters, "normalizer": normalizer(chance, aggregation)}


def _value_loss(chance: Chance, options: dict) -> dict[str, Any]:
    drawn = _weights(chance, options)
    drawn["parameters"].pop("count_empty", None)
    drawn["parameters"] |= chance.some(
        {"clip": (0.4, (0.2, 0.25, 0.5, 1.0)), "loss": (0.4, ("mse", "huber"))}
    )
    drawn |= _other_dtypes(chance, options)
    return drawn | {"values": chance.pick(VALUES), "spread": chance.pick((0.0, 1.0, 5.0))}


def _any_shape(chance: Chance, options: dict) -> dict[str, Any]:
    return {"layout": chance.pick(("0-d", "3-d")) if chance.of(0.3) else options["layout"]}


def _kl(chance: Chance, options: dict) -> dict[str, Any]:
    return {
        "parameters": chance.some(
            {"estimator": (0.8, ESTIMATORS), "clamp": (0.4, (0.5, 2.0, 10.0))}
        ),
        "ref": chance.pick(("equal", "near", "far", "bounds", "huge")),
        "values": chance.pick(VALUES),
        "mask": "all",
        "masked_values": "usual",
        **_any_shape(chance, options),
    }


def _mean(chance: Chance, options: dict) -> dict[str, Any]:
    shape = _any_shape(chance, options)
    axes = {"0-d": 0, "3-d": 3, "padded": 2}.get(shape["layout"], 1)
    dim = chance.pick((None, *range(-axes, axes)))
    return {
        **shape,
        "parameters": {} if dim is None else {"dim": dim},
        "values": chance.pick(VALUES),
        "spread": chance.pick((0.0, 1.0, 100.0)),
    }


def _whiten(chance: Chance, options: dict) -> dict[str, Any]:
    return {
        **_any_shape(chance, options),
        "parameters": {"shift_mean": False} if chance.of(0.3) else {},
        "values": chance.pick(VALUES),
        "spread": chance.pick((0.0, 1e-4, 1.0, 100.0)),
    }


def _reduce(chance: Chance, options: dict) -> dict[str, Any]:
    how = chance.pick((None, "sum", "mean", "rank-mean"))
    dtype = "float64" if options["dtype"] == "float64" else "float32"
    return {"parameters": {} if how is None else {"policy_loss": how}, "dtype": dtype}


PLAIN = {
    "group_advantages": _groups,
    "gae": _gae,
    "discounted_returns": _returns,
    "token_weights": _weights,
    "value_loss": _value_loss,
    "kl_divergence": _kl,
    "masked_mean": _mean,
    "whiten": _whiten,
    "reduce_metrics": _reduce,
}

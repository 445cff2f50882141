"""Draws options of values, rewards and masks: functions without a vocabulary or an objective."""

from __future__ import annotations

from typing import Any

from .chance import Chance
from .draw_objective import normalizer, weight_options


def _groups(chance: Chance, options: dict) -> dict[str, Any]:
    parameters: dict[str, Any] = {}
    if chance.of(0.4):
        parameters["baseline"] = chance.pick(("leave_one_out", "none", "mean"))
    if chance.of(0.4):
        parameters["scale"] = chance.pick(("batch", "none", "group"))
    if chance.of(0.3):
        parameters["correction"] = chance.pick((0, 1, 0.5, 2))
    if chance.of(0.4):
        parameters["eps"] = chance.pick((0.0, 0.0, 0, 1e-8, 1e-4, 1.0))
    if chance.of(0.3):
        parameters["singleton"] = chance.pick(("raw", "zero"))
    if chance.of(0.3):
        parameters["convention"] = chance.pick(("fastrl", "trl", "verl", "openrlhf"))
    return {
        "parameters": parameters,
        "groups": "ids" if chance.of(0.4) else None,
        "layout": chance.pick(("padded", "packed")),
        "tokens": max(options["tokens"], 1),
        "values": chance.pick(("grid", "real")),
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
    parameters: dict[str, Any] = {}
    if chance.of(0.7):
        parameters["gamma"] = chance.pick((0.0, 0.5, 0.9, 0.99, 1.0, 1))
    if chance.of(0.7):
        parameters["lam"] = chance.pick((0.0, 0.5, 0.95, 1.0))
    for name in ("terminated", "truncated"):
        if chance.of(0.4):
            parameters[name] = chance.pick((0.0, 0.2, 0.7))
    if chance.of(0.5):
        parameters["bootstrap"] = chance.pick(("token", "sequence"))
    if options["layout"] == "packed" and parameters.get("bootstrap") == "sequence":
        parameters["bootstrap"] = "token"
    return {
        **_other_dtypes(chance, options),
        "parameters": parameters,
        "mask": "absent" if chance.of(0.2) else options["mask"],
        "values": chance.pick(("grid", "real")),
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
    if chance.of(0.4):
        drawn["parameters"]["clip"] = chance.pick((0.2, 0.25, 0.5, 1.0))
    if chance.of(0.4):
        drawn["parameters"]["loss"] = chance.pick(("mse", "huber"))
    drawn |= _other_dtypes(chance, options)
    return drawn | {"values": chance.pick(("grid", "real")), "spread": chance.pick((0.0, 1.0, 5.0))}


def _any_shape(chance: Chance, options: dict) -> dict[str, Any]:
    return {"layout": chance.pick(("0-d", "3-d")) if chance.of(0.3) else options["layout"]}


def _kl(chance: Chance, options: dict) -> dict[str, Any]:
    parameters: dict[str, Any] = {}
    if chance.of(0.8):
        parameters["estimator"] = chance.pick(("k1", "k2", "k3", "abs"))
    if chance.of(0.4):
        parameters["clamp"] = chance.pick((0.5, 2.0, 10.0))
    return {
        "parameters": parameters,
        "ref": chance.pick(("equal", "near", "far", "bounds", "huge")),
        "values": chance.pick(("grid", "real")),
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
        "values": chance.pick(("grid", "real")),
        "spread": chance.pick((0.0, 1.0, 100.0)),
    }


def _whiten(chance: Chance, options: dict) -> dict[str, Any]:
    return {
        **_any_shape(chance, options),
        "parameters": {"shift_mean": False} if chance.of(0.3) else {},
        "values": chance.pick(("grid", "real")),
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

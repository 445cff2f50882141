"""Draws options of values, rewards and masks: functions without a vocabulary or an objective.

What the rows of a function in the table of calls list is what is drawn for it, too.
"""

from typing import Any

from tests.calls.case import SIGNATURES
from tests.calls.table import ROWS

from .chance import Chance
from .draw_objective import normalizer, weight_options

#: What is drawn for every function in the same way.
OF_ALL = ("sequences", "tokens", "dtype", "features", "also")


def rows_of(function: str) -> list[dict[str, Any]]:
    return [options for name, options in ROWS.values() if name == function]


def features_of(function: str) -> tuple[str, ...]:
    """Return the features that rows of a function have."""
    several = (one for options in rows_of(function) for one in options.get("features", ()))
    return tuple(dict.fromkeys(feature for one in several for feature in one))


def plain_options(chance: Chance, function: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return one of the values of each option of a row; `options` are those of all functions."""
    row = {name: x for name, x in chance.pick(rows_of(function)).items() if name not in OF_ALL}
    drawn = {name: chance.pick(x) for name, x in row.items() if isinstance(x, list)}
    drawn |= {name: x for name, x in row.items() if name not in {*drawn, *options}}
    if function in ("token_weights", "value_loss"):
        drawn |= _weighed(chance, function, options, drawn.get("parameters", {}))
    if function in ("gae", "discounted_returns", "value_loss"):
        drawn |= _other_dtypes(chance, function, options)
    if "mask" not in SIGNATURES[function]:
        drawn |= {"mask": "all", "masked_values": "usual"}
    of_sequences = drawn.get("parameters", {}).get("bootstrap") == "sequence"
    if of_sequences and options["layout"] == "packed":
        drawn["parameters"] = {**drawn["parameters"], "bootstrap": "token"}
    if function == "group_advantages":
        drawn["tokens"] = max(options["tokens"], 1)
    if function == "reduce_metrics" and options["dtype"] != "float64":
        drawn["dtype"] = "float32"
    return drawn


def _weighed(chance: Chance, function: str, options: dict, own: dict) -> dict[str, Any]:
    drawn, aggregation = weight_options(chance, options)
    parameters = {**own, "aggregation": aggregation, **drawn.pop("fields")}
    taken = {name: x for name, x in parameters.items() if name in SIGNATURES[function]}
    return {**drawn, "parameters": taken, "normalizer": normalizer(chance, aggregation)}


def _other_dtypes(chance: Chance, function: str, options: dict) -> dict[str, Any]:
    """Return dtypes of all arguments in half of the cases, including float64 mixed with others."""
    if chance.of(0.5):
        return {}
    known = ["float32", "float32", "bfloat16", "float16"]
    first, second = options["dtype"], chance.pick(known)
    if first == "float64":
        known.append(first)
        if chance.of(0.5) and function != "discounted_returns":  # which has no second
            first, second = second, first
    return {"dtype": first, "second_dtype": second, "third_dtype": chance.pick(known)}

"""Draws cases: every option independently, including the values where behavior changes."""

from __future__ import annotations

from typing import Any

from . import logits_data, policy_data
from .case import Case
from .chance import Chance
from .draw_objective import objective_options
from .draw_plain import PLAIN
from .draw_rows import LINEAR, WITH_ROWS, head_options, row_options
from .refusals import wrongs_of

#: How often each function is drawn.
FUNCTIONS = {
    "token_logprobs": 2,
    "token_stats": 5,
    "linear_token_logprobs": 1,
    "linear_token_stats": 2,
    "policy_loss": 8,
    "logits_policy_loss": 6,
    "linear_policy_loss": 4,
    "value_loss": 2,
    "kl_divergence": 2,
    "group_advantages": 3,
    "gae": 2,
    "discounted_returns": 1,
    "token_weights": 1,
    "whiten": 1,
    "masked_mean": 1,
    "reduce_metrics": 1,
}
LOSSES = ("policy_loss", "logits_policy_loss", "linear_policy_loss")
SHARE_WRONG = 0.02


def draw(
    seed: int, index: int, function: str | None = None, *, float64: bool, interpreted: bool
) -> Case:
    """Return the case of this number: the same in every run."""
    chance = Chance(f"{seed} {index}")
    function = function or chance.weighed(FUNCTIONS)
    if chance.of(SHARE_WRONG) and wrongs_of(function):
        return Case(function, wrong=chance.pick(wrongs_of(function)), seed=chance.whole(0, 9))
    options: dict[str, Any] = {"seed": chance.whole(0, 10**6)}
    options |= _tokens(chance, function, interpreted)
    options |= _dtypes(chance, function, float64)
    options["upstream"] = chance.weighed(
        {"ones": 4, "random": 4, "zero": 1, "some-zero": 2, "expanded": 1, "strided": 1}
        | {"first": 1, "nan": 0.2, "large": 0.3}
    )
    options["threads"] = 2 if chance.of(0.1) else 1
    options["twice"] = chance.of(0.1)
    options["constants"] = "of-inference" if chance.of(0.08) else "usual"
    options["mode"] = chance.weighed({"grad": 12, "no-grad": 1, "inference": 1})
    if function in WITH_ROWS or function in LINEAR:
        options |= row_options(chance, function, options, interpreted)
    if function in LINEAR:
        options |= head_options(chance, function)
    if function in LOSSES:
        options |= objective_options(chance, function, options)
    if function in PLAIN:
        options |= PLAIN[function](chance, options)
    options["twice"] = options["twice"] and not options.get("inplace", False)
    options["features"] = _features(chance, function, options)
    return Case(function, **options)


def _tokens(chance: Chance, function: str, interpreted: bool) -> dict[str, Any]:
    size = chance.weighed(
        {"tiny": 6, "small": 6, "long": 0.3, "longest": 0.03, "many": 0.2, "none": 0.3}
    )
    if size in ("long", "longest", "many") and (function in WITH_ROWS + LINEAR or interpreted):
        size = "small"
    sequences, tokens = {
        "none": (chance.whole(0, 2), 0),
        "tiny": (chance.whole(0, 3), chance.whole(1, 3)),
        "small": (chance.whole(1, 5), chance.whole(1, 9)),
        "long": (chance.whole(1, 3), chance.whole(50, 700)),
        "longest": (1, chance.whole(3000, 9000)),
        "many": (chance.whole(30, 90), chance.whole(1, 3)),
    }[size]
    return {
        "sequences": sequences,
        "tokens": tokens,
        "layout": chance.weighed({"padded": 5, "cut": 3, "packed": 1}),
        "bounds_dtype": "int32" if chance.of(0.6) else "int64",
        "mask": chance.weighed(
            {"all": 3, "ragged": 4, "holes": 4, "without-first": 1, "one": 0.5, "none": 0.3}
        ),
        "mask_dtype": chance.weighed(
            {"bool": 4, "int64": 2, "float32": 2, "int32": 0.5, "uint8": 0.5, "bfloat16": 0.5}
        ),
        "masked_values": chance.weighed({"usual": 2, "nan": 3, "1e30": 1, "inf": 1}),
        "token_layout": chance.weighed(
            {"contiguous": 5, "odd": 1, "sliced": 1, "transposed": 1, "strided": 1}
        ),
    }


def _dtypes(chance: Chance, function: str, float64: bool) -> dict[str, Any]:
    if float64 and chance.of(0.25):
        return {"dtype": "float64", "token_dtype": "float64"}
    dtype = chance.weighed({"float32": 5, "bfloat16": 2, "float16": 1})
    return {
        "dtype": dtype,
        "token_dtype": "float32" if chance.of(0.8) else chance.pick([dtype, "bfloat16", "float16"]),
    }


def _features(chance: Chance, function: str, options: dict) -> tuple[str, ...]:
    """Return unusual features of the data; none in about half of the cases."""
    known: list[str] = []
    if function in WITH_ROWS:
        known += logits_data.FEATURES
    elif function in LINEAR:
        known += ("nan-row", "ties", "inf-some", "ignored")
    if function in LOSSES:
        own = str(options.get("objective", "")).startswith("own")
        known += [name for name in policy_data.FEATURES if not (own and "inf" in name)]
    known += PLAIN_FEATURES.get(function, ())
    found = chance.some(known, min(0.5, 1.5 / max(len(known), 1)))
    top = dict(options.get("fields", {})).get("top_entropy_quantile", 1.0) < 1
    if top:  # the entropy of a row without distribution is unspecified
        found = tuple(name for name in found if name not in NO_ENTROPY)
    return found + (("nan-payload",) if chance.of(0.1) else ())


NO_ENTROPY = ("nan-row", "nan-one", "positive-inf", "inf-row", "inf-chosen", "inf-block")
PLAIN_FEATURES = {
    "kl_divergence": ("logprob-inf", "ref-inf", "ref-both-inf", "nan-logprob", "nan-ref"),
    "group_advantages": (
        "offset",
        "equal-groups",
        "zero-groups",
        "nan-rewards",
        "inf-rewards",
    ),
    "gae": ("offset", "nan-rewards", "inf-rewards"),
    "discounted_returns": ("offset", "nan-rewards", "inf-rewards"),
    "value_loss": (
        *("offset", "equal", "nan-values", "nan-returns", "nan-old"),
        *("inf-values", "inf-returns", "inf-old"),
    ),
    "whiten": ("offset", "equal", "nan-x", "inf-x"),
    "masked_mean": ("offset", "equal", "nan-x", "inf-x"),
    "reduce_metrics": ("nan-metric",),
}

"""Draws cases: every option independently, including the values where behavior changes."""

from typing import Any

from tests.calls import policy_data, rows_data
from tests.calls.case import DIVERGENCES, LINEAR, SIGNATURES, WITH_LOGITS, WITH_OBJECTIVE, Case
from tests.calls.examine import FUNCTIONS
from tests.calls.refusals import WRONG
from tests.calls.values_call import FUNCTIONS as PLAIN

from .chance import Chance
from .draw_objective import objective_options
from .draw_plain import features_of, plain_options

SHARE_WRONG = 0.02
DIFFERENTIABLE = ("logprobs", "entropy", "logsumexp")
#: Vocabularies around powers of two and the 4,096 columns that the CPU kernel reads at once.
SMALL = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65, 100, 127, 130, 257)
MIDDLE = (500, 1000, 1023, 2049)
LARGE = (4095, 4096, 4097, 4111, 5000, 8192, 8193, 9001, 12289)
NO_ENTROPY = ("nan-row", "nan-one", "positive-inf", "inf-row", "inf-chosen", "inf-block")


def draw(
    seed: int, index: int, function: str | None = None, *, float64: bool, executed: bool
) -> Case:
    """Return the case of this number: the same in every run."""
    chance = Chance(f"{seed} {index}")
    function = function or chance.weighed({name: one.drawn for name, one in FUNCTIONS.items()})
    wrong = chance.pick(WRONG) if chance.of(SHARE_WRONG) and function != "reduce_metrics" else None
    options: dict[str, Any] = {"seed": chance.whole(0, 10**6)}
    options |= _tokens(chance, function, executed)
    options |= _dtypes(chance, function, float64)
    options["upstream"] = chance.weighed(
        {"ones": 4, "random": 4, "zero": 1, "some-zero": 2, "expanded": 1, "strided": 1}
        | {"first": 1, "nan": 0.2, "large": 0.3}
    )
    options["threads"] = 2 if chance.of(0.1) else 1
    options["twice"] = chance.of(0.1)
    options["constants"] = "of-inference" if chance.of(0.08) else "usual"
    options["mode"] = chance.weighed({"grad": 12, "no-grad": 1, "inference": 1})
    if function in WITH_LOGITS or function in LINEAR:
        options |= _row_options(chance, function, options, executed)
    if function in LINEAR:
        options |= _head_options(chance, function)
    if function in DIVERGENCES:
        options |= _teacher_options(chance) | ({} if wrong is None else {"kept": None})
    if function in WITH_OBJECTIVE:
        options |= objective_options(chance, function, options)
    if function in PLAIN:
        options |= plain_options(chance, function, options)
    options["twice"] = options["twice"] and not options.get("inplace", False)
    options["features"] = _features(chance, function, options)
    return Case(function, **options, wrong=wrong)


def _tokens(chance: Chance, function: str, executed: bool) -> dict[str, Any]:
    size = chance.weighed(
        {"tiny": 6, "small": 6, "long": 0.3, "longest": 0.03, "many": 0.2, "none": 0.3}
    )
    if size in ("long", "longest", "many") and (function in WITH_LOGITS + LINEAR or executed):
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


def _row_options(chance: Chance, function: str, options: dict, executed: bool) -> dict[str, Any]:
    size = chance.weighed({"small": 12, "middle": 2, "large": 1.2})
    vocabulary = chance.pick({"small": SMALL, "middle": MIDDLE, "large": LARGE}[size])
    if executed:
        vocabulary = chance.pick(SMALL) if size == "small" else chance.pick((500, 1000, 1025))
    drawn: dict[str, Any] = {
        "vocabulary": vocabulary,
        "spread": chance.weighed({0.0: 1, 0.01: 1, 1.0: 4, 4.0: 4, 30.0: 1, 1000.0: 0.3}),
        "logits_layout": chance.weighed(
            {"contiguous": 4, "sliced": 2, "shifted": 2, "transposed": 1.5, "odd": 1.5}
            | {"expanded": 0.5, "strided": 1}
        ),
        "ids_dtype": chance.weighed({"int64": 5, "int32": 1}),
        "temperature": chance.weighed(
            {1.0: 8, 0.7: 2, 1e-3: 0.5, 100.0: 0.3, 1e-28: 0.1, "per-token": 1.5, "0-d": 0.5}
        ),
        "autocast": "bfloat16" if chance.of(0.03) else None,
    }
    # of its own numbers, so that the other options are as they were
    sets = Chance(f"kept {options['seed']}")
    drawn["kept"] = sets.weighed({None: 8, "one": 0.5, "few": 1, "ragged": 1, "all": 0.3})
    drawn["threads"] = 2 if chance.of(0.1 if size == "small" else 0.5) else 1
    if size == "large":  # few rows take another path than many
        drawn["sequences"] = min(options["sequences"], chance.pick((1, 2, 4)))
    if options["layout"] == "padded" and chance.of(0.15):
        drawn["temperature"] = chance.pick(("per-sequence", "per-sequence-column"))
    if isinstance(drawn["temperature"], str) and chance.of(0.5):
        drawn["temperature_dtype"] = chance.pick(("float16", "bfloat16", "float64"))
    drawn |= chance.some(
        {
            "logit_scale": (0.15, (0.5, 0.3, 2.0, 0.0625)),
            "logit_softcap": (0.15, (1.0, 5.0, 30.0, 50.0)),
        }
    )
    if function in WITH_LOGITS:
        drawn["inplace"] = options["mode"] == "grad" and chance.of(0.15)
        if drawn["inplace"] and drawn["logits_layout"] == "expanded":
            drawn["logits_layout"] = "contiguous"
    if function not in DIVERGENCES and chance.of(0.1):
        drawn["ignore_index"] = chance.pick((-1, 0, 3))
    if function in ("token_stats", "linear_token_stats"):
        outputs = [name for name in (*DIFFERENTIABLE, "sum_sq_probs", "is_top1") if chance.of(0.6)]
        if options["mode"] == "grad" and not set(outputs) & set(DIFFERENTIABLE):
            outputs.append(chance.pick(DIFFERENTIABLE))
        drawn["outputs"] = tuple(outputs) or ("logprobs",)
    if SIGNATURES[function]["mask"].default is None and chance.of(0.2):
        drawn["mask"] = "absent"
    return drawn


def _teacher_options(chance: Chance) -> dict[str, Any]:
    drawn: dict[str, Any] = {
        "beta": chance.weighed(
            {0.0: 3, 1.0: 3, 0.5: 2, 0.1: 1, 0.9: 1}
            | {x: 0.2 for low in (1e-7, 1e-5, 1e-4, 1e-3) for x in (low, 1 - low)}
        ),
        "teacher": chance.weighed({"own": 4, "hidden": 2, "near": 2, "same": 1, "tokens": 2}),
    }
    if drawn["teacher"] == "tokens":  # log-probabilities have no temperature
        drawn["kept"] = None
        drawn |= chance.some({"temperature": (0.3, (0.1, 0.05))})
        dtypes = ("float32", "bfloat16", "float16", "float64")
        return drawn | chance.some({"teacher_dtype": (0.4, dtypes)})
    return drawn | chance.some(
        {
            "teacher_dtype": (0.3, ("float32", "bfloat16", "float16")),
            "teacher_temperature": (0.3, (0.5, 0.7, 3.0)),
            "teacher_softcap": (0.15, (1.0, 5.0, 30.0)),
        }
    )


def _head_options(chance: Chance, function: str) -> dict[str, Any]:
    drawn: dict[str, Any] = {
        "hidden": chance.weighed({1: 1, 2: 1, 3: 1, 8: 2, 17: 1, 32: 2, 65: 1}),
        "bias": chance.of(0.3),
        "lora": chance.weighed({0: 4, 1: 0.5, 3: 0.7}),
        "chunk_tokens": chance.weighed({None: 2, 1: 1, 3: 1, 1000: 1}),
        "compact": chance.of(0.8),
        "logit_softcap": chance.weighed({None: 8, 1.0: 0.5, 30.0: 1}),
    }
    dtypes = ("float32", "bfloat16", "float16")
    drawn |= chance.some({"weight_dtype": (0.15, dtypes)})
    if drawn["lora"]:
        drawn["lora_scale"] = chance.pick((0.75, 1, 2, -1.5))
        drawn |= chance.some({"lora_dtype": (0.4, dtypes)})
    names = ["hidden", "weight"] + ["bias"] * drawn["bias"]
    names += ["lora_a", "lora_b"] * bool(drawn["lora"])
    if chance.of(0.3):
        drawn["frozen"] = tuple(name for name in names if chance.of(0.4))
    if function == "linear_policy_loss":
        drawn["metrics"] = chance.of(0.8)
    return drawn


def _features(chance: Chance, function: str, options: dict) -> tuple[str, ...]:
    """Return unusual features of the data, none in about half of the cases."""
    known: list[str] = []
    if function in WITH_LOGITS:
        known += rows_data.FEATURES
    elif function in LINEAR:
        known += ("nan-row", "ties", "inf-some", "lowest-some", "ignored")
    if function in WITH_OBJECTIVE:
        own = str(options.get("objective", "")).startswith("own")
        known += [name for name in policy_data.FEATURES if not (own and "inf" in name)]
    if function in PLAIN:
        known += features_of(function)
    if function in DIVERGENCES:  # most rows should have a distribution to compare
        known = [name for name in known if name not in ("ignored", *NO_ENTROPY[2:5], "largest")]
    share = min(0.5, 1.5 / max(len(known), 1))
    found = () if chance.of(0.5) else tuple(name for name in known if chance.of(share))
    top = dict(options.get("fields", {})).get("top_entropy_quantile", 1.0) < 1
    if top:  # the entropy of a row without distribution is unspecified
        found = tuple(name for name in found if name not in NO_ENTROPY)
    return found + (("nan-payload",) if chance.of(0.1) else ())

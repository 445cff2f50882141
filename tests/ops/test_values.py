"""Values and gradients of every function against the oracle, on each backend.

A row names a function and the options of its cases (`tests/fuzz/case.py`), in which a list stands
for each of its members. A case that differs is printed as a line for `python -m tests.fuzz`.
"""

import itertools
import random

import pytest

from fastrl import native
from fastrl.contract import AGGREGATIONS, KL_ESTIMATORS
from fastrl.objective.presets import PRESETS
from tests.conftest import MOST_INTERPRETED
from tests.fuzz.case import IN_TORCH, LOSSES, Case
from tests.fuzz.examine import examine
from tests.fuzz.objectives import OWN

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("poisoned_memory")]

ROWS = {}


def row(function, *which, **options):
    ROWS[": ".join([function, *which])] = function, options


def each(**options):
    """All combinations of options, of which those that are lists have several values.

    `also` has options that come together; what is None is left out.
    """
    values = [x if isinstance(x, list) else [x] for x in options.values()]
    combined = []
    for chosen in itertools.product(*values):
        found = {k: x for k, x in zip(options, chosen, strict=True) if x is not None}
        combined.append(found | found.pop("also", {}))
    return combined


MASKS = ["all", "none", "holes", "ragged", "without-first", "one"]
FLOATS = ["float32", "bfloat16", "float16"]
DTYPES = ["float64", *FLOATS]  # compiled backends take no float64
LAYOUTS = ["contiguous", "odd", "sliced", "transposed", "strided"]
STATISTICS = ("logprobs", "entropy", "logsumexp", "sum_sq_probs", "is_top1")
SIZE = {"sequences": 5, "tokens": 7}
TOKENS = {**SIZE, "masked_values": "nan"}

# --- values, rewards, weights, means

SOMETIMES = [None, 0.2]
ENDS = {"terminated": SOMETIMES, "truncated": SOMETIMES, "bootstrap": [None, "token", "sequence"]}
GAE = each(gamma=[0.9, 1, 0.0], lam=[0.95, 0.0, 1.0], **ENDS)
row("gae", **TOKENS, mask=MASKS, parameters=GAE)
row("gae", "packed", **TOKENS, layout="cut", parameters=GAE)
row("gae", "layouts", **TOKENS, mask=MASKS, dtype=DTYPES, token_layout=LAYOUTS, parameters=GAE[-1])
row("discounted_returns", **TOKENS, mask=MASKS, parameters=each(gamma=[0.9, 1, 0.0], **ENDS))

GROUPS = {"sequences": 4, "tokens": 3, "groups": [None, "ids"]}
BASELINES = {"baseline": ["mean", "leave_one_out", "none"], "scale": ["group", "batch", "none"]}
NORMS = each(**BASELINES, correction=[None, 0, 2, 1.5], singleton=["zero", "raw"])
UNUSUAL = ["nan-rewards", "inf-rewards", "offset", "equal-groups", "zero-groups"]
row("group_advantages", **GROUPS, ids_dtype=["int64", "int32"], values="real", parameters=NORMS)
row(
    "group_advantages",
    "unusual rewards",
    **GROUPS,
    dtype=DTYPES,
    features=[(name,) for name in UNUSUAL],
    parameters=each(**BASELINES),
)

#: Each aggregation, with what it needs.
WEIGHINGS = [
    {
        "parameters": {"aggregation": name},
        "normalizer": None if name == "token-sum" else number,
        "groups": groups if name == "prompt-mean" else None,
    }
    for name in AGGREGATIONS
    for number in (None, 5, 0.25, (7,))
    for groups in (1, 5, "ids")
]
CLIPS = each(clip=[None, 0.25, 5.0], loss=["mse", "huber"])
BROKEN_VALUES = ["nan-values", "nan-returns", "nan-old", "inf-values", "inf-returns", "inf-old"]
row("token_weights", **TOKENS, mask=MASKS, token_layout=LAYOUTS, also=WEIGHINGS)
row("value_loss", "weighed", **TOKENS, mask=MASKS, also=WEIGHINGS)
row("value_loss", **TOKENS, dtype=DTYPES, token_layout=LAYOUTS, spread=2.0, parameters=CLIPS)
row("value_loss", "broken", **SIZE, features=[(x,) for x in BROKEN_VALUES], parameters=CLIPS)

FEATURES_OF_MEANS = [(), ("equal",), ("nan-x",), ("inf-x",)]
MEANS = {**TOKENS, "mask": MASKS, "dtype": DTYPES, "features": FEATURES_OF_MEANS}
row("masked_mean", **MEANS, layout="3-d", parameters=each(dim=[None, 0, 1, 2, -1, -3]))
row("whiten", **MEANS, spread=[1e-4, 3.0], parameters=each(shift_mean=[True, False]))

row(
    "kl_divergence",
    **SIZE,
    layout=["padded", "packed", "0-d", "3-d"],
    dtype=DTYPES,
    ref=["equal", "near", "far", "bounds", "huge"],
    features=[(), ("ref-inf",), ("logprob-inf",), ("nan-ref",), ("nan-logprob",)],
    parameters=each(estimator=[*KL_ESTIMATORS], clamp=[None, 0.5]),
)

# --- losses

KL = {"kl_coef": 0.1, "entropy_coef": 0.02}
KLS = [{**KL, "kl_estimator": name} for name in KL_ESTIMATORS]
OBJECTIVES = {"objective": [*PRESETS, *OWN], "fields": [{}, {"entropy_coef": -0.5}, *KLS]}
BESIDE = {"old": "near", "ref": "near"}
CORRECTIONS = [
    {"kl_coef": 0.1, "rollout_correction": [{"kind": kind, "level": level, "high": 1.1}]}
    for kind in ("truncate", "mask", "filter")
    for level in ("token", "sequence", "geometric")
]
BROKEN_KLS = [
    {**one, "kl_gradient": gradient, "rollout_correction": [{"high": 2.0}]}
    for one in KLS
    for gradient in ("exact", "straight-through")
]
BY_PROMPT = {"fields": {"aggregation": "prompt-mean"}, "groups": 1}
BROKEN = ["nan-logprob", "nan-old", "nan-ref", "nan-rollout", "nan-entropy", "nan-advantages"]
BROKEN += ["logprob-inf", "old-inf", "both-inf", "ref-inf", "inf-advantages"]
CLIPPED = {**TOKENS, "objective": [*PRESETS], "old": [None, "near", "bounds"], "mask": MASKS}
PACKED = {**CLIPPED, "layout": "cut", "objective": ["grpo", "gspo", "gmpo", "cispo"]}
BY = ["token", "sequence"]
row("policy_loss", **TOKENS, **OBJECTIVES, **BESIDE, entropy=True, dtype=DTYPES, advantages=BY)
row("policy_loss", "masks", **CLIPPED, token_layout=LAYOUTS)
row("policy_loss", "packed", **PACKED, advantages=BY)

OF_LOGITS = {**TOKENS, "vocabulary": 129, "spread": 3.0, "upstream": "random", "mask": "holes"}
OF_HIDDEN = {**TOKENS, "vocabulary": 311, "hidden": 24, "upstream": "random", "mask": "holes"}
INPUTS = {
    "policy_loss": {**TOKENS, "entropy": True},
    "logits_policy_loss": OF_LOGITS,
    "linear_policy_loss": {**OF_HIDDEN, "chunk_tokens": 7},
}
for function in LOSSES:
    inputs, near = INPUTS[function], {**BESIDE, "rollout": "near"}
    row(function, "rollout", **inputs, **{**near, "old": [None, "near"]}, fields=CORRECTIONS)
    row(
        function,
        "broken",
        **{**inputs, **near, "old": [None, "near"]},
        objective=["ppo", "gspo", "gmpo", "cispo", "sapo", "reinforce"],
        fields=BROKEN_KLS if function == "policy_loss" else BROKEN_KLS[:1],
        policy_weights=[None, "token"],
        features=[(name, "nan-payload") for name in BROKEN],
    )
    empty = {"sequences": [0, 5], "tokens": [0, 7], "mask": "none", "layout": ["padded", "cut"]}
    row(function, "without tokens", **{**inputs, **empty}, also=[{}, BY_PROMPT])
row("logits_policy_loss", **OF_LOGITS, **OBJECTIVES, **BESIDE, dtype=DTYPES)
row(
    "logits_policy_loss",
    "vocabularies",
    **BESIDE,
    tokens=3,
    vocabulary=[1, 2, 1025, 50257, 151936],
    dtype=FLOATS,
    fields=[{}, KL],
)
row(
    "linear_policy_loss",
    **OF_HIDDEN,
    **OBJECTIVES,
    **BESIDE,
    chunk_tokens=[1, 7, None],
    metrics=[True, False],
)
row(
    "linear_policy_loss",
    "heads",
    **OF_HIDDEN,
    **BESIDE,
    dtype=FLOATS,
    weight_dtype=["like", "float32", "bfloat16"],
    token_layout=["contiguous", "sliced", "transposed", "strided"],
    bias=[False, True],
    lora=[0, 3],
    temperature=[1.0, "per-token"],
    logit_softcap=[None, 5.0],
    chunk_tokens=16,
)
row(
    "linear_policy_loss",
    "frozen, autocast",
    **OF_HIDDEN,
    **BESIDE,
    dtype=FLOATS,
    weight_dtype=["like", "float32", "bfloat16"],
    lora=[0, 3],
    frozen=[(), ("hidden",), ("weight",)],
    autocast=[False, True],
    compact=[True, False],
    features=[(), ("nan-row",)],
)

# --- statistics of tokens

UNUSUAL = ["offset", "ties", "largest", "tiny", "ignored", "far-chosen", "sure-chosen"]
UNUSUAL += ["inf-some", "inf-chosen", "inf-but-chosen", "inf-block", "inf-first-block", "nan-one"]
SCALED = {"spread": 20.0, "logit_scale": 0.25, "logit_softcap": [None, 30.0]}
HEATS = [0.6, "0-d", "per-token", "per-sequence", "per-sequence-column"]
UPSTREAM = ["random", "first", "some-zero", "strided", "expanded", "nan", "large"]
STATS = {"outputs": STATISTICS, "upstream": "random"}
row(
    "token_stats",
    **STATS,
    tokens=3,
    vocabulary=[1, 2, 129, 1025, 32001, 50257, 151936],
    dtype=FLOATS,
    spread=3.0,
)
row(
    "token_stats",
    "each output",
    tokens=5,
    vocabulary=77,
    dtype=DTYPES,
    outputs=[(name,) for name in STATISTICS[:3]],
    upstream=UPSTREAM,
    features=[(), ("nan-payload",)],
)
row(
    "token_stats",
    "unusual rows",
    **STATS,
    tokens=[4, 40],  # of few, blocks of the vocabulary are shared out over the threads
    vocabulary=[130, 8292],
    dtype=FLOATS,
    features=[(name,) for name in UNUSUAL],
    logit_softcap=[None, 0.5, 30.0],
)
row(
    "token_stats",
    "scale, softcap, temperature",
    **{**STATS, **SCALED},
    sequences=2,
    tokens=3,
    vocabulary=[501, 9001],
    dtype=DTYPES,
    temperature=HEATS,
    temperature_dtype=["float32", "float64"],
)
row(
    "token_stats",
    "layouts",
    **STATS,
    sequences=3,
    tokens=4,
    vocabulary=333,
    dtype=FLOATS,
    logits_layout=[*LAYOUTS, "shifted", "expanded"],
)
IN_PLACE = {"inplace": True, "vocabulary": 333, "dtype": FLOATS, "mask": MASKS}
VIEWS = [*LAYOUTS, "shifted"]
row("token_stats", "in place", **SIZE, **STATS, **IN_PLACE, logits_layout=VIEWS)
row("logits_policy_loss", "in place", **SIZE, **BESIDE, **IN_PLACE, logits_layout=VIEWS)
row("linear_token_stats", **{**OF_HIDDEN, **STATS}, dtype=FLOATS, chunk_tokens=[1, 7, 64, None])

#: Cases of a row that kernels of GPUs run: each takes them long on a CPU.
MOST = {"triton": 8, "cuda": 20}


def cases(backend, function, options):
    """The cases of a row that a backend runs."""
    found = [
        Case(function, **one)
        for one in each(**options)
        if backend == "reference" or one.get("dtype") != "float64"
        if backend != "triton" or one.get("vocabulary", 0) <= MOST_INTERPRETED
    ]
    random.Random(20260923).shuffle(found)
    return found[: MOST.get(backend)]


@pytest.mark.parametrize("name", ROWS)
def test_values_and_gradients_are_those_of_the_oracle(backend, name):
    function, options = ROWS[name]
    if function in IN_TORCH and backend in MOST:
        pytest.skip("plain torch has no kernels")
    for case in cases(backend, function, options):
        found = examine(case, backend, "cpu")
        assert not found.refused, case
        assert not found.differences, f"{case}: {'; '.join(map(str, found.differences))}"


def test_bfloat16_heads_where_there_are_no_matrix_tiles(compiled, monkeypatch):
    monkeypatch.setattr(native, "has_matrix_tiles", lambda: False)
    test_values_and_gradients_are_those_of_the_oracle("cpu", "linear_policy_loss: heads")

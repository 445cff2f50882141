"""The table of calls: rows of a function and options of its cases, whose values the oracle knows.

In a row a list stands for each of its members; `combined.cases` makes the cases. A new operator or
argument is a row here, which tests of values run on every backend.
"""

from math import inf

from fastrl.contract import AGGREGATIONS, KL_ESTIMATORS, KL_GRADIENTS, SURROGATES
from fastrl.objective.presets import PRESETS

from . import companion_rows, objective_rows
from .case import LOSSES
from .combined import each
from .objectives import OWN
from .row_options import (
    AUTOCAST,
    BY,
    DTYPES,
    FLOATS,
    GPT2,
    KL,
    LAYOUTS,
    MASKS,
    QWEN3,
    SEEDS,
    SIZE,
    STATISTICS,
    STATS,
    TOKENS,
    Table,
)

ROWS = Table()
row = ROWS.row

# --- values, rewards, weights, means

SOMETIMES = [None, 0.2]
ENDS = {"terminated": SOMETIMES, "truncated": SOMETIMES, "bootstrap": [None, "token", "sequence"]}
GAE = each(gamma=[0.9, 1, 0.0], lam=[0.95, 0.0, 1.0], **ENDS)
SCANS = {**TOKENS, "mask": [*MASKS, "absent"], "values": ["grid", "real"]}
BROKEN_REWARDS = [("offset",), ("nan-rewards",), ("inf-rewards",)]
MOST_ENDS = {"terminated": [0.0, 0.7], "truncated": [0.0, 0.7], "bootstrap": ["token", "sequence"]}
LATE = each(gamma=[None, 0.5, 0.99], **MOST_ENDS)
row("gae", **SCANS, parameters=GAE)
row("gae", "broken", **SCANS, features=BROKEN_REWARDS, parameters=[*each(lam=[0.5, None]), *LATE])
row("discounted_returns", "broken", **SCANS, features=BROKEN_REWARDS, parameters=LATE)
row("gae", "packed", **TOKENS, layout=["cut", "packed"], parameters=GAE)
row("gae", "layouts", **TOKENS, mask=MASKS, dtype=DTYPES, token_layout=LAYOUTS, parameters=GAE[-1])
row("discounted_returns", **TOKENS, mask=MASKS, parameters=each(gamma=[0.9, 1, 0.0], **ENDS))

GROUPS = {"sequences": 4, "tokens": 3, "groups": [None, "ids"], "layout": ["padded", "packed"]}
SCALES = ["group", "batch", "none", "mean"]
BASELINES = {"baseline": ["mean", "leave_one_out", "none"], "scale": SCALES}
MASKED = {"mask": MASKS, "masked_values": ["nan", "1e30", "inf"]}
NORMS = each(**BASELINES, correction=[None, 0, 2, 1.5], singleton=["zero", "raw"])
SCALED = each(**BASELINES, eps=[0.0, 0, 1e-8, 1.0], convention=[None, "fastrl", "verl", "openrlhf"])
UNUSUAL = ["nan-rewards", "inf-rewards", "offset", "equal-groups", "zero-groups"]
row("group_advantages", **GROUPS, ids_dtype=["int64", "int32"], values="real", parameters=NORMS)
row("group_advantages", "masked", **GROUPS, **MASKED, parameters=NORMS)
row(
    "group_advantages",
    "scaled",
    **GROUPS,
    mask=["absent", "holes"],
    values=["grid", "real"],
    spread=[1.0, 1e-3, 100.0],
    parameters=SCALED,
)
BY_CONVENTION = each(**BASELINES, convention=["fastrl", "trl", "verl", "openrlhf"])
row("group_advantages", "missing", **GROUPS, features=[("nan-rewards",)], parameters=BY_CONVENTION)
UNUSUAL_REWARDS = {**GROUPS, "dtype": DTYPES, "features": [(name,) for name in UNUSUAL]}
row("group_advantages", "unusual rewards", **UNUSUAL_REWARDS, parameters=each(**BASELINES))

#: Aggregation, normalizer and groups.
WEIGHINGS = [
    (name, number, groups)
    for name in AGGREGATIONS
    for number in ((None,) if name == "token-sum" else (None, 5, 0.25, 1e12, (7,)))
    for groups in ((1, 5, "ids") if name == "prompt-mean" else (None,))
]
OF_TOKENS = [
    {"parameters": {"aggregation": name}, "normalizer": number, "groups": groups}
    for name, number, groups in WEIGHINGS
]
CLIPS = each(clip=[None, 0.25, 5.0], loss=["mse", "huber"])
BROKEN_VALUES = ["nan-values", "nan-returns", "nan-old", "inf-values", "inf-returns", "inf-old"]
row("token_weights", **TOKENS, mask=MASKS, token_layout=LAYOUTS, also=OF_TOKENS)
row("value_loss", "weighed", **TOKENS, mask=MASKS, also=OF_TOKENS)
VALUES = {**TOKENS, "mask": "holes", "dtype": DTYPES, "token_layout": LAYOUTS}
BROKEN_VALUES += ["offset", "equal"]
OF_VALUES = {"values": ["grid", "real"], "spread": [0.0, 2.0, 5.0]}
row("value_loss", **VALUES, **OF_VALUES, parameters=CLIPS)
row("value_loss", "broken", **SIZE, features=[(x,) for x in BROKEN_VALUES], parameters=CLIPS)

FEATURES_OF_MEANS = [(), ("equal",), ("nan-x",), ("inf-x",), ("offset",)]
MEANS = {**TOKENS, "mask": MASKS, "dtype": DTYPES, "features": FEATURES_OF_MEANS}
MEANS |= {"values": ["grid", "real"], "spread": [0.0, 1e-4, 3.0, 100.0]}
SHAPES = ["padded", "packed", "0-d", "3-d"]
row("masked_mean", **MEANS, layout=["3-d"], parameters=each(dim=[None, 0, 1, 2, -1, -3]))
row("masked_mean", "rows", **MEANS, layout=["padded"], parameters=each(dim=[None, 0, 1, -2]))
row("masked_mean", "of all", **MEANS, layout=SHAPES)
row("whiten", **MEANS, layout=SHAPES, parameters=each(shift_mean=[True, False]))
HOW = each(policy_loss=[None, "sum", "mean", "rank-mean"])
row("reduce_metrics", sequences=[1, 3], tokens=5, features=[(), ("nan-metric",)], parameters=HOW)

row(
    "kl_divergence",
    **SIZE,
    layout=SHAPES,
    dtype=DTYPES,
    ref=["equal", "near", "far", "bounds", "huge"],
    features=[
        *((), ("ref-inf",), ("logprob-inf",), ("ref-both-inf",), ("nan-ref",), ("nan-logprob",)),
    ],
    values=["grid", "real"],
    parameters=each(estimator=[None, *KL_ESTIMATORS], clamp=[None, 0.5, 2.0, 10.0]),
)

# --- losses

KLS = [{**KL, "kl_estimator": name} for name in KL_ESTIMATORS]
OBJECTIVES = {"objective": [*PRESETS, *OWN], "fields": [{}, {"entropy_coef": -0.5}, *KLS]}
BESIDE = {"old": "near", "ref": "near"}
#: Equal engines have a weight of 1, which is on a bound: within.
CORRECTIONS = [
    {
        "kl_coef": 0.1,
        "rollout_correction": [{"kind": kind, "level": level, "low": low, "high": high}],
    }
    for kind in ("truncate", "mask", "filter")
    for level in ("token", "sequence", "geometric")
    for low, high in ((0.5, 1.0), (1.0, 1.1))
]
REJECTIONS = [
    {"kind": "filter", "level": level, "estimator": estimator, "low": low, "high": 0.125}
    for level in ("token", "sequence", "geometric", "max")
    for estimator, low in (("k1", -0.125), ("k2", 0.0), ("k3", 0.0), ("reverse-k3", 0.0))
]
REJECTED = [{"rollout_correction": [one]} for one in REJECTIONS]
REGIONS = [
    {"trust_region": {"kind": kind, "high": 0.0625}, "clip_low": 1.0, "clip_high": None}
    for kind in ("tv", "kl", "m2")
]
BROKEN_KLS = [{**one, "kl_gradient": name} for one in KLS for name in KL_GRADIENTS]
BY_PROMPT = {"fields": {"aggregation": "prompt-mean"}, "groups": 1}
NAN = ["nan-logprob", "nan-old", "nan-ref", "nan-rollout", "nan-entropy", "nan-advantages"]
INFINITE = ["logprob-inf", "old-inf", "both-inf", "ref-inf", "ref-both-inf", "inf-advantages"]
INFINITE += ["rollout-inf", "rollout-both-inf"]
BROKEN = [(name, "nan-payload") for name in NAN + INFINITE] + [("both-inf", "nan-advantages")]
BANNED = [("inf-chosen", "both-inf"), ("inf-chosen", "ref-both-inf"), ("inf-but-chosen",)]
BANNED += [("ignored",)]
CLIPPED = {**TOKENS, "objective": [*PRESETS], "old": [None, "near", "bounds"], "mask": MASKS}
PACKED = {**CLIPPED, "layout": "cut", "objective": ["grpo", "gspo", "gmpo", "cispo"]}
OF_LOGPROBS = {**TOKENS, "mask": "holes", "entropy": True}
row("policy_loss", **OF_LOGPROBS, **OBJECTIVES, **BESIDE, dtype=DTYPES, advantages=BY)
row("policy_loss", "masks", **CLIPPED)
OFF = {"layout": ["padded", "cut"], "features": [(), ("nan-old", "old-inf")]}
row("policy_loss", "rejected", **OF_LOGPROBS, **OFF, rollout=["bounds", "far"], fields=REJECTED)
row("policy_loss", "regions", **OF_LOGPROBS, **OFF, old=["bounds", "near", "huge"], fields=REGIONS)
row("policy_loss", "packed", **PACKED, advantages=BY)
row("clipped_tokens", **CLIPPED, advantages=BY)
row("clipped_tokens", "packed", **PACKED)
DUAL = {"objective": ["grpo", "gspo"], "fields": {"dual_clip": 3.0}}
row("clipped_tokens", "dual clip", **{**PACKED, **DUAL}, advantages=BY)

#: Log-ratios of up to +-200, all kinks, and slopes whose parts of size e^x cancel.
EXTREMES = [
    {"aggregation": "token-sum", "surrogate": surrogate, "level": level, "kl_coef": 0.1}
    | {"kl_estimator": estimator, "kl_gradient": gradient}
    | ({"dual_clip": 3.0, "delta": 4.0} if surrogate == "ppo_clip" else {})
    for surrogate in SURROGATES
    for level in (("sequence",) if surrogate == "gmpo" else ("token", "sequence", "sequence-token"))
    for estimator in KL_ESTIMATORS
    for gradient in KL_GRADIENTS
    if not (surrogate == "reinforce" and level != "token")
    if not (surrogate == "gmpo" and gradient == "bias-corrected")
]
#: Sequences of one token, too, whose ratio is that of the token.
FAR = [
    {"old": "bounds", "ref": "huge", "tokens": 3},
    {"old": "huge", "ref": "bounds", "tokens": 1},
    {"old": "near", "ref": "bounds", "tokens": 1},
]
row("policy_loss", "extremes", sequences=15, dtype=FLOATS, fields=EXTREMES, also=FAR)

#: Of each term of each token a bound leaves the whole slope, or none.
CLAMPS = [
    {"kl_clamp": of_kl, "log_ratio_clamp": of_ratio}
    for of_kl in (None, 0.5, 10.0)
    for of_ratio in (None, 20.0, (-inf, 10.0))
]
LEVELS_OF_CLAMPS = [{"level": level} for level in ("token", "sequence", "sequence-token")]
BOUNDED = [{"dual_clip": 3.0}, {"delta": 4.0}, {"surrogate": "sapo", "sapo_temperature_pos": 2.0}]
CLAMPED = [
    {"aggregation": "token-sum", "kl_coef": 1.0, "kl_estimator": estimator, "kl_gradient": gradient}
    | {**clamps, **level, **surrogate}
    for estimator in KL_ESTIMATORS
    for gradient in KL_GRADIENTS
    for clamps in CLAMPS
    for level in LEVELS_OF_CLAMPS
    for surrogate in ({}, *BOUNDED)
]
CLAMPED += [
    {**fields, "kl_level": "policy"}
    for fields in CLAMPED
    if fields["kl_gradient"] == "bias-corrected" and fields["level"] != "token"
]
row("policy_loss", "clamps", sequences=15, **SEEDS, fields=CLAMPED, also=FAR, some=3)
CLAMPS_OF_ROWS = {"vocabulary": 5, "sequences": 15, **SEEDS, "fields": CLAMPED, "also": FAR}
row("logits_policy_loss", "clamps", **CLAMPS_OF_ROWS, some=2)
row("linear_policy_loss", "clamps", **CLAMPS_OF_ROWS, hidden=4)

WEIGHED = [
    {"fields": {**KL, "aggregation": name}, "normalizer": number, "groups": groups}
    for name, number, groups in WEIGHINGS
]
OWN_AGGREGATIONS = {"kl_aggregation": "token-mean", "entropy_aggregation": "token-mean"}
BY_TERM = {**KL, "aggregation": "seq-mean-token-mean", **OWN_AGGREGATIONS}
NUMBERS = [{"kl": 7.0}, {"policy": 2.0, "kl": 7.0, "entropy": (9.0,)}]
OF_TERMS = {**TOKENS, **BESIDE, "entropy": True, "mask": ["holes", "without-first"]}
LEVELS = [{**KL, "level": level} for level in ("token", "sequence", "sequence-token")]
row("policy_loss", "weighed", **OF_TERMS, also=WEIGHED)
row("policy_loss", "by term", **OF_TERMS, fields=BY_TERM, normalizer=NUMBERS)
row("policy_loss", "levels", **OF_TERMS, fields=LEVELS, layout=["padded", "cut"], policy_weights=BY)

OF_LOGITS = {**TOKENS, "vocabulary": 129, "spread": 3.0, "upstream": "random", "mask": "holes"}
OF_HIDDEN = {**TOKENS, "vocabulary": 311, "hidden": 24, "upstream": "random", "mask": "holes"}
INPUTS = {
    "policy_loss": OF_LOGPROBS,
    "logits_policy_loss": OF_LOGITS,
    "linear_policy_loss": {**OF_HIDDEN, "chunk_tokens": 7},
}
for function in LOSSES:
    inputs = {**INPUTS[function], "old": [None, "near"], "ref": "near"}
    row(function, "rollout", **inputs, rollout=["equal", "near", "huge"], fields=CORRECTIONS)
    row(
        function,
        "broken",
        **inputs,
        rollout="near",
        fields={**KL, "rollout_correction": [{"high": 2.0}]},
        features=BROKEN,
        objective=["ppo", "gspo", "gmpo", "cispo", "sapo", "reinforce"],
        policy_weights=[None, "token"],
    )
    empty = {"sequences": [0, 5], "tokens": [0, 7], "mask": "none", "layout": ["padded", "cut"]}
    row(function, "without tokens", **{**inputs, **empty}, also=[{}, BY_PROMPT])
BANNED_TOO = {"old": [None, "near"], "rollout": "near", "features": ("rollout-both-inf",)}
row("policy_loss", "banned rollout", **OF_LOGPROBS, **BANNED_TOO, ref="near", fields=CORRECTIONS)
row(
    "policy_loss",
    "broken KL",
    **OF_LOGPROBS,
    **BESIDE,
    fields=BROKEN_KLS,
    features=BROKEN,
)
OF_BANNED = {**OF_LOGITS, **BESIDE, "features": BANNED}
row("logits_policy_loss", "banned", **OF_BANNED, objective=[*PRESETS])
row("logits_policy_loss", "banned, KL", **OF_BANNED, fields=BROKEN_KLS)
row("logits_policy_loss", **OF_LOGITS, **OBJECTIVES, **BESIDE, dtype=DTYPES)
row(
    "logits_policy_loss",
    "vocabularies",
    **BESIDE,
    tokens=3,
    vocabulary=[1, 2, 1025, GPT2, QWEN3],
    dtype=FLOATS,
    fields=[{}, KL],
)
row(
    "linear_policy_loss",
    **OF_HIDDEN,
    **BESIDE,
    objective=[*PRESETS, *OWN],
    fields=[{}, KL],
    chunk_tokens=[1, 7, None],
    features=[(), ("zero-advantages", "ignored")],
)
row(
    "linear_policy_loss",
    "heads",
    **OF_HIDDEN,
    **BESIDE,
    dtype=FLOATS,
    weight_dtype=["like", "float32", "bfloat16"],
    token_layout=["contiguous", "sliced", "transposed", "strided"],
    also=[{}, {"bias": True}, {"bias": True, "features": ("inf-some",)}],
    temperature="per-token",
    lora=[0, 3],
    lora_scale=0.75,
    logit_softcap=[None, 5.0],
    chunk_tokens=16,
)
row(
    "linear_policy_loss",
    "frozen, autocast",
    **OF_HIDDEN,
    **BESIDE,
    dtype=["float32", "bfloat16"],
    weight_dtype=["like", "float32"],
    lora=[0, 3],
    lora_scale=0.75,
    frozen=[(), ("hidden",), ("weight",)],
    autocast=AUTOCAST,
    metrics=[True, False],
    features=[(), ("nan-row", "zero-advantages")],
    also=[{}, {"compact": False}, {"constants": "of-inference"}],
    some=3,
)

# --- statistics of tokens

UNUSUAL = ["offset", "ties", "largest", "tiny", "ignored", "far-chosen", "sure-chosen"]
UNUSUAL += ["inf-row", "nan-row", "positive-inf"]
UNUSUAL += ["inf-some", "inf-chosen", "inf-but-chosen", "inf-block", "inf-first-block", "nan-one"]
SCALED = {"spread": 20.0, "logit_scale": 0.25, "logit_softcap": [None, 30.0]}
HEATS = [0.6, "0-d", "per-token", "per-sequence", "per-sequence-column"]
UPSTREAM = ["random", "first", "some-zero", "strided", "expanded", "nan", "large"]
row(
    "token_stats",
    **STATS,
    tokens=3,
    vocabulary=[1, 2, 129, 1025, 32001, GPT2, QWEN3],
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
    tokens=4,
    vocabulary=[130, 8292],
    dtype=["float32", "bfloat16"],
    features=[(name,) for name in UNUSUAL],
    logit_softcap=[None, 0.5, 30.0],
)
row(
    "token_stats",
    "banned blocks",
    **STATS,
    tokens=[4, 40],  # of few, blocks of the vocabulary are shared out over the threads
    threads=2,
    vocabulary=8292,
    dtype=["float32", "bfloat16"],
    features=[("inf-block",), ("inf-first-block",)],
    logit_softcap=[None, 30.0],
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
OF_HIDDEN |= {"outputs": STATISTICS, "upstream": ["random", "some-zero"]}
row(
    "linear_token_stats",
    **OF_HIDDEN,
    dtype=FLOATS,
    weight_dtype=["like", "float32"],
    lora=[0, 3],
    autocast=AUTOCAST,
    compact=[True, False],
    chunk_tokens=[1, 7, 64, None],
)

ROWS |= companion_rows.ROWS | objective_rows.ROWS

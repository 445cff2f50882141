"""Rows of the table for what is beside rows of logits: a sampler, a teacher, kept tokens."""

from math import inf

from .row_options import (
    AUTOCAST,
    BY,
    DTYPES,
    FLOATS,
    GPT2,
    KL,
    MASKS,
    SEEDS,
    STATISTICS,
    STATS,
    TOKENS,
    Table,
)

ROWS = Table()
row = ROWS.row

# --- score centering

CENTERED = {"score_centering": True}
WITHIN = {"low": 0.5, "high": 1.25}
ESTIMATED = [("k1", -0.25), ("k2", 0.0), ("k3", 0.0), ("reverse-k3", 0.0)]
WEIGHTS_OF_SAMPLERS = [
    *([{"high": 1.25, "low": low}] for low in (0.0, 0.5)),
    *([{"high": inf, "low": low}] for low in (0.0, 0.75)),
    *([{"kind": kind, **WITHIN}] for kind in ("mask", "filter")),
    *([{"kind": "filter", "estimator": x, "low": low, "high": 0.125}] for x, low in ESTIMATED),
    [WITHIN, {"kind": "filter", "low": 0.5, "high": 1.5}],
    [{"kind": "mask", **WITHIN}, {"kind": "filter", "level": "sequence", "low": 0.5, "high": 1e9}],
]
BY_WEIGHTS = [{"fields": CENTERED}] + [
    {"fields": {**CENTERED, "rollout_correction": one}, "rollout": ["near", "bounds"][n % 2]}
    for n, one in enumerate(WEIGHTS_OF_SAMPLERS)
]
OF_CISPO = [
    {"entropy_coef": 0.1},
    {"clip_low": 2.0, "clip_high": 0.5},
    {"clip_low": 0.5, "clip_high": 0.5, "log_ratio_clamp": (-0.125, 0.25)},
    {"clip_low": 0.0, "clip_high": 0.0},
]
BY_OBJECTIVES = [
    *({"objective": name, "fields": CENTERED} for name in ("grpo", "sapo")),
    {"objective": "ppo", "fields": {**CENTERED, "dual_clip": 3.0, "delta": 1.5}},
    {"objective": "dapo", "fields": {**CENTERED, "kl_coef": 0.1}, "ref": "near"},
    *(
        {"objective": "cispo", "fields": {**CENTERED, **fields}, "old": old}
        for fields in OF_CISPO
        for old in (None, "near", "bounds")
    ),
    *(
        {"objective": "reinforce", "fields": {**CENTERED, "aggregation": name, **KL}, "ref": "near"}
        for name in ("token-sum", "seq-mean-token-sum")
    ),
]
OF_SAMPLERS = {
    **SEEDS,
    **TOKENS,
    "mask": "holes",
    "sampler": ["near", "own", "tail", "bounds", "equal"],
    "sampler_dtype": ["float32", "bfloat16", "float64"],
    "upstream": "random",
}
for function, inputs in (
    ("logits_policy_loss", {"vocabulary": [5, 40], "spread": 1.5, "inplace": [False, True]}),
    ("linear_policy_loss", {"vocabulary": 40, "hidden": 6, "chunk_tokens": [1, 7, None]}),
):
    linear = function.startswith("linear")
    hows = {"compact": [True, False], "metrics": [True, False], "bias": True, "lora": 2}
    inputs = {**OF_SAMPLERS, **inputs, **(hows if linear else {})}
    weighs = {"policy_weights": [None, *BY], "advantages": BY, "objective": "reinforce"}
    row(function, "centered by weights", **inputs, **weighs, also=BY_WEIGHTS)
    row(function, "centered objectives", **inputs, also=BY_OBJECTIVES)
    empty = {"sequences": [0, 2], "tokens": [0, 3], "mask": "none"}
    row(function, "centered, without tokens", **{**inputs, **empty}, also=BY_WEIGHTS)
    row(
        function,
        "centered rows",
        **inputs,
        objective="reinforce",
        also=BY_WEIGHTS[:3],
        dtype=[*FLOATS, *([] if linear else ["float64"])],
        autocast=[None, "bfloat16" if linear else None],
        kept=[None, "one", "few", "ragged"],
        temperature=[1.0, 0.8, "per-token"],
        logit_scale=[1.0, 1.5],
        logit_softcap=[None, 4.0],
        features=[(), ("inf-some",), ("ignored",), ("zero-advantages",)],
    )

# --- divergences

OF_TEACHERS = {
    **SEEDS,
    "upstream": "random",
    "beta": [0.0, 0.1, 0.5, 1.0],
    "teacher": ["own", "near", "hidden"],
}
row(
    "token_divergence",
    **OF_TEACHERS,
    tokens=3,
    vocabulary=[1, 2, 130, 1025, GPT2],
    dtype=FLOATS,
    teacher_dtype=["like", "bfloat16"],
    spread=3.0,
)
row(
    "token_divergence",
    "scaled",
    **OF_TEACHERS,
    tokens=3,
    vocabulary=77,
    dtype=DTYPES,
    logit_softcap=[None, 5.0],
    temperature=[0.7, "per-token"],
    teacher_temperature=0.5,
    teacher_softcap=[None, 5.0],
)
EXCLUDED = [("inf-some",), ("lowest-some",)]
row(
    "token_divergence",
    "unusual rows",
    **OF_TEACHERS,
    tokens=4,
    vocabulary=[130, 8292],
    features=[("offset",), ("ties",), ("far-chosen",), *EXCLUDED, ("inf-block",), ("nan-one",)],
)
NEAR_ENDS = [1e-9, 1e-6, 1e-4, 1e-3]
row(
    "token_divergence",
    "next to the ends of Jensen-Shannon",
    **SEEDS,
    upstream="random",
    tokens=4,
    vocabulary=[6, 300],
    beta=[*NEAR_ENDS, *(1 - x for x in NEAR_ENDS)],
    teacher=["own", "tokens"],
    spread=[0.3, 12.0],
    features=[(), *EXCLUDED],
)
#: Of few tokens, K of which may be all.
OF_TOP_K = {**OF_TEACHERS, "teacher": "tokens", "teacher_dtype": [*DTYPES]}
row(
    "token_divergence",
    "tokens",
    **OF_TOP_K,
    tokens=4,
    vocabulary=[2, 5, 77, 8292],
    dtype=DTYPES,
    spread=[2.0, 30.0],
    temperature=[1.0, 0.1, "per-token"],
    logit_softcap=[None, 20.0],
    features=[(), ("inf-some",), ("sure-chosen",)],
)
row(
    "linear_divergence",
    **OF_TEACHERS | {"teacher": ["own", "near", "hidden", "tokens"]},
    **TOKENS,
    vocabulary=77,
    hidden=8,
    mask=MASKS,
    dtype=FLOATS,
    bias=[False, True],
    lora=[0, 3],
    autocast=AUTOCAST,
    chunk_tokens=[7, None],
    compact=[True, False],
    features=[(), *EXCLUDED],
)

# --- statistics beside a teacher

OF_STUDENT = ("logprobs", "entropy", "divergence")
OF_BOTH = (*STATISTICS, "divergence", "teacher_entropy", "agrees")
BESIDE_A_TEACHER = {
    **SEEDS,
    "sequences": 2,
    "tokens": 3,
    "masked_values": ["nan", "1e30"],
    "mask": "holes",
    "beta": [0.0, 0.4, 1.0],
    "upstream": ["random", "some-zero"],
    "spread": 2.0,
    "temperature": [1.0, "per-token"],
}
BESIDE_ITS_LOGITS = {
    "outputs": [OF_STUDENT, OF_BOTH],
    "dtype": FLOATS,
    "teacher": ["own", "near", "hidden"],
    "teacher_dtype": ["like", "float64", "bfloat16"],
    "teacher_temperature": [0.5, "per-token"],
    "kept": [None, "one", "ragged", "all"],
}
#: In float32: of 16 bits the gradient of the other statistics is rounded before the K tokens'.
BESIDE_ITS_TOKENS = {
    "outputs": [OF_STUDENT, (*STATISTICS, "divergence", "agrees")],
    "teacher": "tokens",
}
WITHOUT_ROWS = {"sequences": [0, 2], "tokens": [0, 2], "mask": "none"}
SOFTCAPS = {"logit_softcap": [None, 5.0], "teacher_softcap": [None, 5.0]}
IGNORED = {"features": [(), ("ignored",)], "ignore_index": [-100, 3]}
for which, options in (
    ("a teacher", {**BESIDE_ITS_LOGITS, **SOFTCAPS}),
    ("tokens of a teacher", BESIDE_ITS_TOKENS),
):
    of_logits = {**BESIDE_A_TEACHER, **options, **IGNORED, "vocabulary": [5, 77, 5000]}
    row("token_stats", f"beside {which}", **of_logits)
    row("token_stats", f"beside {which}, without rows", **{**of_logits, **WITHOUT_ROWS})
    of_hidden = {**BESIDE_A_TEACHER, **options, **IGNORED, "vocabulary": 77, "hidden": 8}
    of_hidden |= {"chunk_tokens": [None, 2], "compact": [True, False], "logit_softcap": None}
    row("linear_token_stats", f"beside {which}", **of_hidden)

# --- kept tokens

KEPT = {"kept": ["one", "few", "ragged", "all"], "masked_values": ["nan", None]}
KEPT |= {
    "mask": ["holes", "gaps"],
    **SEEDS,
    "features": [(), ("ignored",)],
    "ignore_index": [-100, 0],
    **STATS,
    "sequences": 2,
}
OF_HEAD = {"hidden": 24, "bias": [True, False], "chunk_tokens": [None, 4], "weight_dtype": "like"}
OF_HEAD |= {"token_layout": ["contiguous", "transposed"]}
row("token_stats", "kept tokens", **KEPT, tokens=9, vocabulary=400, spread=1.5, dtype=DTYPES)
row("linear_token_stats", "kept tokens", **KEPT, **OF_HEAD, tokens=9, vocabulary=400, dtype=FLOATS)

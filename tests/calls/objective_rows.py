"""Rows of the table for every field of an objective: from log-probabilities, logits, hidden states.

Log-probabilities may be exactly on bounds.
"""

from math import inf

from .combined import each
from .row_options import Table

ROWS = Table()

CORRECTIONS = [
    {"kind": kind, "level": level, "low": 0.7, "high": 1.3}
    for kind in ("truncate", "mask", "filter")
    for level in ("token", "sequence", "geometric")
]
REJECTIONS = [
    {"kind": "filter", "level": level, "estimator": estimator, "low": low, "high": high}
    for level in ("token", "sequence", "geometric", "max")
    for estimator, low, high in (
        ("k1", -0.1, 0.1),
        ("k2", 0.0, 0.02),
        ("k3", 0.001, 0.02),
        ("reverse-k3", 0.0, 0.02),
    )
]
COUNTED = [
    ("seq-mean-token-mean", {}),
    ("seq-mean-token-sum", {}),
    ("seq-mean-token-sum-norm", {"length_norm": 9.0}),
]
OWN_AGGREGATIONS = [
    {"kl_aggregation": "token-sum"},
    {"entropy_aggregation": "seq-mean-token-sum", "count_empty": True},
    {
        "aggregation": "seq-mean-token-mean",
        "kl_aggregation": "token-mean",
        "entropy_aggregation": "seq-mean-token-sum-norm",
        "length_norm": 7.0,
    },
    {
        "kl_aggregation": "token-mean",
        "rollout_correction": CORRECTIONS[:1],
        "aggregation": "seq-mean-token-mean",
    },
]
OPTIONS = [
    *({"clip_low": low, "clip_high": high} for low, high in ((0, 0), (0.1, 0.3), (1, 0.05))),
    {"dual_clip": 1.2},
    {"dual_clip": 1.2, "clip_high": 0.05},
    {"delta": 1.4},
    {"delta": 1.4, "dual_clip": 1.5},
    {"log_ratio_clamp": 0.15},
    {"surrogate": "cispo", "clip_low": 0.1, "clip_high": 0.2},
    {"surrogate": "cispo", "log_ratio_clamp": 0.15},
    {"surrogate": "cispo", "level": "sequence", "clip_low": 0.01, "clip_high": 0.02},
    {"surrogate": "sapo", "sapo_temperature_pos": 3.0, "sapo_temperature_neg": 5.0},
    {"surrogate": "sapo", "level": "sequence"},
    {"surrogate": "sapo", "log_ratio_clamp": 0.2},
    {"surrogate": "gmpo", "level": "sequence", "clip_low": 0.1, "clip_high": 0.2},
    {"surrogate": "gmpo", "level": "sequence", "log_ratio_clamp": 0.15},
    {"surrogate": "gmpo", "level": "sequence", "clip_low": 0.0, "clip_high": 0.0},
    {"level": "sequence", "clip_low": 0.05, "clip_high": 0.1},
    {"level": "sequence", "log_ratio_clamp": 0.05},
    {"level": "sequence", "dual_clip": 1.05},
    *(
        {"level": "sequence-token", **more}
        for more in (
            {"clip_low": 0.05, "clip_high": 0.1},
            {"surrogate": "cispo", "clip_low": 0.01, "clip_high": 0.02},
            {"surrogate": "sapo", "kl_coef": 0.3, "kl_gradient": "bias-corrected"},
            {"log_ratio_clamp": (-0.1, 0.05), "entropy_coef": 0.1},
        )
    ),
    *({"log_ratio_clamp": bounds} for bounds in ((-0.1, 0.3), (-inf, 0.1), (-0.2, inf))),
    {"level": "sequence", "log_ratio_clamp": (-0.02, 10)},
    {"surrogate": "gmpo", "level": "sequence", "log_ratio_clamp": (-0.1, 0.2)},
    *(
        {"kl_coef": 0.3, "kl_estimator": name, "kl_gradient": gradient, **more}
        for name in ("k1", "k2", "k3", "abs")
        for gradient in ("straight-through", "bias-corrected")
        for more in ({}, {"kl_clamp": 0.05})
    ),
    *(
        {"kl_coef": 0.3, "kl_gradient": "bias-corrected", **more}
        for more in (
            {"level": "sequence", "entropy_coef": 0.1},
            {"level": "sequence", "surrogate": "cispo"},
            {"level": "sequence", "log_ratio_clamp": 0.05},
            {"surrogate": "reinforce", "kl_estimator": "k1"},
            {"surrogate": "sapo"},
            {"log_ratio_clamp": 0.15, "rollout_correction": CORRECTIONS[:1]},
        )
    ),
    {"surrogate": "gmpo", "level": "sequence", "kl_coef": 0.3, "kl_gradient": "straight-through"},
    *({"kl_coef": 0.3, "kl_estimator": name} for name in ("k1", "k2", "k3", "abs")),
    *({"kl_coef": 0.3, "kl_estimator": e, "kl_clamp": 0.2} for e in ("k1", "k2", "k3", "abs")),
    {"surrogate": "gmpo", "level": "sequence", "kl_coef": 0.5},
    {"entropy_coef": 0.1},
    {"entropy_coef": -0.1},
    {"entropy_coef": 0.1, "kl_coef": 0.2, "surrogate": "reinforce"},
    {"entropy_coef": 0.1, "level": "sequence", "kl_coef": 0.2},
    *({"rollout_correction": [c]} for c in CORRECTIONS),
    *({"rollout_correction": [c], "entropy_coef": 0.2, "kl_coef": 0.1} for c in CORRECTIONS),
    *({"rollout_correction": [c], "kl_coef": 0.1, "rollout_weighs": "policy"} for c in CORRECTIONS),
    {"rollout_correction": [CORRECTIONS[-1], CORRECTIONS[0]], "kl_coef": 0.2},
    {"rollout_correction": [CORRECTIONS[1], {"high": inf}], "rollout_weighs": "policy"},
    *({"off_policy_threshold": bound, "kl_coef": 0.2} for bound in (0.0, 0.1)),
    {"off_policy_threshold": -0.05, "rollout_correction": CORRECTIONS[:1], "level": "sequence"},
    *({"rollout_correction": [one], "kl_coef": 0.1} for one in REJECTIONS),
    *(
        {"trust_region": {"kind": kind, "high": high, **low}, "clip_high": None, **more}
        for kind, high, low in (("tv", 0.03, {}), ("kl", 0.02, {"low": 0.005}), ("m2", 0.02, {}))
        for more in ({"kl_coef": 0.2}, {"surrogate": "sapo"} | {"clip_high": 0.2})
    ),
    *(
        {
            "surrogate": "reinforce",
            "gamma_weights": {"k_pos": 0.0, "k_neg": 1.5, "lambda_pos": 0.5},
            **more,
        }
        for more in ({"kl_coef": 0.1}, {"rollout_correction": [CORRECTIONS[0], REJECTIONS[1]]})
    ),
    *({"top_entropy_quantile": share, "kl_coef": 0.2} for share in (0.25, 0.5)),
    {"top_entropy_quantile": 0.25, "entropy_coef": 0.1, "level": "sequence"},
    {"top_entropy_quantile": 0.5, "entropy_coef": 0.1, "entropy_aggregation": "token-mean"},
    {
        "top_entropy_quantile": 0.5,
        "entropy_coef": 0.1,
        "entropy_aggregation": "seq-mean-token-mean",
        "off_policy_threshold": 0.0,
    },
    *({"kl_coef": 0.2, "entropy_coef": 0.1, **own} for own in OWN_AGGREGATIONS),
    *({"aggregation": name, "count_empty": True, **norm} for name, norm in COUNTED),
    {"rollout_correction": CORRECTIONS[1:2], "level": "sequence"},
    {"rollout_correction": CORRECTIONS[3:4], "surrogate": "gmpo", "level": "sequence"},
]


def with_inputs(fields, distances):
    """The options of cases that have these fields, with the inputs that they need."""
    weighed, sampled = "rollout_correction" in fields, "off_policy_threshold" in fields
    return each(
        fields=fields,
        old=[None, *distances],
        ref="near" if "kl_coef" in fields else None,
        rollout=[None] * (not weighed) + distances * (weighed or sampled),
    )


FORMS = {
    "policy_loss": {"entropy": True},
    "logits_policy_loss": {"vocabulary": 23, "spread": 2.0},
    "linear_policy_loss": {"vocabulary": 23, "hidden": 4, "chunk_tokens": 3},
}


for function, inputs in FORMS.items():
    distances = ["near", "bounds"] if function == "policy_loss" else ["near"]
    for layout in ("padded", "cut"):
        for half in range(2):  # of a length that a test may have
            ROWS.row(
                function,
                f"options, {layout} {half}",
                **inputs,
                sequences=4,
                tokens=6,
                mask="without-first",
                layout=layout,
                some=8 if function == "policy_loss" else 4,
                also=[one for x in OPTIONS[half::2] for one in with_inputs(x, distances)],
            )

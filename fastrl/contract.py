"""What crosses from Python to C++, CUDA and Triton, declared once and read by name on every side.

The kinds are numbered in the order in which they stand here. The fields of the named tuples become
arguments and results of the registered operators (`fastrl/library.py`), fields of the tuples that
the Triton kernels take, and fields of the structs in `csrc/contract.h`, which
`tests/contract/test_contract.py` compares with these.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from torch import Tensor

Surrogate = Literal["ppo_clip", "cispo", "sapo", "gmpo", "reinforce"]
Level = Literal["token", "sequence", "sequence-token"]
KlEstimator = Literal["k1", "k2", "k3", "abs"]
KlGradient = Literal["exact", "straight-through", "bias-corrected"]
Aggregation = Literal[
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "token-sum",
    "prompt-mean",
]
Baseline = Literal["mean", "leave_one_out", "none"]
Scale = Literal["group", "batch", "none"]
Singleton = Literal["zero", "raw"]

SURROGATES: tuple[str, ...] = get_args(Surrogate)
LEVELS: tuple[str, ...] = get_args(Level)
KL_ESTIMATORS: tuple[str, ...] = get_args(KlEstimator)
KL_GRADIENTS: tuple[str, ...] = get_args(KlGradient)
AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)
BASELINES: tuple[str, ...] = get_args(Baseline)
SCALES: tuple[str, ...] = get_args(Scale)
SINGLETONS: tuple[str, ...] = get_args(Singleton)

#: The kinds by the name of their C++ enum.
KINDS = {
    "Surrogate": SURROGATES,
    "Level": LEVELS,
    "KlEstimator": KL_ESTIMATORS,
    "KlGradient": KL_GRADIENTS,
    "Aggregation": AGGREGATIONS,
    "Baseline": BASELINES,
    "Scale": SCALES,
    "Singleton": SINGLETONS,
}


class Coefficients(NamedTuple):
    """The scalars of an objective; a bound that is not set is infinite."""

    clip_low: float
    clip_high: float
    dual_clip: float
    delta: float
    sapo_temperature_pos: float
    sapo_temperature_neg: float
    kl_coef: float
    kl_clamp: float
    log_ratio_low: float  # distance of the lower bound of the log-ratio from 0
    log_ratio_high: float
    entropy_coef: float


class ObjectiveArguments(NamedTuple):
    """An objective as the operators take it: its kinds, numbered, and its scalars."""

    surrogate: int
    level: int
    kl_estimator: int
    kl_gradient: int
    coefficients: Coefficients


class LossArguments(NamedTuple):
    """The constants of a policy loss. "Constant" is float32 `[S]`, per sequence, or `[B, T]`.

    A packed batch is `[1, N]`, cut into S sequences by `cu_seqlens`; without it S = 1.
    """

    advantages: Tensor  # constant
    weights: Tensor  # constant: of a valid token in every term that has none of its own
    kl_weights: Tensor | None  # constant
    entropy_weights: Tensor | None  # constant
    policy_weights: Tensor | None  # constant: factors on the policy term alone
    old_logprobs: Tensor | None  # [B, T]
    ref_logprobs: Tensor | None  # [B, T]
    cu_seqlens: Tensor | None  # int32 [S + 1]


class AggregationArguments(NamedTuple):
    """How the tokens of one term are averaged; see `fastrl.token_weights`."""

    aggregation: int
    normalizer: float  # the global denominator; 0: the local count
    normalizer_tensor: Tensor | None  # the same as a float32 tensor of one element, or None
    length_norm: float  # 0: the padded width T
    count_empty: bool
    group_size: int  # sequences of a group in prompt-mean; 0: by group_ids
    group_ids: Tensor | None  # int64 [S]


class RowArguments(NamedTuple):
    """What accompanies logits `[B, T, V]`."""

    token_ids: Tensor  # int64 [B, T]
    mask: Tensor | None  # [B, T], bool or 0/1 of another dtype; None: every row counts
    ignore_index: int  # a row with this id does not count
    temperatures: Tensor | None  # float32 [B, T], in place of `temperature`
    temperature: float
    logit_scale: float
    logit_softcap: float  # 0: none


class RowStats(NamedTuple):
    """The statistics of rows of logits, `[B, T]`; 0 in rows that do not count."""

    logprobs: Tensor
    entropy: Tensor
    logsumexp: Tensor
    sum_sq_probs: Tensor
    is_top1: Tensor  # bool
    row_max: Tensor  # the largest logit, for the backward
    log_sum: Tensor  # log of the sum of exponentials relative to it, for the backward


class Metrics(NamedTuple):
    """The metrics of a policy loss: one vector on the device, in this order."""

    policy_loss: float
    kl: float
    kl_old: float
    entropy: float
    ratio_mean: float
    ratio_max: float
    ratio_min: float
    clip_low: float
    clip_high: float
    clip_fraction: float
    active_tokens: float
    zero_grad_fraction: float


METRICS = Metrics._fields

"""Enums, arguments and results that Python shares with C++, CUDA and Triton.

A member of an enum is passed as its index in the lists below. The fields of the named tuples are
the arguments and results of the registered operators (`fastrl/library.py`), of the tuples that
Triton kernels take, and of the structs in `csrc/contract.h`; everything is accessed by field name.
`tests/contract/test_contract.py` compares the two declarations.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor

Surrogate = Literal["ppo_clip", "cispo", "sapo", "gmpo", "reinforce"]
Level = Literal["token", "sequence", "sequence-token"]
KlEstimator = Literal["k1", "k2", "k3", "abs"]
KlGradient = Literal["exact", "straight-through", "bias-corrected"]
KlLevel = Literal["token", "policy"]
Aggregation = Literal[
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "token-sum",
    "prompt-mean",
]
Baseline = Literal["mean", "leave_one_out", "none"]
Scale = Literal["group", "batch", "none", "mean"]
Singleton = Literal["zero", "raw"]

SURROGATES: tuple[str, ...] = get_args(Surrogate)
LEVELS: tuple[str, ...] = get_args(Level)
KL_ESTIMATORS: tuple[str, ...] = get_args(KlEstimator)
KL_GRADIENTS: tuple[str, ...] = get_args(KlGradient)
KL_LEVELS: tuple[str, ...] = get_args(KlLevel)
AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)
BASELINES: tuple[str, ...] = get_args(Baseline)
SCALES: tuple[str, ...] = get_args(Scale)
SINGLETONS: tuple[str, ...] = get_args(Singleton)

#: The members of each enum, by its name in C++.
KINDS = {
    "Surrogate": SURROGATES,
    "Level": LEVELS,
    "KlEstimator": KL_ESTIMATORS,
    "KlGradient": KL_GRADIENTS,
    "KlLevel": KL_LEVELS,
    "Aggregation": AGGREGATIONS,
    "Baseline": BASELINES,
    "Scale": SCALES,
    "Singleton": SINGLETONS,
}


class Coefficients(NamedTuple):
    """The scalars of an objective; a disabled bound is infinite."""

    clip_low: float
    clip_high: float
    dual_clip: float
    delta: float
    sapo_temperature_pos: float
    sapo_temperature_neg: float
    kl_coef: float
    kl_clamp: float
    log_ratio_low: float  # the lower bound of the log-ratio is -log_ratio_low
    log_ratio_high: float
    entropy_coef: float


class ObjectiveArguments(NamedTuple):
    """An objective in the form that operators take: enum members as integers, and scalars."""

    surrogate: int
    level: int
    kl_estimator: int
    kl_gradient: int
    kl_level: int  # of the ratio in a bias-corrected KL
    coefficients: Coefficients

    def kl_by_token(self) -> bool:
        """Return whether the KL of a token depends on no other token."""
        corrected = KL_GRADIENTS[self.kl_gradient] == "bias-corrected"
        of_policy = KL_LEVELS[self.kl_level] == "policy" and LEVELS[self.level] != "token"
        return not (corrected and of_policy)

    def flat(self) -> tuple[Any, ...]:
        """Return the arguments of an operator, in a plain list for `torch.compile` of 2.10."""
        return (*self[:-1], [*self.coefficients])


class LossArguments(NamedTuple):
    """The inputs of a policy loss that have no gradient.

    A constant is float32, `[S]` per sequence or `[B, T]` per token. A packed batch is `[1, N]`,
    split into S sequences by `cu_seqlens`; without `cu_seqlens` it is one sequence.
    """

    advantages: Tensor  # constant
    weights: Tensor  # constant; for active tokens in all terms without separate weights
    kl_weights: Tensor | None  # constant
    entropy_weights: Tensor | None  # constant
    policy_weights: Tensor | None  # constant; further factors in the policy term only
    old_logprobs: Tensor | None  # [B, T]
    ref_logprobs: Tensor | None  # [B, T]
    cu_seqlens: Tensor | None  # int32 [S + 1]


class AggregationArguments(NamedTuple):
    """How the tokens of one term are averaged; see `fastrl.token_weights`."""

    aggregation: int
    normalizer: float  # global denominator; 0 means the local count
    normalizer_tensor: Tensor | None  # one element, any real dtype; replaces `normalizer`
    length_norm: float  # 0 means the padded width T
    count_empty: bool
    group_size: int  # consecutive sequences per group in prompt-mean; 0: see group_ids
    group_ids: Tensor | None  # int64 [S]


class ScalingArguments(NamedTuple):
    """z = softcap(logit_scale * logits) / temperature."""

    temperatures: Tensor | None  # float32 [B, T]: replaces `temperature`
    temperature: float
    logit_scale: float
    logit_softcap: float  # 0: no softcap


class RowArguments(NamedTuple):
    """The inputs that accompany logits `[B, T, V]`."""

    token_ids: Tensor  # int64 [B, T]
    mask: Tensor | None  # [B, T], 0/1 of any dtype; None: every row is active
    ignore_index: int  # a row with this id is inactive
    temperatures: Tensor | None  # these are the fields of `ScalingArguments`
    temperature: float
    logit_scale: float
    logit_softcap: float

    def scaling(self) -> ScalingArguments:
        """Return how logits are scaled."""
        values = self.temperatures, self.temperature, self.logit_scale, self.logit_softcap
        return ScalingArguments(*values)


class SoftmaxStats(NamedTuple):
    """The statistics of a row, `[B, T]`, that its probabilities and its gradient need."""

    row_max: Tensor  # the largest logit
    log_sum: Tensor  # log sum exp(logit - row_max)
    entropy: Tensor


class RowStats(NamedTuple):
    """Statistics of rows of logits, `[B, T]`; 0 in inactive rows."""

    logprobs: Tensor
    entropy: Tensor
    logsumexp: Tensor
    sum_sq_probs: Tensor
    is_top1: Tensor
    row_max: Tensor  # the largest logit, for the backward
    log_sum: Tensor  # log sum exp(logit - row_max), for the backward

    def of_softmax(self) -> SoftmaxStats:
        """Return what a backward needs."""
        return SoftmaxStats(self.row_max, self.log_sum, self.entropy)


class TeacherStats(NamedTuple):
    """The results of a comparison with a teacher's rows, `[B, T]`; 0 in inactive rows."""

    divergence: Tensor
    teacher_entropy: Tensor
    agrees: Tensor  # the same token is the most probable


class CenteringStats(NamedTuple):
    """What score centering finds for each row, `[B, T]`; 0 in inactive rows."""

    term: Tensor  # its gradient is the sampler's expected score
    mass: Tensor  # the sampler's probability of the tokens that are known
    head_kl: Tensor  # the KL of the sampler from the policy, with all other tokens as one event


#: The statistics that are bool.
FLAGS = ("is_top1", "agrees")


class SavedStats(NamedTuple):
    """The inputs of a backward: some statistics, and the slopes of those with a gradient."""

    row_max: Tensor
    log_sum: Tensor
    entropy: Tensor
    grad_logprobs: Tensor | None
    grad_entropy: Tensor | None
    grad_logsumexp: Tensor | None

    def of_softmax(self) -> SoftmaxStats:
        """Return the statistics."""
        return SoftmaxStats(self.row_max, self.log_sum, self.entropy)

    def slopes(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the slopes."""
        return self.grad_logprobs, self.grad_entropy, self.grad_logsumexp


class Metrics(NamedTuple):
    """The metrics of a policy loss, in the order of the vector on the device."""

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

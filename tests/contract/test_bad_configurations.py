"""Configurations that would silently train something else: each is refused by name."""

import pytest
import torch
from test_bad_input import cases, refuses

import fastrl
from fastrl import Objective, RolloutCorrection

ones, zeros = torch.ones, torch.zeros
packed = {"logprobs": zeros(5), "advantages": zeros(5), "mask": ones(5)}
apart = Objective(kl_coef=0.1, kl_aggregation="token-sum", aggregation="seq-mean-token-mean")


def preset(name, convention="fastrl", **changes):
    return lambda: Objective.preset(name, convention=convention, **changes)


def loss(objective="grpo", **changes):
    inputs = {"logprobs": zeros(2, 3), "advantages": zeros(2), "mask": ones(2, 3), **changes}
    return lambda: fastrl.policy_loss(**inputs, objective=objective)


def squared(logprobs, old_logprobs, ref_logprobs, advantages):
    return (logprobs - advantages) ** 2


REFUSED = [
    # a trainer's name for what it does not have
    (preset("luspo", "verl"), "convention 'verl' has no luspo; it has cispo"),
    (preset("grpo", "TRL"), "convention must be one of fastrl, trl, verl, openrlhf; got 'TRL'"),
    (
        lambda: fastrl.group_advantages(zeros(2), group_size=2, convention="grpo"),
        "convention must be one of fastrl, trl, verl, openrlhf; got 'grpo'",
    ),
    # options that have no meaning together
    (preset("gmpo", kl_gradient="bias-corrected"), "kl_gradient must not be 'bias-corrected' with"),
    (
        preset("gmpo", top_entropy_quantile=0.2),
        "top_entropy_quantile must be 1 with surrogate gmpo",
    ),
    (
        preset("gmpo", level="sequence-token"),
        "level must be 'sequence' with surrogate gmpo, got 'seq",
    ),
    (
        preset("reinforce", level="sequence"),
        "level must be 'token' with surrogate reinforce, got 'seq",
    ),
    (preset("cispo", "verl", dual_clip=3.0), "dual_clip has no effect with surrogate cispo"),
    (preset("dapo", delta=1.25), "delta must be above 1 + clip_high = 1.28, got 1.25"),
    (preset("ppo", count_empty=True), "count_empty has no effect with aggregation token-mean"),
    (preset("ppo", log_ratio_clamp=(0.1, 5.0)), "log_ratio_clamp must be (low, high) with low < 0"),
    (
        lambda: RolloutCorrection(kind="mask", high=float("inf")),
        "rollout_correction.kind mask has no effect without a bound",
    ),
    # options whose inputs are missing, and inputs that nothing looks at
    (loss(Objective(kl_coef=0.1)), "ref_logprobs is needed when objective.kl_coef is above 0"),
    (loss(Objective(entropy_coef=0.1)), "entropy is needed when objective.entropy_coef is not 0"),
    (
        loss(Objective(top_entropy_quantile=0.2)),
        "entropy is needed when objective.top_entropy_quantile is below 1",
    ),
    (
        loss(Objective(rollout_correction=RolloutCorrection())),
        "rollout_logprobs is needed when objective.rollout_correction is set",
    ),
    (
        loss(rollout_logprobs=zeros(2, 3)),
        "rollout_logprobs has no effect unless objective.rollout_correction or",
    ),
    (
        loss(Objective.preset("gspo", aggregation="token-mean"), **packed),
        "cu_seqlens is needed for sequence-level ratios of packed tokens",
    ),
    (
        loss(Objective(off_policy_threshold=0.1), **packed),
        "cu_seqlens is needed for sequence-level ratios of packed tokens",
    ),
    # denominators
    (
        loss(apart, ref_logprobs=zeros(2, 3), normalizer=8.0),
        "normalizer must be a mapping with keys among policy, kl",
    ),
    (
        loss(apart, ref_logprobs=zeros(2, 3), normalizer={"entropy": 8.0}),
        "normalizer must have keys among the terms ... policy, kl; got 'entropy'",
    ),
    (
        loss(Objective(aggregation="token-sum"), normalizer=8.0),
        "normalizer has no effect with aggregation token-sum",
    ),
    (
        loss(policy_weights=zeros(2, 1)),
        "policy_weights must have shape (2, 3) or (2,), got (2, 1)",
    ),
    # what a backend cannot do
    (loss(squared, backend="cpu"), "backend 'cpu' cannot do this call"),
]


@pytest.mark.parametrize(("call", "message"), cases(REFUSED))
def test_it_is_refused_by_name(call, message):
    refuses(call, ValueError, message)


def test_the_table_is_long_enough():
    assert len(REFUSED) >= 15

"""NeMo RL's `ClippedPGLossFn` as an `Objective`, as `docs/conventions.md` says."""

import math

import pytest
import torch

import fastrl
from fastrl import Objective, RolloutCorrection
from tests.integrations.nemo_rl_formulas import clipped_pg_loss
from tests.integrations.packages import importable

LOSSES = "nemo_rl.algorithms.loss.loss_functions"


def samples(B=6, T=9, spread=0.3):
    """A batch as `ClippedPGLossFn` takes it: T log-probabilities for T + 1 tokens."""
    torch.manual_seed(2)
    token_mask = (torch.rand(B, T + 1) < 0.7).double()
    token_mask[:, 1] = 1.0
    old = -torch.rand(B, T + 1).double() - 0.5
    near = [old + spread * torch.randn(B, T + 1).double() for _ in range(3)]
    sample_mask = torch.ones(B).double()
    sample_mask[4] = 0.0
    data = {
        "input_ids": torch.zeros(B, T + 1).long(),
        "token_mask": token_mask,
        "sample_mask": sample_mask,
        "advantages": torch.randn(B, T + 1).double(),
        "prev_logprobs": old,
        "generation_logprobs": near[0],
        "reference_policy_logprobs": near[1],
        "rewards": torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 0.0]),
    }
    return near[2][:, 1:], data


def on_fastrl(logprobs, data, mean, nll=0.0, kl=None, sampled=None, **options):
    """The loss with these options of `Objective`, a second objective for the KL, and for NLL."""
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    old, A, count = data["prev_logprobs"][:, 1:], data["advantages"][:, 1:], {"normalizer": mean}
    generation = data["generation_logprobs"][:, 1:]
    given = {"old_logprobs": None if sampled == "by the policy" else old}
    if "rollout_correction" in options:
        given["rollout_logprobs"] = generation
    objective = Objective(**options)
    loss = fastrl.policy_loss(logprobs, A, mask, **given, **count, objective=objective).loss
    if kl:
        rest = {"kl_gradient": "bias-corrected", "aggregation": objective.aggregation}
        loss += fastrl.policy_loss(
            logprobs,
            torch.zeros_like(A),
            mask,
            old_logprobs=generation if sampled == "by the engine" else None,
            ref_logprobs=data["reference_policy_logprobs"][:, 1:],
            objective=Objective(surrogate="reinforce", kl_coef=0.1, kl_estimator=kl, **rest),
            **count,
        ).loss
    if nll:
        right, ones = mask * (data["rewards"] > 0)[:, None], torch.ones(len(mask)).double()
        loss += nll * fastrl.policy_loss(logprobs, ones, right, objective="reinforce").loss
    return loss


def corrected(kind=None, **bounds):
    """NeMo RL's options of the correction for the engine that sampled."""
    names = {"low": "truncated_importance_sampling_ratio_min"}
    names["high"] = "truncated_importance_sampling_ratio"
    found = {names[name]: bound for name, bound in bounds.items()}
    found["truncated_importance_sampling_type"] = kind
    return {**found, "use_importance_sampling_correction": True}


KL = {"reference_policy_kl_penalty": 0.1}
SEQUENCES = {"token_level_loss": False, "sequence_level_importance_ratios": True}
BOUNDS, MEANS = {"low": 0.8, "high": 1.2}, {"aggregation": "seq-mean-token-mean"}
FREE, FILTER = RolloutCorrection(high=math.inf), {"kind": "filter", "level": "geometric"}
#: name -> NeMo RL's options, and those of the function above
CASES = {
    "ppo": ({"ratio_clip_max": 0.28}, {"clip_high": 0.28}),
    "dual clip": ({"ratio_clip_c": 1.5}, {"dual_clip": 1.5}),
    "mean over sequences": ({"token_level_loss": False}, MEANS),
    "gspo": (
        {**SEQUENCES, "ratio_clip_min": 0.03, "ratio_clip_max": 0.04},
        {**MEANS, "level": "sequence", "clip_low": 0.03, "clip_high": 0.04},
    ),
    "reinforce": ({"disable_ppo_ratio": True}, {"surrogate": "reinforce"}),
    "on policy": ({"force_on_policy_ratio": True}, {"sampled": "by the policy"}),
    "cispo": ({"use_cispo": True}, {"surrogate": "cispo"}),
    "k1": ({**KL, "reference_policy_kl_type": "k1"}, {"kl": "k1"}),
    "k2": ({**KL, "reference_policy_kl_type": "k2"}, {"kl": "k2"}),
    "k3": ({**KL, "token_level_loss": False}, {**MEANS, "kl": "k3"}),
    "kl approximation": (
        {**KL, "use_on_policy_kl_approximation": True},
        {"kl": "k3", "sampled": "by the engine"},
    ),
    "correction": (corrected(), {"rollout_correction": FREE}),
    "tis": (
        corrected("tis", high=1.2),
        {"rollout_correction": RolloutCorrection(kind="truncate", low=0.0, high=1.2)},
    ),
    "icepop": (
        corrected("icepop", **BOUNDS),
        {"rollout_correction": RolloutCorrection(kind="mask", **BOUNDS)},
    ),
    "seq-mask-tis": (
        corrected("seq-mask-tis", **BOUNDS),
        {"rollout_correction": (RolloutCorrection(**FILTER, **BOUNDS), FREE)},
    ),
    "gspo, corrected": (
        {**corrected(), **SEQUENCES},
        {
            **MEANS,
            "level": "sequence",
            "rollout_correction": RolloutCorrection(level="sequence", high=math.inf),
        },
    ),
    "positive examples": ({"positive_example_nll_weight": 0.3}, {"nll": 0.3}),
}


def of_package(logprobs, data, sequences, tokens, **options):
    losses = importable(LOSSES)
    options = {"reference_policy_kl_penalty": 0.0, **options}
    function = losses.ClippedPGLossFn(losses.ClippedPGLossConfig(**options))
    return function(logprobs, data, torch.tensor(sequences), torch.tensor(tokens))[0]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("theirs", [clipped_pg_loss, *([of_package] if importable(LOSSES) else [])])
def test_the_loss_as_an_objective(theirs, case):
    (options, own), found = CASES[case], []
    mean = 70.0 if options.get("token_level_loss", True) else 11.0
    for function in (
        lambda x, data: on_fastrl(x, data, mean, **own),
        lambda x, data: theirs(x, data, 11.0, 70.0, **options),
    ):
        logprobs, data = samples()
        loss = function(logprobs.requires_grad_(), data)
        loss.backward()
        found.append((loss.detach(), logprobs.grad))
    torch.testing.assert_close(*found, rtol=1e-7, atol=1e-9)

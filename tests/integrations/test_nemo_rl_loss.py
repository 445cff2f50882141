"""NeMo RL's `ClippedPGLossFn` as an `Objective`, as `docs/losses.md` says."""

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


def correction(o):
    """Return `rollout_correction` for NeMo RL's options, None without one."""
    if not o.get("use_importance_sampling_correction"):
        return None
    kind = o.get("truncated_importance_sampling_type")
    level = "sequence" if o.get("sequence_level_importance_ratios") else "token"
    bounds = {
        "low": o.get("truncated_importance_sampling_ratio_min") or 0.0,
        "high": o.get("truncated_importance_sampling_ratio", math.inf),
    }
    plain = RolloutCorrection(level=level, high=math.inf)
    if kind == "seq-mask-tis":
        return RolloutCorrection(kind="filter", level="geometric", **bounds), plain
    if kind is None:
        return plain
    return RolloutCorrection(kind="mask" if kind == "icepop" else "truncate", level=level, **bounds)


def on_fastrl(logprobs, data, sequences, tokens, **o):
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    by_token = o.get("token_level_loss", True)
    rest = {"aggregation": "token-mean" if by_token else "seq-mean-token-mean"}
    count = {"normalizer": tokens if by_token else sequences}
    surrogate = {"level": "sequence"} if o.get("sequence_level_importance_ratios") else {}
    surrogate |= {"clip_low": o.get("ratio_clip_min", 0.2), "dual_clip": o.get("ratio_clip_c")}
    surrogate["clip_high"] = o.get("ratio_clip_max", 0.2)
    if o.get("use_cispo"):
        surrogate["surrogate"] = "cispo"
    if o.get("disable_ppo_ratio"):
        surrogate = {"surrogate": "reinforce"}
    old, generation = data["prev_logprobs"][:, 1:], data["generation_logprobs"][:, 1:]
    given = {"old_logprobs": None if o.get("force_on_policy_ratio") else old}
    corrected = correction(o)
    if corrected:
        given["rollout_logprobs"] = generation
    objective = Objective(**surrogate, **rest, rollout_correction=corrected)
    advantages = data["advantages"][:, 1:]
    loss = fastrl.policy_loss(
        logprobs, advantages, mask, **given, **count, objective=objective
    ).loss
    if o.get("reference_policy_kl_penalty"):
        penalty = Objective(
            surrogate="reinforce",
            kl_coef=o["reference_policy_kl_penalty"],
            kl_estimator=o.get("reference_policy_kl_type", "k3"),
            kl_gradient="bias-corrected",
            **rest,
        )
        loss += fastrl.policy_loss(
            logprobs,
            torch.zeros_like(advantages),
            mask,
            old_logprobs=generation if o.get("use_on_policy_kl_approximation") else None,
            ref_logprobs=data["reference_policy_logprobs"][:, 1:],
            objective=penalty,
            **count,
        ).loss
    if o.get("positive_example_nll_weight"):
        right = mask * (data["rewards"] > 0)[:, None]
        ones = torch.ones(len(mask), dtype=logprobs.dtype)
        positive = fastrl.policy_loss(logprobs, ones, right, objective="reinforce").loss
        loss += o["positive_example_nll_weight"] * positive
    return loss


CORRECTED = {"use_importance_sampling_correction": True}
TRUNCATED = {**CORRECTED, "truncated_importance_sampling_ratio": 1.2}
BOUNDED = {**TRUNCATED, "truncated_importance_sampling_ratio_min": 0.8}
SEQUENCES = {"token_level_loss": False, "sequence_level_importance_ratios": True}
KL = {"reference_policy_kl_penalty": 0.1}
CASES = {
    "ppo": {"ratio_clip_max": 0.28},
    "dual clip": {"ratio_clip_c": 1.5},
    "mean over sequences": {"token_level_loss": False},
    "gspo": {**SEQUENCES, "ratio_clip_min": 0.03, "ratio_clip_max": 0.04},
    "reinforce": {"disable_ppo_ratio": True},
    "on policy": {"force_on_policy_ratio": True},
    "cispo": {"use_cispo": True},
    "k1": {**KL, "reference_policy_kl_type": "k1"},
    "k2": {**KL, "reference_policy_kl_type": "k2"},
    "k3": {**KL, "token_level_loss": False},
    "kl approximation": {**KL, "use_on_policy_kl_approximation": True},
    "correction": CORRECTED,
    "tis": {**TRUNCATED, "truncated_importance_sampling_type": "tis"},
    "icepop": {**BOUNDED, "truncated_importance_sampling_type": "icepop"},
    "seq-mask-tis": {**BOUNDED, "truncated_importance_sampling_type": "seq-mask-tis"},
    "gspo, corrected": {**CORRECTED, **SEQUENCES},
    "positive examples": {"positive_example_nll_weight": 0.3},
}


def of_package(logprobs, data, sequences, tokens, **options):
    losses = importable(LOSSES)
    options = {"reference_policy_kl_penalty": 0.0, **options}
    function = losses.ClippedPGLossFn(losses.ClippedPGLossConfig(**options))
    return function(logprobs, data, torch.tensor(sequences), torch.tensor(tokens))[0]


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@pytest.mark.parametrize("theirs", [clipped_pg_loss, *([of_package] if importable(LOSSES) else [])])
def test_the_loss_as_an_objective(theirs, options):
    found = []
    for function in (on_fastrl, theirs):
        logprobs, data = samples()
        loss = function(logprobs.requires_grad_(), data, 11.0, 70.0, **options)
        loss.backward()
        found.append((loss.detach(), logprobs.grad))
    torch.testing.assert_close(*found, rtol=1e-7, atol=1e-9)

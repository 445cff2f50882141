"""What verl's functions on fastrl refuse, by the name of the argument."""

import pytest
import torch

from fastrl.integrations import verl
from fastrl.integrations.verl.fused_linear import FusedLinearForPPO, linear_cross_entropy
from tests.integrations.verl.cases import (
    COUNTS,
    INDEX,
    LOSSES,
    OURS,
    batch,
    estimate,
    fused_inputs,
    policy_loss,
    transcribed,
)

X = torch.ones(2, 3)
HIDDEN = fused_inputs(5, 16, 33)[:3]


def estimated(case, **options):
    more = {"non_tensor_batch": {"x": [0.0] * 9}, "batch": {}} if case == "gdpo" else {}
    return estimate(OURS, case, batch("floats", B=9), **more, **options)


def lost(name, policy_loss_options=(), **fields):
    own = {**LOSSES[name].get("policy_loss", {}), **dict(policy_loss_options)}
    config = transcribed(own, global_batch_info=COUNTS["local"], **fields)
    return policy_loss(OURS, name, batch(), config)


#: the message -> a call that raises it
REFUSED = {
    "logits must be a plain .*got a nested": lambda: verl.logprobs_from_logits(
        torch.nested.nested_tensor([X, X]), X
    ),
    "loss_agg_mode must be one of .*got 'mean'": lambda: verl.agg_loss(X, X, "mean"),
    "batch_num_tokens is needed .* if dp_size > 1": lambda: verl.agg_loss(X, X, "token-mean", 2),
    "global_batch_size is needed .* if dp_size > 1": lambda: verl.agg_loss(
        X, X, "seq-mean-token-mean", 2
    ),
    "kl_penalty must be one of .*full, .*got 'k4'": lambda: verl.kl_penalty(X, X, "k4"),
    r"^logprob must be \[B, T, V\] .*got \(2, 3\).*exact": lambda: verl.kl_penalty(X, X, "full"),
    r"^ref_logprob must be \[B, T, V\] .*got \(2, 3\).*linear_policy_loss": lambda: verl.kl_penalty(
        X[None], X, "full+"
    ),
    "must have .* vocabulary of 3 like": lambda: verl.kl_penalty(X[None], X[None, :, :2], "full"),
    "lam must be finite and >= 0 and <= 1, got 1.5": lambda: estimated("gae", lam=1.5),
    "dual_clip must be above 1, got 0.5": lambda: lost("vanilla", clip_ratio_c=0.5),
    "dro_beta must be above 0 .*got None": lambda: lost("dro", {"dro_beta": None}),
    "kl_cov_ratio must be above 0": lambda: lost("kl_cov", {"kl_cov_ratio": 0.0}),
    "clip_cov_ratio must be above 0": lambda: lost("clip_cov", {"clip_cov_ratio": -1.0}),
    "index must have groups of at least 2": lambda: estimated("grpo_passk", index=INDEX),
    "gdpo_reward_keys must name the rewards": lambda: estimated("gdpo", config={}),
    "gdpo_reward_keys must be in .*x.*, got y": lambda: estimated(
        "gdpo", config={"gdpo_reward_keys": ["y"]}
    ),
    "gdpo_reward_weights must have 1 entries, .*got 2": lambda: estimated(
        "gdpo", config={"gdpo_reward_keys": ["x"], "gdpo_reward_weights": [1.0, 2.0]}
    ),
    "reduction must be one of none, sum, mean, got 'max'": lambda: linear_cross_entropy(
        *HIDDEN, 1.0, "max"
    ),
    "reduction must be a str, got NoneType": lambda: linear_cross_entropy(*HIDDEN, reduction=None),
    "vocab_group must be": lambda: linear_cross_entropy(*HIDDEN, 1.0, "none", "tp"),
    "temperature must be": lambda: FusedLinearForPPO()(*HIDDEN, temperature=0.0),
    "impl_backend must be one of torch, liger, got 'x'": lambda: FusedLinearForPPO(
        impl_backend="x"
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("message", REFUSED)
def test_unsupported_arguments(message):
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
        REFUSED[message]()


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_without_its_configuration(name):
    with pytest.raises(TypeError, match="config must be verl's ActorConfig, got None"):
        policy_loss(OURS, name, batch(), None)


@pytest.mark.parametrize("case", ["grpo_passk", "reinforce_plus_plus"])
def test_an_estimator_without_its_configuration(case):
    with pytest.raises(TypeError, match="config must be verl's AlgoConfig, got None"):
        estimated(case, config=None)

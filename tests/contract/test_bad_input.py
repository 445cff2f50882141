"""Bad arguments of policy loss and objective: errors name argument, expectation and value."""

import math
import re

import numpy as np
import pytest
import torch

import fastrl
from fastrl import Objective, RolloutCorrection
from fastrl.native import missing

nan, inf = math.nan, math.inf
ones, zeros, ids = torch.ones, torch.zeros, torch.tensor
meta = torch.zeros(2, 3, device="meta")
flat = {"logprobs": zeros(5), "mask": ones(5), "advantages": zeros(5)}
two = torch.tensor([0, 2, 5])


def cases(rows):
    """Name each case by its expected message."""
    return [pytest.param(*row, id=row[-1]) for row in rows]


def refuses(call, error, message):
    """Check that the call raises `error` with the parts of `message` in this order."""
    pattern = ".*".join(re.escape(part) for part in message.split(" ... "))
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    text = str(caught.value)
    assert re.search(pattern, text), f"{text!r} does not say {message!r}"


def loss(objective="grpo", **changes):
    inputs = {"logprobs": zeros(2, 3), "advantages": zeros(2), "mask": ones(2, 3), **changes}
    return fastrl.policy_loss(**inputs, objective=objective)


POLICY_LOSS = [
    ({"logprobs": [[0.0]]}, TypeError, "logprobs must be a tensor, got list"),
    ({"logprobs": None}, TypeError, "logprobs must be a tensor, got NoneType"),
    ({"logprobs": ones(2, 3).int()}, TypeError, "logprobs must be a floating ... got torch.int32"),
    ({"logprobs": ones(2, 3) * 1j}, TypeError, "logprobs must be a floating ... complex64"),
    ({"logprobs": ones(2, 3, 4)}, ValueError, "logprobs must have shape [B, T] or [N], got (2, 3,"),
    ({"logprobs": ones(())}, ValueError, "logprobs must have shape [B, T] or [N], got ()"),
    ({"mask": [[1]]}, TypeError, "mask must be a tensor, got list"),
    ({"mask": None}, TypeError, "mask must be a tensor, got NoneType"),
    ({"mask": ones(2, 3) * 1j}, TypeError, "mask must be bool, integer or float ... complex64"),
    ({"mask": ones(3, 2)}, ValueError, "mask must have shape (2, 3) like logprobs, got (3, 2)"),
    ({"mask": ones(2, 1)}, ValueError, "mask must have shape (2, 3) like logprobs, got (2, 1)"),
    ({"mask": meta}, ValueError, "mask must be on cpu like logprobs, got ... meta"),
    ({"mask": ones(2, 3) / 2}, ValueError, "mask must ... 0 ... 1 ... got 0.5"),
    ({"mask": ones(2, 3) * nan}, ValueError, "mask must ... 0 ... 1 ... got nan"),
    ({"mask": ids([[1, 2, 0]] * 2)}, ValueError, "mask must ... 0 ... 1 ... got 2"),
    ({"advantages": [0.0]}, TypeError, "advantages must be a tensor, got list"),
    (
        {"advantages": ones(2).long()},
        TypeError,
        "advantages must be a floating ... torch.int64",
    ),
    ({"advantages": ones(3)}, ValueError, "advantages must have shape (2, 3) or (2,), got (3,)"),
    ({"advantages": ones(2, 1)}, ValueError, "advantages must have shape ... got (2, 1)"),
    ({"advantages": meta}, ValueError, "advantages must be on cpu like logprobs, got ... meta"),
    ({"old_logprobs": ones(2)}, ValueError, "old_logprobs must have shape (2, 3) like logprobs"),
    ({"old_logprobs": 0.0}, TypeError, "old_logprobs must be a tensor, got float"),
    ({"old_logprobs": meta}, ValueError, "old_logprobs must be on cpu like logprobs, got"),
    ({"ref_logprobs": ones(2, 3).long()}, TypeError, "ref_logprobs must be a floating"),
    ({"ref_logprobs": ones(1, 3)}, ValueError, "ref_logprobs must have shape (2, 3) ... (1, 3)"),
    ({"entropy": ones(2, 1)}, ValueError, "entropy must have shape (2, 3) ... got (2, 1)"),
    ({"objective": Objective(kl_coef=0.1)}, ValueError, "ref_logprobs is needed ... kl_coef"),
    ({"objective": Objective(entropy_coef=1)}, ValueError, "entropy is needed ... entropy_coef"),
    (
        {"objective": Objective(rollout_correction=RolloutCorrection())},
        ValueError,
        "rollout_logprobs is needed ... rollout_correction",
    ),
    ({"rollout_logprobs": ones(2, 3)}, ValueError, "rollout_logprobs has no effect unless"),
    ({"objective": "gppo"}, ValueError, "objective must be one of ppo, grpo, ... got 'gppo'"),
    ({"objective": 3}, TypeError, "objective must be an Objective ... got int"),
    ({"objective": None}, TypeError, "objective must be an Objective ... got NoneType"),
    ({"objective": int}, TypeError, "objective must be an Objective ... got <class 'int'>"),
    (
        {"objective": lambda *_: ones(2)},
        ValueError,
        "objective must return ... (2, 3), got (2,)",
    ),
    ({"objective": lambda *_: 0.0}, ValueError, "objective must return ... got float"),
    *(
        ({"normalizer": value}, ValueError, f"normalizer must be ... got {value}")
        for value in (0, -1, nan, inf)
    ),
    ({"normalizer": "8"}, TypeError, "normalizer must be a number ... got str"),
    ({"normalizer": True}, TypeError, "normalizer must be a number ... got bool"),
    ({"normalizer": ones(2)}, ValueError, "normalizer must be a number or have one element, got"),
    ({"normalizer": zeros(())}, ValueError, "normalizer must be above 0, got 0"),
    ({"normalizer": meta[0, 0]}, ValueError, "normalizer must be on cpu like mask, got"),
    (
        {"normalizer": 2, "objective": Objective(aggregation="token-sum")},
        ValueError,
        "normalizer has no effect with aggregation token-sum",
    ),
    (
        {"group_size": 2},
        ValueError,
        "group_size has no effect with aggregation seq-mean",
    ),
    ({"group_ids": ids([0, 0])}, ValueError, "group_ids has no effect with aggregation"),
    ({"cu_seqlens": ids([0, 6])}, ValueError, "cu_seqlens is for packed tokens [N] ... (2, 3)"),
    # packed
    (flat, ValueError, "cu_seqlens is needed for aggregation seq-mean-token-mean of packed"),
    (
        {**flat, "objective": Objective(level="sequence")},
        ValueError,
        "cu_seqlens is needed for sequence-level ratios of packed",
    ),
    (
        {**flat, "objective": "dr_grpo", "cu_seqlens": two},
        ValueError,
        "length_norm is needed for aggregation seq-mean-token-sum-norm of packed",
    ),
    ({**flat, "advantages": ones(2), "objective": "ppo"}, ValueError, "advantages must have shape"),
    ({**flat, "cu_seqlens": [0, 5]}, TypeError, "cu_seqlens must be a tensor, got list"),
    ({**flat, "cu_seqlens": two / 1}, TypeError, "cu_seqlens must be a tensor of integers, got"),
    (
        {**flat, "cu_seqlens": two[None]},
        ValueError,
        "cu_seqlens must have shape [S + 1], got (1,",
    ),
    ({**flat, "cu_seqlens": two[:0]}, ValueError, "cu_seqlens must have shape [S + 1], got (0,)"),
    *(
        ({**flat, "cu_seqlens": ids(value)}, ValueError, f"cu_seqlens must rise ... 5, got {value}")
        for value in ([0, 2, 4], [1, 5], [0, 4, 2, 5], [0, 2, 6], [5])
    ),
    # prompt groups
    *(
        ({"objective": Objective(aggregation="prompt-mean"), **options}, error, message)
        for options, error, message in [
            ({}, ValueError, "group_size or group_ids is needed for aggregation prompt-mean"),
            ({"group_size": 2, "group_ids": ids([0, 0])}, ValueError, "group_size and group_ids"),
            ({"group_size": 3}, ValueError, "group_size must ... divide ... sequences 2, got 3"),
            ({"group_size": 0}, ValueError, "group_size must be at least 1 ... got 0"),
            ({"group_size": 1.0}, TypeError, "group_size must be an int, got float"),
            ({"group_size": True}, TypeError, "group_size must be an int, got bool"),
            ({"group_ids": ids([0])}, ValueError, "group_ids must have shape (2,) ... got (1,)"),
            ({"group_ids": ones(2)}, TypeError, "group_ids must be a tensor of integers, got"),
            ({"group_ids": [0, 1]}, TypeError, "group_ids must be a tensor, got list"),
        ]
    ),
    # backends
    ({"backend": "gpu"}, ValueError, "backend must be one of auto, reference, cpu ... got 'gpu'"),
    ({"backend": None}, TypeError, "backend must be a string, got NoneType"),
    ({"backend": "triton"}, ValueError, "backend 'triton' cannot do this call:"),
    ({"backend": "cuda"}, ValueError, "backend 'cuda' cannot do this call"),
]


@pytest.mark.parametrize(("changes", "error", "message"), cases(POLICY_LOSS))
def test_policy_loss(changes, error, message):
    refuses(lambda: loss(**changes), error, message)


@pytest.mark.skipif(missing is not None, reason=str(missing))
def test_the_cpu_backend_says_what_it_cannot_do():
    double = {"logprobs": zeros(2, 3).double(), "backend": "cpu"}
    reason = "takes float32, bfloat16 and float16, not float64"
    refuses(lambda: loss(**double), ValueError, f"backend 'cpu' cannot do this call: ... {reason}")
    own = {"objective": lambda new, *_: new, "backend": "cpu"}
    refuses(lambda: loss(**own), ValueError, "backend 'cpu' cannot ... Python function")


OBJECTIVE = [
    *(
        ({name: -0.1}, ValueError, f"{name} must be finite and >= 0 ... got -0.1")
        for name in ("clip_low", "clip_high", "kl_coef")
    ),
    *(
        ({name: nan}, ValueError, f"{name} must ... got nan")
        for name in ("clip_low", "clip_high", "dual_clip", "delta", "kl_coef", "kl_clamp")
    ),
    *(
        ({name: inf}, ValueError, f"{name} must ... got inf")
        for name in ("clip_high", "kl_coef", "entropy_coef", "log_ratio_clamp")
    ),
    *(
        ({name: "0.2"}, TypeError, f"{name} must be a number, got str")
        for name in ("clip_low", "clip_high", "kl_coef", "entropy_coef", "dual_clip", "delta")
    ),
    *(
        ({name: True}, TypeError, f"{name} must be a number, got bool")
        for name in ("clip_low", "kl_coef", "log_ratio_clamp", "kl_clamp")
    ),
    *(
        ({name: 0}, ValueError, f"{name} must be above 0, got 0")
        for name in ("kl_clamp", "log_ratio_clamp", "length_norm", "sapo_temperature_pos")
    ),
    ({"clip_low": 1.5}, ValueError, "clip_low must ... <= 1, got 1.5"),
    ({"dual_clip": 1.0}, ValueError, "dual_clip must be above 1, got 1.0"),
    ({"delta": 0.9}, ValueError, "delta must be above 1 + clip_high = 1.2, got 0.9"),
    ({"delta": 1.1}, ValueError, "delta must be above 1 + clip_high = 1.2, got 1.1"),
    ({"delta": 1.2}, ValueError, "delta must be above 1 + clip_high = 1.2, got 1.2"),
    (
        {"sapo_temperature_neg": -1, "surrogate": "sapo"},
        ValueError,
        "sapo_temperature_neg must be",
    ),
    ({"entropy_coef": None}, TypeError, "entropy_coef must be a number, got NoneType"),
    *(
        ({name: value}, TypeError, f"{name} must be a number, got {type(value).__name__}")
        for name in ("clip_low", "clip_high", "dual_clip", "kl_clamp", "log_ratio_clamp")
        for value in (torch.tensor(0.2), ones(2), np.ones(2))
    ),
    *(
        ({name: 1e39}, ValueError, f"{name} must be finite in float32, got 1e+39")
        for name in ("clip_high", "dual_clip", "delta", "kl_clamp", "log_ratio_clamp", "kl_coef")
    ),
    ({"surrogate": "ppo"}, ValueError, "surrogate must be one of ppo_clip, cispo, ... got 'ppo'"),
    ({"surrogate": None}, TypeError, "surrogate must be a string ... got NoneType"),
    ({"surrogate": int}, TypeError, "surrogate must be a string, got type"),
    (
        {"level": "seq"},
        ValueError,
        "level must be one of token, sequence, sequence-token; got 'seq'",
    ),
    ({"kl_estimator": "k4"}, ValueError, "kl_estimator must be one of k1, k2, k3, abs; got 'k4'"),
    ({"aggregation": "mean"}, ValueError, "aggregation must be one of token-mean, ... got 'mean'"),
    ({"rollout_correction": {"kind": "mask"}}, TypeError, "rollout_correction must be a ... dict"),
    ({"kl_gradient": "k2"}, ValueError, "kl_gradient must be one of exact, ... got 'k2'"),
    (
        {"log_ratio_clamp": (1, 2)},
        ValueError,
        "log_ratio_clamp must ... low < 0 < high, got (1, 2)",
    ),
    ({"log_ratio_clamp": (-1, nan)}, ValueError, "log_ratio_clamp must be (low, high)"),
    ({"log_ratio_clamp": (-1, 10**400)}, ValueError, "log_ratio_clamp must be finite, got an int"),
    ({"log_ratio_clamp": (-1,)}, TypeError, "log_ratio_clamp must be a number or a pair"),
    ({"log_ratio_clamp": (-1, "2")}, TypeError, "log_ratio_clamp must be a number or a pair"),
    # contradictions
    (
        {"surrogate": "gmpo", "level": "sequence", "kl_gradient": "bias-corrected"},
        ValueError,
        "kl_gradient must not be 'bias-corrected' with surrogate gmpo",
    ),
    (
        {"surrogate": "gmpo", "level": "sequence-token"},
        ValueError,
        "level must be 'sequence' with surrogate gmpo, got 'sequence-token'",
    ),
    (
        {"surrogate": "gmpo"},
        ValueError,
        "level must be 'sequence' with surrogate gmpo, got 'token'",
    ),
    (
        {"surrogate": "reinforce", "level": "sequence"},
        ValueError,
        "level must be 'token' with surrogate",
    ),
    (
        {"surrogate": max, "level": "sequence"},
        ValueError,
        "level must be 'token' with surrogate a",
    ),
    # options without effect
    ({"length_norm": 5}, ValueError, "length_norm has no effect with aggregation token-mean"),
    (
        {"sapo_temperature_pos": 2.0},
        ValueError,
        "sapo_temperature_pos has no effect with surrogate",
    ),
    ({"surrogate": "cispo", "clip_high": -0.3}, ValueError, "clip_high must be finite and >= -0.2"),
    (
        {"surrogate": "cispo", "dual_clip": 3.0},
        ValueError,
        "dual_clip has no effect with surrogate cispo",
    ),
    ({"surrogate": "cispo", "delta": 3.0}, ValueError, "delta has no effect with surrogate cispo"),
    (
        {"surrogate": "sapo", "clip_low": 0.1},
        ValueError,
        "clip_low has no effect with surrogate sapo",
    ),
    (
        {"surrogate": "reinforce", "clip_high": 0.1},
        ValueError,
        "clip_high has no effect ... reinforce",
    ),
    ({"surrogate": "reinforce", "log_ratio_clamp": 1}, ValueError, "log_ratio_clamp has no effect"),
    (
        {"surrogate": max, "clip_low": 0.1},
        ValueError,
        "clip_low has no effect with surrogate a function",
    ),
]


@pytest.mark.parametrize(("fields", "error", "message"), cases(OBJECTIVE))
def test_objective(fields, error, message):
    refuses(lambda: Objective(**fields), error, message)
    if not {"surrogate", "level", "length_norm"} & set(fields):
        refuses(lambda: Objective.preset("ppo", **fields), error, message)


ROLLOUT_CORRECTION = [
    ({"kind": "clip"}, ValueError, "kind must be one of truncate, mask, filter; got"),
    ({"level": "batch"}, ValueError, "rollout_correction.level must be one of ... got 'batch'"),
    ({"low": -1}, ValueError, "rollout_correction.low must be finite and >= 0, got -1"),
    ({"high": 0}, ValueError, "rollout_correction.high must be above 0, got 0"),
    ({"high": nan}, ValueError, "rollout_correction.high must be finite, got nan"),
    ({"kind": "filter", "high": inf}, ValueError, "filter has no effect without a bound"),
    ({"low": 3.0}, ValueError, "rollout_correction.high must be above low = 3.0, got 2.0"),
    ({"high": "2"}, TypeError, "rollout_correction.high must be a number, got str"),
    ({"high": 1e39}, ValueError, "rollout_correction.high must be finite in float32, got 1e+39"),
    *(
        ({name: value}, TypeError, f"rollout_correction.{name} must be a number, got {kind}")
        for name in ("low", "high")
        for value, kind in [(ones(2), "Tensor"), (meta, "Tensor"), (np.ones(2), "ndarray")]
    ),
]


@pytest.mark.parametrize(("fields", "error", "message"), cases(ROLLOUT_CORRECTION))
def test_rollout_correction(fields, error, message):
    refuses(lambda: RolloutCorrection(**fields), error, message)


def test_names_that_do_not_exist():
    refuses(lambda: Objective.preset("ppo2"), ValueError, "must be one of ppo, grpo ... got 'ppo2'")
    refuses(lambda: Objective.preset("ppo", clip=0.2), TypeError, "clip")
    refuses(lambda: Objective("ppo_clip"), TypeError, "positional")
    refuses(lambda: loss(clip_high=0.2), TypeError, "clip_high")

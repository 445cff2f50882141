"""Bad arguments of what takes a process group: errors name argument, expectation and value."""

import pytest
import torch
from test_bad_input import cases, loss, refuses

import fastrl
from fastrl import Objective

ones = torch.ones

NORMALIZER = [
    ({}, ValueError, "objective or aggregation must be given, got neither"),
    (
        {"objective": "grpo", "aggregation": "token-mean"},
        ValueError,
        "objective or aggregation must be given, got both",
    ),
    ({"objective": 3}, TypeError, "objective must be an Objective, ... got int"),
    ({"aggregation": "mean"}, ValueError, "aggregation must be one of token-mean"),
    ({"aggregation": 1}, TypeError, "aggregation must be a string, got int"),
    ({"aggregation": "token-sum"}, ValueError, "aggregation token-sum has no normalizer"),
    (
        {"objective": "grpo", "count_empty": True},
        ValueError,
        "count_empty has no effect with objective",
    ),
    ({"aggregation": "token-mean", "count_empty": True}, ValueError, "count_empty has no effect"),
    ({"aggregation": "token-mean", "count_empty": 1}, TypeError, "count_empty must be True or"),
    ({"objective": "dapo", "group_size": 2}, ValueError, "group_size has no effect with"),
    ({"aggregation": "prompt-mean"}, ValueError, "group_size or group_ids is needed"),
    (
        {"aggregation": "prompt-mean", "mask": [ones(2, 3)], "group_ids": torch.tensor([1, 1])},
        TypeError,
        "group_ids must be a list like mask, got Tensor",
    ),
    (
        {"mask": [ones(3)], "objective": "grpo", "cu_seqlens": [torch.tensor([0, 3])] * 2},
        ValueError,
        "cu_seqlens must have 1 tensors, one for each mask, got 2",
    ),
    ({"mask": ones(3), "objective": "grpo"}, ValueError, "cu_seqlens is needed"),
    ({"mask": [], "objective": "grpo"}, ValueError, "mask must contain at least one ... got none"),
    (
        {"mask": "ones", "objective": "grpo"},
        TypeError,
        "mask must be a tensor or a list ... got str",
    ),
    ({"mask": [[1]], "objective": "grpo"}, TypeError, "mask must be a tensor, got list"),
    ({"mask": ones(1, 2) / 2, "objective": "grpo"}, ValueError, "mask must be bool, ... got 0.5"),
    ({"mask": ones(1, 2, 3), "objective": "grpo"}, ValueError, "mask must have shape [B, T]"),
    ({"objective": "grpo", "gradients": "max"}, ValueError, "gradients must be one of mean, sum"),
    (
        {"objective": "grpo", "process_group": "world"},
        TypeError,
        "process_group must be a ProcessGroup or None, got str",
    ),
    (
        {
            "objective": Objective(
                entropy_coef=0.1, entropy_aggregation="token-mean", top_entropy_quantile=0.5
            )
        },
        ValueError,
        "entropy_aggregation must be None or token-sum with top_entropy_quantile below 1 ... got "
        "token-mean",
    ),
]


@pytest.mark.parametrize(("changes", "error", "message"), cases(NORMALIZER))
def test_global_normalizer(changes, error, message):
    refuses(lambda: fastrl.global_normalizer(**{"mask": ones(2, 3), **changes}), error, message)


@pytest.mark.parametrize(
    "call",
    [
        lambda group: fastrl.global_normalizer(ones(1, 1), objective="ppo", process_group=group),
        lambda group: fastrl.group_advantages(ones(2), group_size=2, process_group=group),
        lambda group: fastrl.reduce_metrics(loss().metrics, process_group=group),
        lambda group: fastrl.whiten(ones(2), ones(2), process_group=group),
    ],
)
@pytest.mark.parametrize(("group", "kind"), [("world", "str"), (0, "int"), ([0, 1], "list")])
def test_what_is_no_process_group(call, group, kind):
    message = f"process_group must be a ProcessGroup or None, got {kind}"
    refuses(lambda: call(group), TypeError, message)

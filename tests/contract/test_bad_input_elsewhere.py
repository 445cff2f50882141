"""Bad arguments of the other functions: errors name argument, expectation and value."""

import math

import pytest
import torch
from test_bad_input import cases, refuses

import fastrl

nan = math.nan
ones, zeros, ids = torch.ones, torch.zeros, torch.tensor
meta = torch.zeros(2, 3, device="meta")


def weights(mask=None, aggregation="token-mean", **options):
    mask = ones(2, 3) if mask is None else mask
    return fastrl.token_weights(mask, aggregation=aggregation, **options)


TOKEN_WEIGHTS = [
    ({"mask": [1, 0]}, TypeError, "mask must be a tensor, got list"),
    ({"mask": ones(1, 2, 3)}, ValueError, "mask must have shape [B, T] or [N], got (1, 2, 3)"),
    ({"mask": ones(2, 3) * 0.3}, ValueError, "mask must ... 0 ... 1 ... got 0.3"),
    ({"aggregation": "sum"}, ValueError, "aggregation must be one of token-mean, ... got 'sum'"),
    ({"aggregation": None}, TypeError, "aggregation must be a string, got NoneType"),
    ({"length_norm": 3}, ValueError, "length_norm has no effect with aggregation token-mean"),
    ({"group_size": 2}, ValueError, "group_size has no effect with aggregation token-mean"),
    ({"count_empty": True}, ValueError, "count_empty has no effect with aggregation token-mean"),
    ({"normalizer": 0.0}, ValueError, "normalizer must be above 0, got 0"),
    ({"normalizer": [1]}, TypeError, "normalizer must be a number ... got list"),
    *(
        ({"aggregation": "seq-mean-token-sum-norm", "length_norm": value}, error, message)
        for value, error, message in [
            (0, ValueError, "length_norm must be above 0, got 0"),
            (-2, ValueError, "length_norm must be above 0, got -2"),
            (nan, ValueError, "length_norm must be finite, got nan"),
            ("8", TypeError, "length_norm must be a number, got str"),
        ]
    ),
    (
        {"mask": ones(5), "aggregation": "seq-mean-token-sum"},
        ValueError,
        "cu_seqlens is needed for aggregation seq-mean-token-sum",
    ),
    (
        {"aggregation": "prompt-mean", "group_size": 5},
        ValueError,
        "group_size must ... divide the number of sequences 2, got 5",
    ),
]


@pytest.mark.parametrize(("changes", "error", "message"), cases(TOKEN_WEIGHTS))
def test_token_weights(changes, error, message):
    refuses(lambda: weights(**changes), error, message)


def value_loss(**changes):
    inputs = {"values": zeros(2, 3), "returns": zeros(2, 3), "mask": ones(2, 3), **changes}
    return fastrl.value_loss(**inputs)


VALUE_LOSS = [
    ({"values": 1.0}, TypeError, "values must be a tensor, got float"),
    ({"values": ones(2, 3).long()}, TypeError, "values must be a floating ... got torch.int64"),
    ({"values": ones(2, 3, 1)}, ValueError, "values must have shape [B, T] or [N], got (2, 3, 1)"),
    ({"returns": ones(2)}, ValueError, "returns must have shape (2, 3) like values, got (2,)"),
    ({"returns": meta}, ValueError, "returns must be on cpu like values, got ... meta"),
    ({"mask": ones(2, 4)}, ValueError, "mask must have shape (2, 3) like values, got (2, 4)"),
    ({"loss": "l1"}, ValueError, "loss must be one of mse, huber; got 'l1'"),
    ({"clip": 0.2}, ValueError, "old_values is needed when clip is given"),
    ({"old_values": ones(2, 3)}, ValueError, "clip is needed when old_values is given"),
    *(
        ({"old_values": ones(2, 3), "clip": value}, error, f"clip must be ... got {got}")
        for value, error, got in [
            (0.0, ValueError, "0.0"),
            (-1, ValueError, "-1"),
            (nan, ValueError, "nan"),
            ("1", TypeError, "str"),
        ]
    ),
    (
        {"old_values": ones(2), "clip": 0.2},
        ValueError,
        "old_values must have shape ... (2,)",
    ),
    ({"aggregation": "avg"}, ValueError, "aggregation must be one of ... got 'avg'"),
    ({"normalizer": -1}, ValueError, "normalizer must be above 0, got -1"),
    ({"cu_seqlens": ids([0, 6])}, ValueError, "cu_seqlens is for packed tokens [N], got"),
]


@pytest.mark.parametrize(("changes", "error", "message"), cases(VALUE_LOSS))
def test_value_loss(changes, error, message):
    refuses(lambda: value_loss(**changes), error, message)


def kl(logprobs=None, ref_logprobs=None, **options):
    return fastrl.kl_divergence(
        ones(3) if logprobs is None else logprobs,
        ones(3) if ref_logprobs is None else ref_logprobs,
        **options,
    )


KL_DIVERGENCE = [
    ({"logprobs": [0.0]}, TypeError, "logprobs must be a tensor, got list"),
    ({"logprobs": ones(3).int()}, TypeError, "logprobs must be a floating ... got torch.int32"),
    ({"ref_logprobs": ones(1)}, ValueError, "ref_logprobs must have shape (3,) ... got (1,)"),
    ({"ref_logprobs": meta[0]}, ValueError, "ref_logprobs must be on cpu like logprobs, got"),
    ({"estimator": "k5"}, ValueError, "estimator must be one of k1, k2, k3, abs; got 'k5'"),
    ({"estimator": 3}, TypeError, "estimator must be a string, got int"),
    ({"clamp": 0}, ValueError, "clamp must be above 0, got 0"),
    ({"clamp": nan}, ValueError, "clamp must be finite, got nan"),
    ({"clamp": "1"}, TypeError, "clamp must be a number, got str"),
]


@pytest.mark.parametrize(("changes", "error", "message"), cases(KL_DIVERGENCE))
def test_kl_divergence(changes, error, message):
    refuses(lambda: kl(**changes), error, message)


def groups(rewards=None, **options):
    rewards = zeros(6) if rewards is None else rewards
    return fastrl.group_advantages(rewards, **(options or {"group_size": 3}))


GROUP_ADVANTAGES = [
    ({"rewards": [1.0]}, TypeError, "rewards must be a tensor, got list"),
    ({"rewards": ones(6).long()}, TypeError, "rewards must be a floating ... got torch.int64"),
    (
        {"rewards": ones(1, 2, 3)},
        ValueError,
        "rewards must have shape [N] or [P, G], got (1,",
    ),
    ({"eps": 0.0}, ValueError, "group_size or group_ids is needed"),
    ({"group_size": 3, "group_ids": ids([0] * 6)}, ValueError, "group_size and group_ids cannot"),
    ({"group_size": 4}, ValueError, "group_size must ... divide the number of rewards 6, got 4"),
    ({"group_size": 0}, ValueError, "group_size must be at least 1 ... got 0"),
    ({"group_size": -3}, ValueError, "group_size must be at least 1 ... got -3"),
    ({"group_size": 3.0}, TypeError, "group_size must be an int, got float"),
    (
        {"rewards": ones(2, 3), "group_size": 2},
        ValueError,
        "group_size must be 3 ... got 2",
    ),
    ({"group_ids": ids([0, 1])}, ValueError, "group_ids must have shape (6,) ... got (2,)"),
    ({"group_ids": zeros(6)}, TypeError, "group_ids must be a tensor of integers, got"),
    ({"group_ids": zeros(6).bool()}, TypeError, "group_ids must be a tensor of integers, got"),
    ({"group_ids": meta.long().view(6)}, ValueError, "group_ids must be on cpu like rewards, got"),
    (
        {"group_size": 3, "baseline": "max"},
        ValueError,
        "baseline must be one of mean, leave",
    ),
    ({"group_size": 3, "scale": True}, TypeError, "scale must be a string, got bool"),
    ({"group_size": 3, "scale": "std"}, ValueError, "scale must be one of group, batch, none; got"),
    ({"group_size": 3, "singleton": "nan"}, ValueError, "singleton must be one of zero, raw; got"),
    ({"group_size": 3, "correction": -1}, ValueError, "correction must be finite and >= 0, got -1"),
    ({"group_size": 3, "correction": nan}, ValueError, "correction must be ... got nan"),
    ({"group_size": 3, "eps": -1e-4}, ValueError, "eps must be finite and >= 0, got -0.0001"),
    ({"group_size": 3, "eps": "0"}, TypeError, "eps must be a number, got str"),
    ({"group_size": 3, "backend": "cuda"}, ValueError, "backend 'cuda' cannot do this call"),
    ({"group_size": 3, "backend": "x"}, ValueError, "backend must be one of ... got 'x'"),
]


@pytest.mark.parametrize(("changes", "error", "message"), cases(GROUP_ADVANTAGES))
def test_group_advantages(changes, error, message):
    refuses(lambda: groups(**changes), error, message)


def gae(**changes):
    inputs = {"rewards": zeros(2, 3), **changes}
    shape = getattr(inputs["rewards"], "shape", (2, 3))
    return fastrl.gae(**{"values": zeros(shape), **inputs})


RETURNS = [
    ({"rewards": [1.0]}, TypeError, "rewards must be a tensor, got list"),
    ({"rewards": ones(2, 3).int()}, TypeError, "rewards must be a floating ... got torch.int32"),
    (
        {"rewards": ones(2, 3, 1)},
        ValueError,
        "rewards must have shape [B, T] or [N], got (2,",
    ),
    ({"mask": ones(2)}, ValueError, "mask must have shape (2, 3) like rewards, got (2,)"),
    ({"mask": ones(2, 3) / 4}, ValueError, "mask must ... 0 ... 1 ... got 0.25"),
    ({"terminated": ones(2)}, ValueError, "terminated must have shape (2, 3) ... got (2,)"),
    ({"truncated": [0]}, TypeError, "truncated must be a tensor, got list"),
    ({"gamma": 1.1}, ValueError, "gamma must be finite and >= 0 and <= 1, got 1.1"),
    ({"gamma": -0.1}, ValueError, "gamma must ... got -0.1"),
    ({"gamma": nan}, ValueError, "gamma must ... got nan"),
    ({"gamma": "1"}, TypeError, "gamma must be a number, got str"),
    (
        {"bootstrap_values": ones(3)},
        ValueError,
        "bootstrap_values must have shape (2,) or (2, 3)",
    ),
    ({"bootstrap_values": ones(2).int()}, TypeError, "bootstrap_values must be a floating"),
    ({"bootstrap_values": 0.0}, TypeError, "bootstrap_values must be a tensor, got float"),
    ({"bootstrap_values": meta}, ValueError, "bootstrap_values must be on cpu like rewards, got"),
    ({"cu_seqlens": ids([0, 6])}, ValueError, "cu_seqlens is for packed tokens [N], got"),
    (
        {"rewards": ones(5), "cu_seqlens": ids([0, 4])},
        ValueError,
        "cu_seqlens must rise ... got",
    ),
    ({"backend": "cuda"}, ValueError, "backend 'cuda' cannot do this call"),
    ({"backend": 1}, TypeError, "backend must be a string, got int"),
]
GAE = [
    ({"values": [1.0]}, TypeError, "values must be a tensor, got list"),
    ({"values": ones(2)}, ValueError, "values must have shape (2, 3) like rewards, got (2,)"),
    ({"values": meta}, ValueError, "values must be on cpu like rewards, got ... meta"),
    ({"lam": 2}, ValueError, "lam must be finite and >= 0 and <= 1, got 2"),
    ({"lam": None}, TypeError, "lam must be a number, got NoneType"),
]


@pytest.mark.parametrize(("changes", "error", "message"), cases(RETURNS + GAE))
def test_gae(changes, error, message):
    refuses(lambda: gae(**changes), error, message)


@pytest.mark.parametrize(("changes", "error", "message"), cases(RETURNS))
def test_discounted_returns(changes, error, message):
    refuses(
        lambda: fastrl.discounted_returns(**{"rewards": zeros(2, 3), **changes}), error, message
    )


MASKED = [
    (fastrl.masked_mean, ([1.0], ones(1)), {}, TypeError, "x must be a tensor, got list"),
    (fastrl.masked_mean, (ids([1]), ones(1)), {}, TypeError, "x must be a floating ... int64"),
    (fastrl.masked_mean, (ones(2), ones(3)), {}, ValueError, "mask must have shape (2,) like x"),
    (fastrl.masked_mean, (ones(2), ones(2)), {"dim": 1}, ValueError, "dim must ... got 1"),
    (fastrl.masked_mean, (ones(2), ones(2)), {"dim": "0"}, TypeError, "dim must be ... got str"),
    (fastrl.masked_mean, (ones(2), ones(2)), {"dim": True}, TypeError, "dim must be ... got bool"),
    (fastrl.masked_mean, (ones(2), ones(2) / 2), {}, ValueError, "mask must ... got 0.5"),
    (fastrl.whiten, (3.0, ones(1)), {}, TypeError, "x must be a tensor, got float"),
    (fastrl.whiten, (ones(2), [1, 1]), {}, TypeError, "mask must be a tensor, got list"),
    (fastrl.whiten, (ones(2), meta[0, :2]), {}, ValueError, "mask must be on cpu like x, got"),
    (
        fastrl.whiten,
        (ones(2), ones(2)),
        {"shift_mean": 1},
        TypeError,
        "shift_mean must ... int",
    ),
    (fastrl.whiten, (ones(2), ones(2)), {"process_group": 3}, TypeError, "process_group must"),
]


@pytest.mark.parametrize(("function", "inputs", "options", "error", "message"), cases(MASKED))
def test_masked_mean_and_whiten(function, inputs, options, error, message):
    refuses(lambda: function(*inputs, **options), error, message)

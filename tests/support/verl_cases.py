"""Batches, configurations and comparisons for the tests of verl on fastrl."""

import importlib
import math
import types

import torch

from fastrl.integrations.verl import policy_losses as verl_policy_losses
from tests.support import verl_formulas
from tests.support.importable import importable

TOKENS = "verl.utils.torch_functional"
CORE = "verl.trainer.ppo.core_algos"
MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
)
POLICY_LOSSES = ("vanilla", "gspo", "sapo", "cispo", "geo_mean", "gpg")
GLOBAL = {"dp_size": 2, "batch_num_tokens": 90, "global_batch_size": 12, "loss_scale_factor": 64}
LOCAL = {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": None}
LOCAL["loss_scale_factor"] = None


class Config(types.SimpleNamespace):
    """The part of verl's ActorConfig that the policy losses read."""

    def get(self, name, default=None):
        return getattr(self, name, default)


def transcribed(**fields):
    fields = {"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None, **fields}
    return Config(**fields)


def installed(global_batch_info, **fields):
    actor = importlib.import_module("verl.workers.config").ActorConfig
    config = actor(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **fields)
    config.global_batch_info.update(global_batch_info)
    return config


def implementations():
    yield types.SimpleNamespace(name="transcribed", config=transcribed, **vars(verl_formulas))
    modules = [importable(name) for name in (TOKENS, CORE)]
    if all(modules):
        yield types.SimpleNamespace(
            name="installed", config=installed, **{**vars(modules[0]), **vars(modules[1])}
        )


def batch(seed=0, B=6, T=9, spread=0.4):
    torch.manual_seed(seed)
    mask = torch.rand(B, T) < 0.7
    mask[:, 0] = True
    mask[1] = False  # a response without a token
    old = -torch.rand(B, T) - 0.1
    return types.SimpleNamespace(
        mask=mask,
        old=old,
        log_prob=old + spread * torch.randn(B, T),
        advantages=torch.randn(B, T),
        values=torch.randn(B, T),
        rewards=torch.randn(B, T),
        weights=torch.rand(B, T) * 2,
    )


def value_and_gradient(function, x):
    x = x.clone().requires_grad_()
    value, *rest = function(x) if isinstance(function(x), tuple) else (function(x),)
    value.sum().backward()
    return value.detach().double(), x.grad.double(), rest


def close(a, b, mask=None):
    a, b = torch.as_tensor(a).double(), torch.as_tensor(b).double()
    if mask is not None:
        a, b = a[mask], b[mask]
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


FIELDS = {
    "vanilla": {"clip_ratio_low": 0.1, "clip_ratio_high": 0.28, "clip_ratio_c": 1.5},
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},
    "gspo": {"clip_ratio_low": 3e-2, "clip_ratio_high": 4e-2},
}


def policy_loss(namespace, name, data, mode, info, weights=None, **fields):
    """Return loss, gradient and metrics of one of our policy losses or of theirs."""
    config = transcribed if namespace is verl_policy_losses else namespace.config
    name = name if namespace is verl_policy_losses else f"compute_policy_loss_{name}"
    loss, gradient, (metrics,) = value_and_gradient(
        lambda x: getattr(namespace, name)(
            old_log_prob=data.old,
            log_prob=x,
            advantages=data.advantages,
            response_mask=data.mask,
            loss_agg_mode=mode,
            config=config(global_batch_info=info, **fields),
            rollout_is_weights=weights,
        ),
        data.log_prob,
    )
    return loss, gradient, metrics


def same_policy_loss(name, theirs, data, mode, info, weights=None, **fields):
    fields = {**FIELDS.get(name, {}), **fields}
    a, b = (
        policy_loss(n, name, data, mode, info, weights, **fields)
        for n in (verl_policy_losses, theirs)
    )
    close(a[0], b[0])
    close(a[1], b[1])
    assert a[2].keys() == b[2].keys()
    assert all(type(value) is float for value in a[2].values())
    for key, value in a[2].items():
        assert math.isclose(value, b[2][key], rel_tol=1e-5, abs_tol=1e-5), key

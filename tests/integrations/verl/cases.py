"""Batches, configurations and calls of verl's functions: fastrl's, transcribed ones, and verl's."""

import importlib
import types

import numpy
import torch

from fastrl.integrations.verl import _REPLACEMENTS
from tests.integrations.compared import outcome
from tests.integrations.packages import importable
from tests.integrations.verl import estimator_formulas, formulas, loss_formulas

TOKENS = "verl.utils.torch_functional"
CORE = "verl.trainer.ppo.core_algos"
MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
)
COUNTS = {
    "local": {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": None},
    "global": {"dp_size": 2, "batch_num_tokens": 90, "global_batch_size": 12},
}
COUNTS["local"]["loss_scale_factor"], COUNTS["global"]["loss_scale_factor"] = None, 64


class Config(types.SimpleNamespace):
    """The part of verl's configurations that its functions read."""

    def get(self, name, default=None):
        return getattr(self, name, default)


def transcribed(policy_loss=None, **fields):
    fields = {"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None, **fields}
    return Config(policy_loss=Config(**(policy_loss or {})), **fields)


def installed(global_batch_info, policy_loss=None, **fields):
    actor, own = (
        getattr(importlib.import_module(f"verl.workers.config{module}"), name)
        for module, name in (("", "ActorConfig"), (".actor", "PolicyLossConfig"))
    )
    required = {"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1}
    config = actor(**required, policy_loss=own(**(policy_loss or {})), **fields)
    config.global_batch_info.update(global_batch_info)
    return config


OURS = types.SimpleNamespace(**{item.name: item.function for item in _REPLACEMENTS})
TRANSCRIBED = types.SimpleNamespace(config=transcribed)
for module in (formulas, estimator_formulas, loss_formulas):
    vars(TRANSCRIBED).update(vars(module))
IMPLEMENTATIONS = {"transcribed": TRANSCRIBED}
if importable(CORE):
    IMPLEMENTATIONS["installed"] = types.SimpleNamespace(config=installed)
    for name in (TOKENS, CORE):
        vars(IMPLEMENTATIONS["installed"]).update(vars(importable(name)))


def batch(kind="bools", dtype=torch.float32, seed=0, spread=0.4, B=6, T=9):
    """A batch whose mask has holes and an empty response, and in fractions a sum below 1."""
    torch.manual_seed(seed)
    mask = torch.rand(B, T) < 0.7
    mask[:, 0] = True
    mask[1] = False
    old = -torch.rand(B, T) - 0.1
    if kind == "fractions":
        mask = mask * (torch.rand(B, T) + 0.1)
        mask[3] /= 2 * mask[3].sum()
    elif kind != "bools":
        mask = {"integers": mask.long(), "floats": mask.float(), "twos": 2 * mask.long()}[kind]
    found = types.SimpleNamespace(
        old=old,
        log_prob=(old + spread * torch.randn(B, T)).clamp(max=-1e-3),
        advantages=torch.randn(B, T),
        values=torch.randn(B, T),
        rewards=torch.randn(B, T),
        weights=torch.rand(B, T) * 2,
    )
    found.weights[0, 0] = 0.0
    for name, x in vars(found).items():
        setattr(found, name, x.to(dtype))
    found.mask = mask.to(dtype) if mask.is_floating_point() else mask
    return found


#: loss mode -> the options that its tests need
LOSSES = {
    "vanilla": {"clip_ratio_low": 0.1, "clip_ratio_high": 0.28, "clip_ratio_c": 1.5},
    "gspo": {"clip_ratio_low": 3e-2, "clip_ratio_high": 4e-2},
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},
    "cispo": {},
    "geo_mean": {},
    "gpg": {},
    "dro": {"policy_loss": {"dro_beta": 0.7}},
    "reinforce": {},
    "dppo_tv": {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1, "clip_ratio_c": 1.2},
    "dppo_kl": {"clip_ratio_low": 0.01, "clip_ratio_high": 0.02, "clip_ratio_c": 1.2},
    "clip_cov": {
        "clip_ratio_low": 0.1,
        "clip_ratio_high": 0.28,
        "policy_loss": {"clip_cov_ratio": 0.1, "clip_cov_lb": 0.05, "clip_cov_ub": 5.0},
    },
    "kl_cov": {"policy_loss": {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.3}},
}


def policy_loss(namespace, name, data, config, mode="token-mean", weights=None):
    """Return loss, metrics and gradient."""
    function = getattr(namespace, f"compute_policy_loss_{name}")

    def run(x):
        torch.manual_seed(7)  # for the tokens that clip_cov draws
        arguments = (data.old, x, data.advantages, data.mask, mode)
        return function(*arguments, config=config, rollout_is_weights=weights)

    return outcome(run, data.log_prob)


INDEX = ["b", "a", "b", "alone", "a", "c", "a", "c", "a"]
#: name -> an estimator and its options; those of groups get an index too
ESTIMATORS = {
    "gae": ("gae", {"gamma": 0.9, "lam": 0.95}),
    "gae, lam 1": ("gae", {"gamma": 1.0, "lam": 1.0}),
    "gae, lam 0": ("gae", {"gamma": 0.99, "lam": 0.0}),
    "gae, gamma 0": ("gae", {"gamma": 0.0, "lam": 0.5}),
    "grpo": ("grpo", {}),
    "grpo, epsilon": ("grpo", {"epsilon": 0.1}),
    "dr. grpo": ("grpo", {"norm_adv_by_std_in_grpo": False}),
    "grpo_vectorized": ("grpo_vectorized", {"epsilon": 0.1}),
    "grpo_passk": ("grpo_passk", {"config": Config(norm_adv_by_std_in_grpo=True)}),
    "grpo_passk, not by std": ("grpo_passk", {"config": Config(norm_adv_by_std_in_grpo=False)}),
    "gdpo": ("gdpo", {}),
    "rloo": ("rloo", {}),
    "rloo_vectorized": ("rloo_vectorized", {}),
    "opo": ("opo", {}),
    "gpg": ("gpg", {"f_norm": 2.0}),
    "reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", {}),
    "reinforce_plus_plus": ("reinforce_plus_plus", {"config": Config(gamma=0.9)}),
    "reinforce_plus_plus, gamma 0": ("reinforce_plus_plus", {"config": Config(gamma=0.0)}),
    "remax": ("remax", {"reward_baselines": torch.linspace(-1, 1, 9).double()}),
}
GROUPED = [x for x, (name, _) in ESTIMATORS.items() if name[:4] not in ("gae", "rein", "rema")]
GROUPED.append("reinforce_plus_plus_baseline")


def estimate(namespace, case, data, **changes):
    """Return the advantages and returns of nine responses."""
    name, options = ESTIMATORS[case]
    options = {**options, **changes}
    suffix = "_advantage_return" if name == "gae" else "_outcome_advantage"
    if name == "gae":
        options["values"] = data.values
    elif name == "remax":
        options["reward_baselines"] = options["reward_baselines"].to(data.rewards.dtype)
    if case in GROUPED and "index" not in options:
        index = ["b" if x == "alone" and name == "grpo_passk" else x for x in INDEX]
        options["index"] = numpy.array(index, dtype=object)
    function = getattr(namespace, f"compute_{name}{suffix}")
    return function(token_level_rewards=data.rewards, response_mask=data.mask, **options)


def gradients(outputs, upstream, inputs):
    """Return the gradients of the inputs; an upstream gradient of None leaves out its output."""
    pairs = [
        (x, g.reshape(x.shape)) for x, g in zip(outputs, upstream, strict=True) if g is not None
    ]
    total = sum((x.double() * g).sum() for x, g in pairs)
    return torch.autograd.grad(total, inputs)


def worker_batch(data, **more):
    """A batch as verl's workers have it, which needs tensordict."""
    B, T = data.mask.shape
    fields = {
        "prompts": torch.ones(B, 1).long(),
        "responses": torch.ones(B, T).long(),
        "attention_mask": torch.ones(B, 1 + T).long(),
        "response_mask": data.mask,
        "old_log_probs": data.old,
        **more,
    }
    fields = importlib.import_module("tensordict").TensorDict(fields, batch_size=B)
    for key in ("dp_size", "batch_num_tokens", "global_batch_size"):
        fields.set_non_tensor(key, COUNTS["global"][key])
    return fields


def with_prompts(x):
    """A leaf with a token more in each response, flat, as a model returns it."""
    return torch.nn.functional.pad(x, (0, 1)).flatten().requires_grad_()


def fused_inputs(N, H, V, dtype=torch.float32):
    torch.manual_seed(0)
    hidden = torch.empty(1, N, H).uniform_(-0.5, 0.5).to(dtype).requires_grad_()
    weight = torch.empty(V, H).uniform_(-0.5, 0.5).to(dtype).requires_grad_()
    upstream = torch.empty(N).uniform_(-1, 1), torch.empty(N).uniform_(-0.5, 0.5)
    return hidden, weight, torch.randint(V, (1, N)), upstream

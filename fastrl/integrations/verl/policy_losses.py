"""verl's policy losses on `policy_loss`: vanilla, gspo, sapo, cispo, geo_mean, gpg, dro, reinforce.

Each loss is a preset of the convention `verl` with the bounds of verl's `ActorConfig` (dro is a
function of a token), multiplied by the rollout weights and aggregated by `agg_loss`. Masked tokens
have no effect, even if they are NaN; mask values other than 0 and 1 are factors, as in verl.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastrl import Objective
from fastrl.integrations.replacing import original
from fastrl.integrations.verl.aggregation import Aggregation
from fastrl.integrations.verl.masks import factors, masked_mean
from fastrl.integrations.verl.policy_term import (
    Batch,
    PolicyTerm,
    Result,
    bounds,
    check,
    clip_bounds,
    clip_metrics,
    means,
    policy_loss,
    policy_term,
)

_SEQUENCES = "seq-mean-token-mean"


@policy_loss()
def vanilla(batch: Batch, mode: str, config: Any) -> Result:
    """Return the loss of PPO with dual clip, and log r clamped to +-20.

    f = -min(r A, clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high) A), and at most -clip_ratio_c A
    for A < 0.

    Examples:
        >>> import types, torch
        >>> from fastrl.integrations.verl.policy_losses import vanilla
        >>> config = types.SimpleNamespace(clip_ratio=0.2, clip_ratio_low=None, clip_ratio_high=0.3)
        >>> config.global_batch_info, config.get = {}, lambda name, default: default
        >>> old, new, one = torch.zeros(1, 1), torch.full((1, 1), 0.5), torch.ones(1, 1)
        >>> loss, metrics = vanilla(old, new, one, one, config=config)
        >>> loss, metrics["actor/pg_clipfrac"]
        (tensor(-1.3000), 1.0)
    """
    cap = float(config.get("clip_ratio_c", 3.0))
    loss = policy_term("ppo", batch, mode, config, **clip_bounds(config), dual_clip=cap)
    return loss.of(batch, loss.log_ratio(batch), *loss.clipped(batch))


@policy_loss(_SEQUENCES)
def gspo(batch: Batch, mode: str, config: Any) -> Result:
    """Return the loss of GSPO-token: the value of the sequence's ratio, with a gradient per token.

    log s is the mean of log r over the sequence, at most 10; f is as in vanilla without dual clip.

    The aggregation follows the replaced function of verl: by `loss_agg_mode` in 0.9.1, always by
    `seq-mean-token-mean` in 0.9.0 and 0.10.0.dev. A direct call follows `loss_agg_mode`.
    """
    if _names_its_aggregation(original(gspo)):
        mode = _SEQUENCES
    options, log_ratio, weights = clip_bounds(config), batch.log_ratio(), factors(batch.mask)
    if weights is not None:
        # `Objective` has no weighted mean, so each token gets the mean as its own log-ratio
        total = (weights * torch.where(batch.mask.bool(), log_ratio, 0.0)).sum(-1)
        mean = (total / weights.sum(-1).clamp(min=1))[:, None]
        batch = batch._replace(old=batch.log_prob.detach() - mean)
        options["level"] = "token"
    loss = policy_term("gspo", batch, mode, config, **options)
    clipped, _ = loss.clipped(batch)
    return loss.of(batch, log_ratio, clipped)


@policy_loss(_SEQUENCES)
def sapo(batch: Batch, mode: str, config: Any) -> Result:
    """Return the loss of SAPO: f = -4/tau sigmoid(tau (r - 1)) A, with log r clamped to +-20.

    The aggregation is `seq-mean-token-mean` for every `loss_agg_mode`, as in verl.
    """
    del mode
    temperatures = {
        "sapo_temperature_pos": float(config.tau_pos),
        "sapo_temperature_neg": float(config.tau_neg),
    }
    loss = policy_term("sapo", batch, _SEQUENCES, config, **temperatures)
    return loss.of(batch, loss.log_ratio(batch))


@policy_loss()
def cispo(batch: Batch, mode: str, config: Any) -> Result:
    """Return the loss of CISPO, f = -sg[clip(r, 1 - low, 1 + high)] A log_prob."""
    low, high = bounds(config)
    loss = policy_term("cispo", batch, mode, config, clip_low=low, clip_high=high)
    log_ratio = loss.log_ratio(batch)
    ratio = log_ratio.exp()
    # unlike ours, verl's metric counts tokens without advantage
    return loss.of(batch, log_ratio, ratio != ratio.clamp(1 - low, 1 + high))


@policy_loss()
def geo_mean(batch: Batch, mode: str, config: Any) -> Result:
    """Return the loss of GMPO: f = -A exp(mean over the sequence of the clipped log r).

    The bounds are on log r. As in verl, the loss is the mean over the local responses for every
    `loss_agg_mode` and global batch; rollout weights enter as their geometric mean.
    """
    del mode
    (low, high), mask, advantages = bounds(config), batch.mask, batch.advantages
    log_ratio, old, weights = batch.log_ratio(), batch.old, batch.weights
    assert old is not None
    above, below = log_ratio > high, log_ratio < -low
    upper, lower = (above | below) & (advantages > 0), (above | below) & (advantages < 0)
    if weights is not None:
        weights = masked_mean((weights + 1e-10).log(), mask, dim=-1).exp()
    current = torch.where(advantages == 0, old, batch.log_prob)  # verl's log r is 0 there
    if factors(mask) is None:
        objective = Objective.preset("gmpo", convention="verl", clip_low=low, clip_high=high)
        batch = batch._replace(log_prob=current, weights=weights)
        value = PolicyTerm(objective, Aggregation(mask, {})).value(batch)
    else:  # `Objective` has no weighted mean over a sequence
        free = (current - old).clamp(-80.0, 80.0)  # as in `Objective`
        held = torch.where(upper & above, high, free)
        held = torch.where(lower & below, -low, held)
        value = -masked_mean(advantages, mask, dim=-1)
        value = value * masked_mean(held, mask, dim=-1).exp()
        value = (value if weights is None else value * weights).mean()
    return value, clip_metrics(mask, log_ratio, upper, lower)


@policy_loss()
def gpg(batch: Batch, mode: str, config: Any) -> Result:
    """Return the loss of GPG, f = -A log_prob, without a ratio; no metrics, as in verl."""
    batch = batch._replace(old=None)
    return policy_term("reinforce", batch, mode, config).value(batch), {}


@policy_loss()
def dro(batch: Batch, mode: str, config: Any) -> Result:
    """Return the loss of DRO (arXiv 2405.19107): f = -A log_prob + dro_beta / 2 (log r)^2.

    log r is not bounded.

    Without rollout weights this is the surrogate `reinforce` with the KL estimator `k2` to the old
    policy; the rollout weights multiply both terms, as in verl.

    Examples:
        >>> import types, torch
        >>> from fastrl.integrations.verl.policy_losses import dro
        >>> own = types.SimpleNamespace(dro_beta=2.0)
        >>> config = types.SimpleNamespace(policy_loss=own, global_batch_info={})
        >>> old, new, one = torch.zeros(1, 1), torch.full((1, 1), 0.5), torch.ones(1, 1)
        >>> dro(old, new, one, one, config=config)
        (tensor(-0.2500), {'actor/ppo_kl': -0.5})
    """
    beta = config.policy_loss.dro_beta
    if beta is None or beta <= 0:
        raise ValueError(f"policy_loss.dro_beta must be above 0 for dro, got {beta}")

    def surrogate(logprobs: Tensor, old: Tensor, ref: Tensor | None, scores: Tensor) -> Tensor:
        del ref
        return 0.5 * float(beta) * (logprobs - old).square() - logprobs * scores

    value = policy_term(surrogate, batch, mode, config).value(batch)
    return value, means(batch.mask, {"actor/ppo_kl": -batch.log_ratio()})


def reinforce(
    rollout_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-sum",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> Result:
    """Return REINFORCE's loss in verl's `bypass_mode`: f = -A log_prob, times rollout weights."""
    check(config)
    batch = Batch(None, log_prob, advantages, response_mask, rollout_is_weights)
    value = policy_term("reinforce", batch, loss_agg_mode, config).value(batch)
    return value, means(response_mask, {"actor/ppo_kl": rollout_log_prob - log_prob})


def _names_its_aggregation(theirs: Callable[..., Any] | None) -> bool:
    """Return whether verl's function has the mode in its code: versions share a signature."""
    code = getattr(inspect.unwrap(theirs), "__code__", None) if theirs else None
    return code is not None and _SEQUENCES in code.co_consts

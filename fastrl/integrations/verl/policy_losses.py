"""verl's registered policy losses on `policy_loss`: vanilla, gspo, sapo, cispo, geo_mean, gpg.

Each is a preset of the convention `verl` with the bounds of verl's `ActorConfig`, times the
rollout weights, aggregated as in `agg_loss`. A masked token is inert, whatever it holds; a mask
with other values than 0 and 1 is multiplied by, as verl does it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fastrl
from fastrl import Objective
from fastrl.integrations.verl.aggregation import Aggregation, aggregation
from fastrl.integrations.verl.masks import factors, masked_mean
from fastrl.objective.presets import Preset

Loss = tuple[Tensor, dict[str, Any]]


def vanilla(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> Loss:
    """PPO with dual clip, log r held within +-20.

    f = -min(r A, clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high) A), for A < 0 at most
    -clip_ratio_c A.

    Example:
        >>> import types, torch
        >>> from fastrl.integrations.verl.policy_losses import vanilla
        >>> config = types.SimpleNamespace(clip_ratio=0.2, clip_ratio_low=None, clip_ratio_high=0.3)
        >>> config.global_batch_info, config.get = {}, lambda name, default: default
        >>> old, new, one = torch.zeros(1, 1), torch.full((1, 1), 0.5), torch.ones(1, 1)
        >>> loss, metrics = vanilla(old, new, one, one, config=config)
        >>> loss, metrics["actor/pg_clipfrac"]
        (tensor(-1.3000), 1.0)
    """
    low, high = _clip(config)
    cap = float(config.get("clip_ratio_c", 3.0))
    changes = {"clip_low": min(low, 1.0), "clip_high": high, "dual_clip": cap}
    objective, how = _objective("ppo", loss_agg_mode, response_mask, config, changes)
    loss = _loss(objective, how, log_prob, old_log_prob, advantages, rollout_is_weights)
    with torch.no_grad():
        log_ratio = _held(log_prob - old_log_prob, objective)
        ratio = log_ratio.exp()
        free, bounded = -advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)
        capped = (advantages < 0) & (torch.maximum(free, bounded) > -advantages * cap)
    return loss, _metrics(response_mask, log_ratio, bounded > free, capped)


def gspo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> Loss:
    """GSPO-token: the ratio is that of the sequence, the gradient each token's own.

    log s = mean over the sequence of log r, at most 10; f as in vanilla without dual clip.
    """
    low, high = _clip(config)
    changes: dict[str, Any] = {"clip_low": min(low, 1.0), "clip_high": high}
    log_ratio, old = (log_prob - old_log_prob).detach(), old_log_prob
    weights = factors(response_mask)
    if weights is None:
        of_sequence = fastrl.masked_mean(log_ratio, response_mask, dim=-1)[:, None]
    else:  # `Objective` has no such mean: each token is given it as its log-ratio
        total = (weights * torch.where(response_mask.bool(), log_ratio, 0.0)).sum(-1)
        of_sequence = (total / weights.sum(-1).clamp(min=1))[:, None]
        old, changes["level"] = log_prob.detach() - of_sequence, "token"
    objective, how = _objective("gspo", loss_agg_mode, response_mask, config, changes)
    loss = _loss(objective, how, log_prob, old, advantages, rollout_is_weights)
    with torch.no_grad():
        ratio = _held(of_sequence, objective).exp()
        clipped = -advantages * ratio.clamp(1 - low, 1 + high) > -advantages * ratio
    return loss, _metrics(response_mask, log_ratio, clipped)


def sapo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> Loss:
    """SAPO: f = -4/tau sigmoid(tau (r - 1)) A, log r held within +-20.

    Always aggregated by `seq-mean-token-mean`, whatever `loss_agg_mode` says, as in verl.
    """
    del loss_agg_mode
    _check(config)
    changes = {
        "sapo_temperature_pos": float(config.tau_pos),
        "sapo_temperature_neg": float(config.tau_neg),
    }
    objective, how = _objective("sapo", "seq-mean-token-mean", response_mask, config, changes)
    loss = _loss(objective, how, log_prob, old_log_prob, advantages, rollout_is_weights)
    with torch.no_grad():
        log_ratio = _held(log_prob - old_log_prob, objective)
    return loss, _metrics(response_mask, log_ratio)


def cispo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> Loss:
    """CISPO, clipped on both sides: f = -sg[clip(r, 1 - low, 1 + high)] A log_prob."""
    low, high = _clip(config)
    changes = {"clip_low": low, "clip_high": high}
    objective, how = _objective("cispo", loss_agg_mode, response_mask, config, changes)
    loss = _loss(objective, how, log_prob, old_log_prob, advantages, rollout_is_weights)
    with torch.no_grad():
        log_ratio = _held(log_prob - old_log_prob, objective)
        ratio = log_ratio.exp()
    return loss, _metrics(response_mask, log_ratio, ratio != ratio.clamp(1 - low, 1 + high))


def geo_mean(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> Loss:
    """GMPO: f = -A exp(mean over the sequence of the clipped log r), the bounds on log r.

    Always the mean over all responses, whatever `loss_agg_mode` and the global batch say, as in
    verl; rollout weights enter by their geometric mean.
    """
    del loss_agg_mode
    low, high = _clip(config)
    with torch.no_grad():
        log_ratio = log_prob - old_log_prob
        above, below = log_ratio > high, log_ratio < -low
        rises, falls = (above | below) & (advantages > 0), (above | below) & (advantages < 0)
        if rollout_is_weights is not None:
            logs = (rollout_is_weights + 1e-10).log()
            rollout_is_weights = masked_mean(logs, response_mask, dim=-1).exp()
    counted = torch.where(advantages == 0, old_log_prob, log_prob)  # verl takes log r for 0 there
    if factors(response_mask) is None:
        objective = Objective.preset("gmpo", convention="verl", clip_low=low, clip_high=high)
        how = Aggregation(response_mask, {})
        loss = _loss(objective, how, counted, old_log_prob, advantages, rollout_is_weights)
    else:  # `Objective` has no means over a sequence but the plain one
        held = torch.where(rises & above, high, counted - old_log_prob)
        held = torch.where(falls & below, -low, held)
        loss = -masked_mean(advantages, response_mask, dim=-1)
        loss = loss * masked_mean(held, response_mask, dim=-1).exp()
        loss = (loss if rollout_is_weights is None else loss * rollout_is_weights).mean()
    return loss, _metrics(response_mask, log_ratio, rises, falls)


def gpg(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> Loss:
    """GPG: f = -A log_prob, without a ratio; no metrics, as in verl."""
    del old_log_prob
    objective, how = _objective("reinforce", loss_agg_mode, response_mask, config, {})
    return _loss(objective, how, log_prob, None, advantages, rollout_is_weights), {}


def _clip(config: Any) -> tuple[float, float]:
    """Return how far a ratio may go below and above 1; the lower bound may lie below 0."""
    _check(config)
    low, high = config.clip_ratio_low, config.clip_ratio_high
    return (
        float(config.clip_ratio if low is None else low),
        float(config.clip_ratio if high is None else high),
    )


def _check(config: Any) -> None:
    if config is None:
        raise TypeError("config must be verl's ActorConfig, got None")


def _objective(
    name: Preset, mode: str, mask: Tensor, config: Any, changes: dict[str, Any]
) -> tuple[Objective, Aggregation]:
    """Return the objective, without the KL and entropy that verl adds up itself."""
    _check(config)
    how = aggregation(mode, mask, **config.global_batch_info)
    options = {key: value for key, value in how.options.items() if key != "normalizer"}
    return Objective.preset(name, convention="verl", **changes, **options), how


def _loss(
    objective: Objective,
    how: Aggregation,
    log_prob: Tensor,
    old_log_prob: Tensor | None,
    advantages: Tensor,
    weights: Tensor | None,
) -> Tensor:
    if how.factors is not None:
        weights = how.factors if weights is None else how.factors * weights
    result = fastrl.policy_loss(
        log_prob,
        advantages,
        how.mask,
        old_logprobs=old_log_prob,
        policy_weights=weights,
        objective=objective,
        normalizer=how.options.get("normalizer"),
    )
    return result.loss * how.scale


def _held(log_ratio: Tensor, objective: Objective) -> Tensor:
    low, high = objective.log_ratio_bounds
    return log_ratio.clamp(-low, high)


def _metrics(
    mask: Tensor, log_ratio: Tensor, clipped: Tensor | None = None, lower: Tensor | None = None
) -> dict[str, float]:
    """Return verl's metrics as floats, with one synchronisation for all of them."""
    kl = masked_mean(-log_ratio.detach(), mask)
    shares = [
        torch.zeros_like(kl) if share is None else masked_mean(share.to(kl.dtype), mask)
        for share in (clipped, lower)
    ]
    names = ("actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower")
    return dict(zip(names, torch.stack([shares[0], kl, shares[1]]).tolist(), strict=True))

"""verl's registered policy losses on `policy_loss`: vanilla, gspo, sapo, cispo, geo_mean, gpg.

Each is a preset of the convention `verl` with the bounds of verl's `ActorConfig`, times the
rollout weights, aggregated as in `agg_loss`. A masked token is inert, whatever it holds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fastrl
from fastrl import Objective
from fastrl.integrations.verl_aggregation import aggregation
from fastrl.presets import Preset

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
        >>> from fastrl.integrations.verl_policy_losses import vanilla
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
    changes = {"clip_low": min(low, 1.0), "clip_high": high}
    objective, how = _objective("gspo", loss_agg_mode, response_mask, config, changes)
    loss = _loss(objective, how, log_prob, old_log_prob, advantages, rollout_is_weights)
    with torch.no_grad():
        log_ratio = log_prob - old_log_prob
        of_sequence = fastrl.masked_mean(log_ratio, response_mask, dim=-1)[:, None]
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
    objective = Objective.preset(
        "gmpo", convention="verl", clip_low=low, clip_high=high, **_LIKE_THE_POLICY
    )
    with torch.no_grad():
        log_ratio = log_prob - old_log_prob
        clipped = log_ratio != log_ratio.clamp(-low, high)
        if rollout_is_weights is not None:
            logs = (rollout_is_weights + 1e-10).log()
            rollout_is_weights = fastrl.masked_mean(logs, response_mask, dim=-1).exp()
    counted = torch.where(advantages == 0, old_log_prob, log_prob)  # verl takes log r for 0 there
    how = {"mask": response_mask}
    loss = _loss(objective, how, counted, old_log_prob, advantages, rollout_is_weights)
    rises, falls = clipped & (advantages > 0), clipped & (advantages < 0)
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


#: verl adds KL and entropy up by itself
_LIKE_THE_POLICY: dict[str, Any] = {"kl_aggregation": None, "entropy_aggregation": None}


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
) -> tuple[Objective, dict[str, Any]]:
    """Return the objective, and mask, normalizer and factor of verl's aggregation."""
    _check(config)
    options, factor = aggregation(mode, mask, **config.global_batch_info)
    how = {"mask": mask, "normalizer": options.pop("normalizer", None), "factor": factor}
    fields = {**_LIKE_THE_POLICY, **changes, **options}
    return Objective.preset(name, convention="verl", **fields), how


def _loss(
    objective: Objective,
    how: dict[str, Any],
    log_prob: Tensor,
    old_log_prob: Tensor | None,
    advantages: Tensor,
    weights: Tensor | None,
) -> Tensor:
    result = fastrl.policy_loss(
        log_prob,
        advantages,
        how["mask"],
        old_logprobs=old_log_prob,
        policy_weights=weights,
        objective=objective,
        normalizer=how.get("normalizer"),
    )
    factor: float = how.get("factor", 1.0)
    return result.loss * factor


def _held(log_ratio: Tensor, objective: Objective) -> Tensor:
    low, high = objective.log_ratio_bounds
    return log_ratio.clamp(-low, high)


def _metrics(
    mask: Tensor, log_ratio: Tensor, clipped: Tensor | None = None, lower: Tensor | None = None
) -> dict[str, float]:
    """Return verl's metrics as floats, with one synchronisation for all of them."""
    kl = fastrl.masked_mean(-log_ratio.detach(), mask)
    shares = [
        torch.zeros_like(kl) if share is None else fastrl.masked_mean(share.to(kl.dtype), mask)
        for share in (clipped, lower)
    ]
    names = ("actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower")
    return dict(zip(names, torch.stack([shares[0], kl, shares[1]]).tolist(), strict=True))

"""verl's registered policy losses on `policy_loss`: vanilla, gspo, sapo, cispo, geo_mean, gpg.

Each is a preset of the convention `verl` with the bounds of verl's `ActorConfig`, multiplied by
the rollout weights and aggregated as in `agg_loss`. Masked tokens have no effect, whatever they
hold; mask values other than 0 and 1 are factors, as in verl.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import fastrl
from fastrl import Objective
from fastrl.integrations.log_ratios import within_bounds
from fastrl.integrations.verl.aggregation import Aggregation, aggregation
from fastrl.integrations.verl.masks import factors, masked_mean
from fastrl.objective.presets import Preset

Result = tuple[Tensor, dict[str, Any]]


def vanilla(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> Result:
    """PPO with dual clip, log r clamped to +-20.

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
    batch = _Batch(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    low, high = _clip(config)
    cap = float(config.get("clip_ratio_c", 3.0))
    bounds = {"clip_low": min(low, 1.0), "clip_high": high, "dual_clip": cap}
    loss = _loss("ppo", response_mask, loss_agg_mode, config, **bounds)
    log_ratio = within_bounds(log_prob - old_log_prob, loss.objective)
    ratio = log_ratio.exp()
    free, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)
    capped = (advantages < 0) & (torch.maximum(free, clipped) > -advantages * cap)
    return loss.of(batch, log_ratio, clipped > free, capped)


def gspo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> Result:
    """GSPO-token: the value of the sequence's ratio, with a gradient per token.

    log s = mean over the sequence of log r, at most 10; f as in vanilla without dual clip.
    """
    batch = _Batch(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    low, high = _clip(config)
    bounds: dict[str, Any] = {"clip_low": min(low, 1.0), "clip_high": high}
    log_ratio, weights = (log_prob - old_log_prob).detach(), factors(response_mask)
    if weights is None:
        mean = fastrl.masked_mean(log_ratio, response_mask, dim=-1)[:, None]
    else:  # `Objective` has no weighted mean: each token gets the mean as its own log-ratio
        total = (weights * torch.where(response_mask.bool(), log_ratio, 0.0)).sum(-1)
        mean = (total / weights.sum(-1).clamp(min=1))[:, None]
        batch = batch._replace(old_log_prob=log_prob.detach() - mean)
        bounds["level"] = "token"
    loss = _loss("gspo", response_mask, loss_agg_mode, config, **bounds)
    ratio = within_bounds(mean, loss.objective).exp()
    clipped = -advantages * ratio.clamp(1 - low, 1 + high) > -advantages * ratio
    return loss.of(batch, log_ratio, clipped)


def sapo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> Result:
    """SAPO: f = -4/tau sigmoid(tau (r - 1)) A, log r clamped to +-20.

    Aggregated by `seq-mean-token-mean`, whatever `loss_agg_mode` says, as in verl.
    """
    del loss_agg_mode
    batch = _Batch(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    _check(config)
    temperatures = {
        "sapo_temperature_pos": float(config.tau_pos),
        "sapo_temperature_neg": float(config.tau_neg),
    }
    loss = _loss("sapo", response_mask, "seq-mean-token-mean", config, **temperatures)
    return loss.of(batch, within_bounds(log_prob - old_log_prob, loss.objective))


def cispo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> Result:
    """CISPO, clipped on both sides: f = -sg[clip(r, 1 - low, 1 + high)] A log_prob."""
    batch = _Batch(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
    low, high = _clip(config)
    loss = _loss("cispo", response_mask, loss_agg_mode, config, clip_low=low, clip_high=high)
    log_ratio = within_bounds(log_prob - old_log_prob, loss.objective)
    ratio = log_ratio.exp()
    return loss.of(batch, log_ratio, ratio != ratio.clamp(1 - low, 1 + high))


def geo_mean(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> Result:
    """GMPO: f = -A exp(mean over the sequence of the clipped log r), with bounds on log r.

    The mean over the local responses, whatever `loss_agg_mode` and the global batch say, as in
    verl; rollout weights enter as their geometric mean.
    """
    del loss_agg_mode
    low, high = _clip(config)
    log_ratio = (log_prob - old_log_prob).detach()
    above, below = log_ratio > high, log_ratio < -low
    upper, lower = (above | below) & (advantages > 0), (above | below) & (advantages < 0)
    if rollout_is_weights is not None:
        logs = (rollout_is_weights + 1e-10).log()
        rollout_is_weights = masked_mean(logs, response_mask, dim=-1).exp()
    current = torch.where(advantages == 0, old_log_prob, log_prob)  # there verl's log r is 0
    if factors(response_mask) is None:
        objective = Objective.preset("gmpo", convention="verl", clip_low=low, clip_high=high)
        batch = _Batch(old_log_prob, current, advantages, response_mask, rollout_is_weights)
        value = _Loss(objective, Aggregation(response_mask, {})).value(batch)
    else:  # `Objective` has no weighted mean over a sequence
        held = torch.where(upper & above, high, current - old_log_prob)
        held = torch.where(lower & below, -low, held)
        value = -masked_mean(advantages, response_mask, dim=-1)
        value = value * masked_mean(held, response_mask, dim=-1).exp()
        value = (value if rollout_is_weights is None else value * rollout_is_weights).mean()
    return value, _metrics(response_mask, log_ratio, upper, lower)


def gpg(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> Result:
    """GPG: f = -A log_prob, without a ratio; no metrics, as in verl."""
    del old_log_prob
    batch = _Batch(None, log_prob, advantages, response_mask, rollout_is_weights)
    return _loss("reinforce", response_mask, loss_agg_mode, config).value(batch), {}


class _Batch(NamedTuple):
    """The tensors of one of verl's policy losses."""

    old_log_prob: Tensor | None
    log_prob: Tensor
    advantages: Tensor
    response_mask: Tensor
    weights: Tensor | None


class _Loss(NamedTuple):
    """A policy loss without KL and entropy, which verl adds itself."""

    objective: Objective
    how: Aggregation

    def value(self, batch: _Batch) -> Tensor:
        weights, how = batch.weights, self.how
        if how.factors is not None:
            weights = how.factors if weights is None else how.factors * weights
        result = fastrl.policy_loss(
            batch.log_prob,
            batch.advantages,
            how.mask,
            old_logprobs=batch.old_log_prob,
            policy_weights=weights,
            objective=self.objective,
            normalizer=how.options.get("normalizer"),
        )
        return result.loss * how.scale

    def of(
        self,
        batch: _Batch,
        log_ratio: Tensor,
        clipped: Tensor | None = None,
        lower: Tensor | None = None,
    ) -> Result:
        """Return loss and metrics; `clipped` and `lower` say on which tokens a bound acts."""
        metrics = _metrics(batch.response_mask, log_ratio, clipped, lower)
        return self.value(batch), metrics


def _loss(name: Preset, mask: Tensor, mode: str, config: Any, **changes: Any) -> _Loss:
    _check(config)
    how = aggregation(mode, mask, **config.global_batch_info)
    options = {key: value for key, value in how.options.items() if key != "normalizer"}
    return _Loss(Objective.preset(name, convention="verl", **changes, **options), how)


def _clip(config: Any) -> tuple[float, float]:
    """Return how far a ratio may go below and above 1; the lower bound may be negative."""
    _check(config)
    low, high = config.clip_ratio_low, config.clip_ratio_high
    return (
        float(config.clip_ratio if low is None else low),
        float(config.clip_ratio if high is None else high),
    )


def _check(config: Any) -> None:
    if config is None:
        raise TypeError("config must be verl's ActorConfig, got None")


def _metrics(
    mask: Tensor, log_ratio: Tensor, clipped: Tensor | None, lower: Tensor | None
) -> dict[str, float]:
    """Return verl's metrics as floats, with one synchronization for all of them."""
    kl = masked_mean(-log_ratio, mask)
    shares = [
        torch.zeros_like(kl) if share is None else masked_mean(share.to(kl.dtype), mask)
        for share in (clipped, lower)
    ]
    names = ("actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower")
    return dict(zip(names, torch.stack([shares[0], kl, shares[1]]).tolist(), strict=True))

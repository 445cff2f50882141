"""A policy loss of verl as one call of `policy_loss`, and its metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fastrl
from fastrl import Objective
from fastrl.integrations.verl.aggregation import Aggregation, aggregation
from fastrl.integrations.verl.masks import masked_mean
from fastrl.objective import TokenLoss
from fastrl.objective.presets import Preset

#: Loss and metrics.
Result = tuple[Tensor, dict[str, Any]]


class Batch(NamedTuple):
    """The tensors of one of verl's policy losses."""

    old_log_prob: Tensor | None
    log_prob: Tensor
    advantages: Tensor
    response_mask: Tensor
    weights: Tensor | None

    def weighted(self, factors: Tensor) -> Batch:
        """Return the batch with its rollout weights multiplied by factors per token."""
        return self._replace(weights=factors if self.weights is None else self.weights * factors)


class PolicyTerm(NamedTuple):
    """A policy loss without KL and entropy, which verl adds itself."""

    objective: Objective
    how: Aggregation

    def value(self, batch: Batch) -> Tensor:
        """Return the loss, aggregated like `agg_loss`."""
        how = self.how
        if how.factors is not None:
            batch = batch.weighted(how.factors)
        result = fastrl.policy_loss(
            batch.log_prob,
            batch.advantages,
            how.mask,
            old_logprobs=batch.old_log_prob,
            policy_weights=batch.weights,
            objective=self.objective,
            normalizer=how.options.get("normalizer"),
        )
        return result.loss * how.scale

    def of(
        self,
        batch: Batch,
        log_ratio: Tensor,
        clipped: Tensor | None = None,
        lower: Tensor | None = None,
    ) -> Result:
        """Return loss and metrics; `clipped` and `lower` mark the tokens on which a bound acts."""
        metrics = clip_metrics(batch.response_mask, log_ratio, clipped, lower)
        return self.value(batch), metrics


def policy_term(
    loss: Preset | TokenLoss, mask: Tensor, mode: str, config: Any, **changes: Any
) -> PolicyTerm:
    """Return a preset of the convention `verl`, or a function of a token, in a mode of verl.

    The counts of the global batch come from verl's `ActorConfig`.
    """
    check(config)
    how = aggregation(mode, mask, **config.global_batch_info)
    changes |= {key: value for key, value in how.options.items() if key != "normalizer"}
    if callable(loss):
        return PolicyTerm(Objective(surrogate=loss, **changes), how)
    return PolicyTerm(Objective.preset(loss, convention="verl", **changes), how)


def clip_bounds(config: Any) -> tuple[float, float]:
    """Return how far a ratio may go below and above 1; the lower bound may be negative."""
    check(config)
    low, high = config.clip_ratio_low, config.clip_ratio_high
    return (
        float(config.clip_ratio if low is None else low),
        float(config.clip_ratio if high is None else high),
    )


def check(config: Any) -> None:
    """Refuse a missing configuration."""
    if config is None:
        raise TypeError("config must be verl's ActorConfig, got None")


def clip_metrics(
    mask: Tensor, log_ratio: Tensor, clipped: Tensor | None, lower: Tensor | None
) -> dict[str, float]:
    """Return the three metrics of verl's clipped losses."""
    found = {"actor/pg_clipfrac": clipped, "actor/ppo_kl": -log_ratio}
    return means(mask, {**found, "actor/pg_clipfrac_lower": lower})


def means(mask: Tensor, metrics: Mapping[str, Tensor | None]) -> dict[str, float]:
    """Return the masked mean of each metric as a float, with one synchronization for all of them.

    None gives 0.
    """
    of = {key: value for key, value in metrics.items() if value is not None}
    dtype = torch.float64 if any(x.dtype == torch.float64 for x in of.values()) else torch.float32
    found = torch.stack([masked_mean(x.detach().to(dtype), mask) for x in of.values()]).tolist()
    return {**dict.fromkeys(metrics, 0.0), **dict(zip(of, found, strict=True))}

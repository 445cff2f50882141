"""What verl's policy losses on `policy_loss` share: parameters, objective, aggregation, metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fastrl
from fastrl import Objective
from fastrl.integrations.formulas import within_bounds
from fastrl.integrations.replacing import described_by
from fastrl.integrations.verl.aggregation import Aggregation, aggregation
from fastrl.integrations.verl.masks import masked_mean
from fastrl.objective import TokenLoss
from fastrl.objective.presets import Preset

#: Loss and metrics.
Result = tuple[Tensor, dict[str, Any]]


class Batch(NamedTuple):
    """The tensors of one of verl's policy losses."""

    old: Tensor | None
    log_prob: Tensor
    advantages: Tensor
    mask: Tensor
    weights: Tensor | None

    def weighted(self, factors: Tensor) -> Batch:
        """Return the batch with its rollout weights multiplied by factors per token."""
        return self._replace(weights=factors if self.weights is None else self.weights * factors)

    def log_ratio(self) -> Tensor:
        """Return log r of each token, without gradient."""
        assert self.old is not None
        return (self.log_prob - self.old).detach()


def policy_loss(
    default_mode: str = "token-mean",
) -> Callable[[Callable[[Batch, str, Any], Result]], Callable[..., Result]]:
    """Turn a loss of a batch, an aggregation mode and a configuration into verl's function."""

    def decorated(loss: Callable[[Batch, str, Any], Result]) -> Callable[..., Result]:
        def compute(
            old_log_prob: Tensor,
            log_prob: Tensor,
            advantages: Tensor,
            response_mask: Tensor,
            loss_agg_mode: str = default_mode,
            config: Any = None,
            rollout_is_weights: Tensor | None = None,
        ) -> Result:
            check(config)
            batch = Batch(old_log_prob, log_prob, advantages, response_mask, rollout_is_weights)
            return loss(batch, loss_agg_mode, config)

        return described_by(loss, compute)

    return decorated


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
            old_logprobs=batch.old,
            policy_weights=batch.weights,
            objective=self.objective,
            normalizer=how.options.get("normalizer"),
        )
        return result.loss * how.scale

    def log_ratio(self, batch: Batch) -> Tensor:
        """Return log r within the bounds of the objective, without gradient."""
        return within_bounds(batch.log_ratio(), self.objective)

    def clipped(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return where the clip of the ratio acts, and where the dual clip does."""
        clip = fastrl.clipped_tokens(
            batch.log_prob,
            batch.advantages,
            batch.mask != 0,
            old_logprobs=batch.old,
            objective=self.objective,
        )
        return clip * batch.advantages > 0, clip * batch.advantages < 0

    def of(
        self,
        batch: Batch,
        log_ratio: Tensor,
        clipped: Tensor | None = None,
        lower: Tensor | None = None,
    ) -> Result:
        """Return loss and metrics; `clipped` and `lower` mark the tokens on which a bound acts."""
        return self.value(batch), clip_metrics(batch.mask, log_ratio, clipped, lower)


def policy_term(
    loss: Preset | TokenLoss, batch: Batch, mode: str, config: Any, **changes: Any
) -> PolicyTerm:
    """Return a preset of the convention `verl`, or a function of a token, in a mode of verl.

    The counts of the global batch come from verl's `ActorConfig`.
    """
    how = aggregation(mode, batch.mask, **config.global_batch_info)
    changes |= {key: value for key, value in how.options.items() if key != "normalizer"}
    if callable(loss):
        return PolicyTerm(Objective(surrogate=loss, **changes), how)
    return PolicyTerm(Objective.preset(loss, convention="verl", **changes), how)


def bounds(config: Any) -> tuple[float, float]:
    """Return how far a ratio may go below and above 1; the lower bound may be negative."""
    low, high = config.clip_ratio_low, config.clip_ratio_high
    return (
        float(config.clip_ratio if low is None else low),
        float(config.clip_ratio if high is None else high),
    )


def clip_bounds(config: Any) -> dict[str, Any]:
    """Return the bounds of the ratio as fields of an `Objective`; no ratio is below 0."""
    low, high = bounds(config)
    return {"clip_low": min(low, 1.0), "clip_high": high}


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

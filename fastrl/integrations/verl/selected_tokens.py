"""verl's policy losses that select tokens: dppo_tv, dppo_kl, clip_cov, kl_cov.

DPPO drops tokens that have moved too far from the old policy (arXiv 2602.04879); Clip-Cov and
KL-Cov drop or penalize tokens whose log-probability and advantage vary together (arXiv 2505.22617).
Dropped tokens have `policy_weights` of 0. Masked tokens have no effect, even if they are NaN; mask
values other than 0 and 1 are factors, as in verl.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastrl.integrations.verl.masks import masked_mean
from fastrl.integrations.verl.policy_term import (
    Batch,
    Result,
    bounds,
    clip_bounds,
    means,
    policy_loss,
    policy_term,
)


@policy_loss()
def dppo_tv(batch: Batch, mode: str, config: Any) -> Result:
    """Return DPPO-Binary-TV's loss: f = -sg[min(r, clip_ratio_c)] A log_prob, |log r| <= 20.

    A token is dropped if A > 0 and p - p_old > clip_ratio_high, or if A <= 0 and
    p_old - p > clip_ratio_low.

    Examples:
        >>> import types, torch
        >>> from fastrl.integrations.verl.selected_tokens import dppo_tv
        >>> config = types.SimpleNamespace(clip_ratio=0.2, clip_ratio_low=None, clip_ratio_high=0.3)
        >>> config.global_batch_info, config.get = {}, lambda name, default: default
        >>> old, new = torch.tensor([[0.1, 0.5]]).log(), torch.tensor([[0.5, 0.6]]).log()
        >>> loss, metrics = dppo_tv(old, new, torch.ones(1, 2), torch.ones(1, 2), config=config)
        >>> loss, metrics["actor/pg_clipfrac"]
        (tensor(0.3065), 0.5)
    """
    low, high = bounds(config)
    moved = _at_most_1(batch.log_prob).exp() - _at_most_1(batch.old).exp()
    kept = torch.where(batch.advantages > 0, moved <= high, moved >= -low)
    return _dppo_loss(batch, kept, mode, config)


@policy_loss()
def dppo_kl(batch: Batch, mode: str, config: Any) -> Result:
    """Return DPPO-Binary-KL's loss, which is `dppo_tv` with the KL of taking the token as distance.

    D = p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)). A token is dropped if A > 0,
    p > p_old and D > clip_ratio_high, or if A <= 0, p < p_old and D > clip_ratio_low.
    """
    low, high = bounds(config)
    current, sampled = _at_most_1(batch.log_prob), _at_most_1(batch.old)
    p, old = current.exp(), sampled.exp()
    others = ((1.0 - old + 1e-8) / (1.0 - p + 1e-8)).log()
    distance = old * (sampled - current) + (1 - old) * others
    kept = torch.where(
        batch.advantages > 0, (distance <= high) | (p <= old), (distance <= low) | (p >= old)
    )
    return _dppo_loss(batch, kept, mode, config)


@policy_loss()
def clip_cov(batch: Batch, mode: str, config: Any) -> Result:
    """Return the loss of Clip-Cov, which is PPO's loss without some of the tokens.

    f = -min(r A, clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high) A). A share `clip_cov_ratio` of
    the tokens, at least one, is dropped. They are drawn with torch's default generator, as in verl,
    from the tokens that are not clipped and have
    clip_cov_lb < (A - mean A) (log_prob - mean log_prob) < clip_cov_ub.
    """
    share, floor, ceiling = _options(
        config, clip_cov_ratio=0.0002, clip_cov_lb=1.0, clip_cov_ub=5.0
    )
    unbounded = {"dual_clip": None, "log_ratio_clamp": None}
    loss = policy_term("ppo", batch, mode, config, **clip_bounds(config), **unbounded)
    mask, current, (low, high) = batch.mask, batch.log_prob.detach(), bounds(config)
    # rounded as in verl: one other token would change the whole draw
    ratio = batch.log_ratio().exp()
    clipped = -batch.advantages * ratio.clamp(1 - low, 1 + high) > -batch.advantages * ratio
    covariance = (batch.advantages - masked_mean(batch.advantages, mask)) * (
        current - masked_mean(current, mask)
    )
    drawn_from = (covariance > floor) & (covariance < ceiling) & mask.bool() & ~clipped
    places = drawn_from.nonzero()
    kept = torch.ones_like(current)
    if len(places):
        count = max(int(share * mask.sum().item()), 1)
        rows, columns = places[torch.randperm(len(places))[:count]].unbind(-1)
        kept[rows, columns] = 0
    metrics = {"actor/pg_clipfrac": 1 - kept, "actor/ppo_kl": -batch.log_ratio()}
    return loss.value(batch.weighted(kept)), means(mask, metrics)


@policy_loss()
def kl_cov(batch: Batch, mode: str, config: Any) -> Result:
    """Return the loss of KL-Cov: f = -r A, plus ppo_kl_coef |log r| on some tokens.

    The penalized tokens are the share `kl_cov_ratio` of the active tokens, at least one, with the
    largest (A - mean A) (log_prob - mean log_prob).
    """
    share, coefficient = _options(config, kl_cov_ratio=0.0002, ppo_kl_coef=1.0)
    penalized = torch.zeros_like(batch.mask, dtype=torch.bool)
    active = batch.mask.bool()
    scores, current = batch.advantages[active], batch.log_prob.detach()[active]
    if scores.numel():
        covariance = (scores - scores.mean()) * (current - current.mean())
        count = min(max(1, int(len(scores) * share)), len(scores))
        largest = covariance.topk(count).indices
        penalized[active] = torch.zeros_like(scores, dtype=torch.bool).index_fill(0, largest, True)

    def surrogate(logprobs: Tensor, old: Tensor, ref: Tensor | None, scores: Tensor) -> Tensor:
        del ref
        log_ratio = logprobs - old
        ratio = log_ratio.clamp(-80.0, 80.0).exp()  # log-ratios saturate as in `Objective`
        return coefficient * torch.where(penalized, log_ratio.abs(), 0.0) - scores * ratio

    value = policy_term(surrogate, batch, mode, config).value(batch)
    return value, means(batch.mask, {"actor/ppo_kl": batch.log_ratio().abs()})


def _at_most_1(log_prob: Tensor | None) -> Tensor:
    """Return a log-probability that rounding has not made positive, without gradient."""
    assert log_prob is not None
    return log_prob.detach().clamp(max=0.0)


def _dppo_loss(batch: Batch, kept: Tensor, mode: str, config: Any) -> Result:
    """Return DPPO's loss: CISPO without a lower bound, on the kept tokens."""
    cap = float(config.get("clip_ratio_c", 20.0))
    loss = policy_term("cispo", batch, mode, config, clip_low=1.0, clip_high=cap - 1)
    log_ratio = loss.log_ratio(batch)
    batch = batch.weighted(kept.to(batch.log_prob.dtype))
    return loss.of(batch, log_ratio, ~kept, (log_ratio.exp() > cap) & kept)


def _options(config: Any, **defaults: float) -> list[float]:
    """Return options of verl's `policy_loss`, or defaults for None; a ratio must be above 0."""
    found = []
    for name, default in defaults.items():
        value = getattr(config.policy_loss, name)
        number = float(default if value is None else value)
        if name.endswith("_ratio") and not number > 0:
            raise ValueError(f"policy_loss.{name} must be above 0, got {value}")
        found.append(number)
    return found

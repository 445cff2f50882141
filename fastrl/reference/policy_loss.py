"""The policy loss from token log-probabilities, its slope and its metrics."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.objective import Objective
from fastrl.reference import objectives
from fastrl.reference.sequences import Sequences


class _Terms(NamedTuple):
    """Per-token parts of the loss, kept for the metrics."""

    policy: Tensor
    kl: Tensor
    ratio: Tensor
    clip: Tensor


def policy_loss(
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor,
    sequences: Sequences,
    objective: Objective,
    *,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    kl_weights: Tensor | None = None,
    entropy_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss, slope = dL/dlogprobs `[B, T]`, and the metrics in the order of the library.

    L = sum_t w_t f_t + beta sum_t u_t k_t - entropy_coef sum_t v_t H_t.  Everything is `[B, T]`;
    the weights w, u and v (by default both w) hold mask, aggregation, normalizer and what else
    weighs each term. Masked tokens are replaced by 0 before any arithmetic, so what they hold is
    inert.
    """
    inference = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
    if inference and not _transforms_in_inference_mode():
        with torch.inference_mode(False):
            return policy_loss(
                logprobs.clone(),
                advantages.clone(),
                mask.clone(),
                weights.clone(),
                dataclasses.replace(sequences, index=_copy(sequences.index)),
                objective,
                old_logprobs=_copy(old_logprobs),
                ref_logprobs=_copy(ref_logprobs),
                entropy=_copy(entropy),
                kl_weights=_copy(kl_weights),
                entropy_weights=_copy(entropy_weights),
            )
    kl_weights = weights if kl_weights is None else kl_weights
    entropy_weights = weights if entropy_weights is None else entropy_weights

    def valid(x: Tensor) -> Tensor:
        return torch.where(mask, x, 0.0)

    logprobs, advantages = valid(logprobs.detach()), valid(advantages)
    old = logprobs if old_logprobs is None else valid(old_logprobs)
    ref = None if ref_logprobs is None else valid(ref_logprobs)
    # a token of weight 0 is dropped: autograd would multiply the weight by an infinite slope
    advantages = torch.where((weights == 0) & advantages.isinf(), advantages.sign(), advantages)

    def total(current: Tensor) -> tuple[Tensor, tuple[Tensor, _Terms]]:
        terms = _terms(current, old, ref, advantages, mask, sequences, objective)
        lost = valid(terms.policy)
        policy = torch.where((weights == 0) & lost.isinf(), 0.0, weights * lost).sum()
        loss = policy
        if objective.kl_coef and ref is not None:
            loss = loss + objective.kl_coef * (kl_weights * valid(terms.kl)).sum()
        return loss, (torch.stack([loss, policy]), terms)

    slope, (sums, terms) = _slope(total, logprobs)
    # comparisons with NaN choose a flat branch: a broken token must not pass for a clipped one
    slope = torch.where(terms.policy.isnan(), terms.policy, slope)
    if objective.kl_coef:
        slope = torch.where(terms.kl.isnan(), terms.kl, slope)
    slope = torch.where(mask, slope, 0.0)
    loss, policy = sums[0], sums[1]
    if objective.entropy_coef and entropy is not None:
        loss = loss - objective.entropy_coef * (entropy_weights * valid(entropy)).sum()

    count = mask.sum().to(loss.dtype)

    def mean(x: Tensor) -> Tensor:
        return torch.where(mask, x.to(loss.dtype), 0.0).sum() / count.clamp(min=1)

    def extreme(x: Tensor, sign: int) -> Tensor:
        highest = torch.where(mask, sign * x, -inf).amax() if x.numel() else x.new_tensor(-inf)
        return torch.where(count > 0, sign * highest, 0.0)

    token_log_ratio = objectives.saturate(
        objectives.difference(logprobs, old), *objective.log_ratio_bounds
    )
    metrics = torch.stack(
        [
            policy,
            mean(terms.kl),
            mean(torch.expm1(token_log_ratio) - token_log_ratio),
            mean(-logprobs if entropy is None else entropy),
            mean(terms.ratio),
            extreme(terms.ratio, 1),
            extreme(terms.ratio, -1),
            mean(terms.clip < 0),
            mean(terms.clip > 0),
            mean(terms.clip != 0),
            count,
            mean((slope == 0) & (entropy_weights * objective.entropy_coef == 0)),
        ]
    )
    return loss, slope, metrics


@functools.cache
def _transforms_in_inference_mode() -> bool:
    """Say whether `torch.func.grad` differentiates there: in torch 2.10 it returns zeros."""
    with torch.inference_mode():
        return bool(torch.func.grad(torch.square)(torch.ones(())) == 2)


def _copy(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.clone()


def _slope(
    total: Callable[[Tensor], tuple[Tensor, tuple[Tensor, _Terms]]], logprobs: Tensor
) -> tuple[Tensor, tuple[Tensor, _Terms]]:
    """Differentiate `total`, whatever autograd mode the caller is in."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        outcome: tuple[Tensor, tuple[Tensor, _Terms]]
        outcome = torch.func.grad(total, has_aux=True)(logprobs)
        return outcome
    # hooks of the caller (activation checkpointing, offloading) are not for this inner graph
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_as_is, _as_is):
        current = logprobs.detach().requires_grad_()
        loss, (sums, terms) = total(current)
        if not loss.requires_grad:
            raise ValueError(
                "objective must return a loss that autograd can follow to logprobs, got a constant"
            )
        (slope,) = torch.autograd.grad(loss, current)
    return slope, (sums.detach(), _Terms(*(term.detach() for term in terms)))


def _as_is(x: Tensor) -> Tensor:
    return x


def _terms(
    logprobs: Tensor,
    old: Tensor,
    ref: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    sequences: Sequences,
    o: Objective,
) -> _Terms:
    log_ratio = objectives.difference(logprobs, old)
    if o.level != "token" and o.ratio != "gmpo":
        log_ratio = sequences.mean(log_ratio, mask)
    if o.level == "sequence-token":
        # the value of the sequence's ratio, the slope of the token's own
        own = torch.where(logprobs.isfinite(), logprobs - logprobs.detach(), 0.0)
        log_ratio = log_ratio.detach() + own
    free_log_ratio = log_ratio
    log_ratio = objectives.saturate(log_ratio, *o.log_ratio_bounds)
    clip = torch.zeros_like(mask, dtype=torch.int8)
    if callable(o.ratio):
        policy = o.ratio(logprobs, old, ref, advantages)
        if not isinstance(policy, Tensor) or policy.shape != logprobs.shape:
            came = tuple(policy.shape) if isinstance(policy, Tensor) else type(policy).__name__
            raise ValueError(
                "objective must return a loss per token of the shape of logprobs "
                f"{tuple(logprobs.shape)}, got {came}"
            )
        if not policy.is_floating_point():
            raise TypeError(f"objective must return a floating-point loss, got {policy.dtype}")
        policy = policy.to(logprobs.dtype)
    elif o.ratio == "ppo_clip":
        policy, clip = objectives.ppo_clip(
            log_ratio, advantages, o.clip_low, o.clip_high, _bound(o.dual_clip), _bound(o.delta)
        )
    elif o.ratio == "cispo":
        policy, clip = objectives.cispo(logprobs, log_ratio, advantages, o.clip_low, o.clip_high)
    elif o.ratio == "sapo":
        policy, clip = objectives.sapo(
            log_ratio, advantages, o.sapo_temperature_pos, o.sapo_temperature_neg
        )
    elif o.ratio == "gmpo":
        clipped, clip = objectives.gmpo_log_ratio(log_ratio, advantages, o.clip_low, o.clip_high)
        log_ratio = sequences.mean(clipped, mask)
        policy = objectives.gmpo(log_ratio, advantages)
    else:
        policy, clip = objectives.reinforce(logprobs, advantages)
    kl = torch.zeros_like(logprobs)
    if ref is not None:
        kl = objectives.kl_term(
            logprobs,
            ref,
            free_log_ratio,
            o.kl_estimator,
            o.kl_gradient,
            _bound(o.kl_clamp),
            o.log_ratio_bounds,
            own=_own_ratio(mask, sequences, o.level),
        )
    return _Terms(policy, kl, log_ratio.exp().detach(), clip)


def _own_ratio(mask: Tensor, sequences: Sequences, level: str) -> Tensor:
    """Say which tokens move their ratio alone."""
    if level != "sequence":
        return mask
    return sequences.spread(sequences.total(mask.to(torch.int64)), mask) == 1


def _bound(value: float | None) -> float:
    return inf if value is None else value

"""The policy loss from token log-probabilities, with slopes and metrics."""

from __future__ import annotations

import functools
from collections.abc import Callable
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.contract import (
    KL_ESTIMATORS,
    KL_GRADIENTS,
    LEVELS,
    SURROGATES,
    LossArguments,
    Metrics,
    ObjectiveArguments,
)
from fastrl.objective import TokenLoss
from fastrl.reference import objectives
from fastrl.reference.inner_graph import inner_graph
from fastrl.reference.sequences import Sequences, sequences_of


class _Inputs(NamedTuple):
    """Constants of the terms, `[B, T]`, which are 0 at masked tokens."""

    old: Tensor
    ref: Tensor | None
    advantages: Tensor
    mask: Tensor
    sequences: Sequences


class _Terms(NamedTuple):
    """The terms of the loss per token, and values for the metrics."""

    policy: Tensor
    kl: Tensor
    ratio: Tensor
    clip: Tensor


def policy_loss(
    logprobs: Tensor,
    entropy: Tensor | None,
    mask: Tensor,
    arguments: LossArguments,
    objective: ObjectiveArguments,
    function: TokenLoss | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return loss, dL/dlogprobs and dL/dentropy `[B, T]` (None: 0), and the vector of `Metrics`.

    L = sum_t w_t c_t f_t + beta sum_t u_t k_t - entropy_coef sum_t v_t H_t with the weights w, u
    and v of the three terms (by default u = v = w) and the policy weights c. `function` replaces
    the surrogate.
    """
    if _must_leave_inference_mode():
        with torch.inference_mode(False):
            copied = LossArguments._make(map(_copy, arguments))
            return policy_loss(
                logprobs.clone(), _copy(entropy), mask.clone(), copied, objective, function
            )
    c = objective.coefficients
    sequences = sequences_of(mask, arguments.cu_seqlens)

    def zero_masked(x: Tensor) -> Tensor:
        return torch.where(mask, x, 0.0)

    def constant(x: Tensor | None) -> Tensor | None:
        return None if x is None else zero_masked(sequences.per_token(x, mask))

    logprobs = zero_masked(logprobs.detach())
    old, ref = arguments.old_logprobs, arguments.ref_logprobs
    weights, policy_weights = constant(arguments.weights), constant(arguments.policy_weights)
    kl_weights, entropy_weights = map(constant, (arguments.kl_weights, arguments.entropy_weights))
    advantages = constant(arguments.advantages)
    assert weights is not None
    assert advantages is not None
    policy_term_weights = weights if policy_weights is None else weights * policy_weights
    kl_weights = weights if kl_weights is None else kl_weights
    entropy_weights = weights if entropy_weights is None else entropy_weights
    # 0 times an infinite advantage would be NaN
    dropped = policy_term_weights == 0
    advantages = torch.where(dropped & advantages.isinf(), advantages.sign(), advantages)
    old = logprobs if old is None else zero_masked(old)
    ref = None if ref is None else zero_masked(ref)
    inputs = _Inputs(old, ref, advantages, mask, sequences)

    def total(current: Tensor) -> tuple[Tensor, tuple[Tensor, _Terms]]:
        terms = _terms(current, inputs, objective, function)
        surrogate = zero_masked(terms.policy)
        policy = torch.where(
            dropped & surrogate.isinf(), 0.0, policy_term_weights * surrogate
        ).sum()
        loss = policy
        if c.kl_coef and ref is not None:
            loss = loss + c.kl_coef * (kl_weights * zero_masked(terms.kl)).sum()
        return loss, (torch.stack([loss, policy]), terms)

    slope, (sums, terms) = _slope(total, logprobs)
    # comparisons with NaN choose a flat branch: a NaN token must not look like a clipped one
    slope = torch.where(terms.policy.isnan(), terms.policy, slope)
    if c.kl_coef:
        slope = torch.where(terms.kl.isnan(), terms.kl, slope)
    slope = torch.where(mask, slope, 0.0)
    loss, policy = sums[0].clone(), sums[1]
    entropy_slope = None
    if c.entropy_coef and entropy is not None:
        loss = loss - c.entropy_coef * (entropy_weights * zero_masked(entropy)).sum()
        entropy_slope = -c.entropy_coef * entropy_weights

    count = mask.sum().to(loss.dtype)

    def mean(x: Tensor) -> Tensor:
        return torch.where(mask, x.to(loss.dtype), 0.0).sum() / count.clamp(min=1)

    def extreme(x: Tensor, sign: int) -> Tensor:
        highest = torch.where(mask, sign * x, -inf).amax() if x.numel() else x.new_tensor(-inf)
        return torch.where(count > 0, sign * highest, 0.0)

    token_log_ratio = objectives.saturate(
        objectives.difference(logprobs, old), c.log_ratio_low, c.log_ratio_high
    )
    metrics = {
        "policy_loss": policy,
        "kl": mean(terms.kl),
        "kl_old": mean(torch.expm1(token_log_ratio) - token_log_ratio),
        "entropy": mean(-logprobs if entropy is None else entropy),
        "ratio_mean": mean(terms.ratio),
        "ratio_max": extreme(terms.ratio, 1),
        "ratio_min": extreme(terms.ratio, -1),
        "clip_low": mean(terms.clip < 0),
        "clip_high": mean(terms.clip > 0),
        "clip_fraction": mean(terms.clip != 0),
        "active_tokens": count,
        "zero_grad_fraction": mean((slope == 0) & (entropy_weights * c.entropy_coef == 0)),
    }
    return loss, slope, entropy_slope, torch.stack([metrics[name] for name in Metrics._fields])


@torch.no_grad()
def clipped_tokens(
    logprobs: Tensor,
    old: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    objective: ObjectiveArguments,
    cu_seqlens: Tensor | None,
) -> Tensor:
    """Return -1 where a lower bound of the surrogate is active, 1 where an upper one is, else 0."""
    sequences = sequences_of(mask, cu_seqlens)
    old, advantages = logprobs if old is None else old, sequences.per_token(advantages, mask)
    inputs = _Inputs(old, None, advantages, mask, sequences)
    return torch.where(mask, _terms(logprobs, inputs, objective, None).clip, 0)


def _must_leave_inference_mode() -> bool:
    inference = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
    return inference and not _transforms_in_inference_mode()


@functools.cache
def _transforms_in_inference_mode() -> bool:
    """Return whether `torch.func.grad` works in inference mode: torch 2.10 returns zeros."""
    with torch.inference_mode():
        return bool(torch.func.grad(torch.square)(torch.ones(())) == 2)


def _copy(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.clone()


def _slope(
    total: Callable[[Tensor], tuple[Tensor, tuple[Tensor, _Terms]]], logprobs: Tensor
) -> tuple[Tensor, tuple[Tensor, _Terms]]:
    """Return the gradient and auxiliary outputs of `total`, in any autograd mode."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        outcome: tuple[Tensor, tuple[Tensor, _Terms]]
        outcome = torch.func.grad(total, has_aux=True)(logprobs)
        return outcome
    with inner_graph():
        current = logprobs.detach().requires_grad_()
        loss, (sums, terms) = total(current)
        if not loss.requires_grad:
            raise ValueError(
                "objective must return a loss that is differentiable in logprobs, got a constant"
            )
        (slope,) = torch.autograd.grad(loss, current)
    return slope, (sums.detach(), _Terms(*(term.detach() for term in terms)))


def _terms(
    logprobs: Tensor, inputs: _Inputs, objective: ObjectiveArguments, function: TokenLoss | None
) -> _Terms:
    c, level = objective.coefficients, LEVELS[objective.level]
    surrogate = SURROGATES[objective.surrogate]
    old, ref, advantages, mask = inputs.old, inputs.ref, inputs.advantages, inputs.mask
    sequences, bounds = inputs.sequences, (c.log_ratio_low, c.log_ratio_high)
    log_ratio = objectives.difference(logprobs, old)
    if level != "token" and surrogate != "gmpo":
        log_ratio = sequences.mean(log_ratio, mask)
    if level == "sequence-token":
        # the sequence's log-ratio, with the gradient of the token's own log-probability
        zero = torch.where(logprobs.isfinite(), logprobs - logprobs.detach(), 0.0)
        log_ratio = log_ratio.detach() + zero
    unclamped_log_ratio = log_ratio
    log_ratio = objectives.saturate(log_ratio, *bounds)
    if function is not None:
        policy = _evaluate(function, logprobs, old, ref, advantages)
        clip = torch.zeros_like(mask, dtype=torch.int8)
    elif surrogate == "gmpo":
        clipped, clip = objectives.gmpo_log_ratio(log_ratio, advantages, c)
        log_ratio = sequences.mean(clipped, mask)
        policy = objectives.gmpo(log_ratio, advantages)
    else:
        policy, clip = objectives.SURROGATES[surrogate](logprobs, log_ratio, advantages, c)
    kl = torch.zeros_like(logprobs)
    if ref is not None:
        by_token = objective.kl_by_token()
        kl = objectives.kl_term(
            logprobs,
            ref,
            objectives.difference(logprobs, old) if by_token else unclamped_log_ratio,
            KL_ESTIMATORS[objective.kl_estimator],
            KL_GRADIENTS[objective.kl_gradient],
            c.kl_clamp,
            bounds,
            unshared=by_token or _unshared(mask, sequences, level),
        )
    return _Terms(policy, kl, log_ratio.exp().detach(), clip)


def _evaluate(
    function: TokenLoss, logprobs: Tensor, old: Tensor, ref: Tensor | None, advantages: Tensor
) -> Tensor:
    policy = function(logprobs, old, ref, advantages)
    if isinstance(policy, Tensor) and (policy.is_nested or policy.layout is not torch.strided):
        raise TypeError(f"objective must return a dense tensor, got {policy.layout}")
    if not isinstance(policy, Tensor) or policy.shape != logprobs.shape:
        given = tuple(policy.shape) if isinstance(policy, Tensor) else type(policy).__name__
        raise ValueError(
            "objective must return a loss per token, with the shape of logprobs "
            f"{tuple(logprobs.shape)}, got {given}"
        )
    if not policy.is_floating_point():
        raise TypeError(f"objective must return a floating-point loss, got {policy.dtype}")
    return policy.to(logprobs.dtype)


def _unshared(mask: Tensor, sequences: Sequences, level: str) -> Tensor:
    """Return which tokens have a ratio that depends on no other token."""
    if level != "sequence":
        return mask
    return sequences.spread(sequences.total(mask.to(torch.int64)), mask) == 1

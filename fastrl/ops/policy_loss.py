"""The policy loss from token log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl import reference
from fastrl.backend import Backend, resolve, torch_only
from fastrl.checks import as_mask, per_token, refuse_no_logprobs, unread_mask
from fastrl.contract import CenteringStats, TeacherStats
from fastrl.objective import Objective, TokenLoss, as_objective
from fastrl.objective.presets import Preset
from fastrl.ops._autograd.known_gradient import with_gradients
from fastrl.ops._loss.centering_term import add_centering
from fastrl.ops._loss.inputs import (
    LossInputs,
    as_padded,
    checked_constant,
    loss_inputs,
    unsupported_reason,
)
from fastrl.ops._loss.teacher_term import add_divergence, divergence_weights, without_gradient
from fastrl.ops._loss.term_weights import Normalizer
from fastrl.ops.metrics import LossMetrics
from fastrl.ops.token_weights import bounds_of
from fastrl.tracing import refuse_transforms


class PolicyLoss(NamedTuple):
    """A policy loss, its metrics, and the log-probabilities and entropies behind it.

    Attributes:
        loss: scalar, differentiable.
        metrics: 0-d tensors on the device, without gradient: `policy_loss` (without KL and
            entropy), `kl` to the reference policy (absent without one) and `kl_old` to the old
            policy (k3, in nats), `entropy` (in nats, exact if known, else the sample estimate -log
            p), `ratio_mean`, `ratio_max`, `ratio_min`, `clip_low`, `clip_high`, `clip_fraction`
            (the fraction of active tokens where the lower, the upper or either bound is active),
            `active_tokens`, `zero_grad_fraction` (the fraction of active tokens without gradient
            from any term). With a teacher, also the means of `divergence`, `teacher_entropy` and
            `teacher_agreement` (the same token is the most probable in both); with an exact KL,
            `kl` is its mean.
        logprobs: the log-probabilities of the tokens in nats, detached, `[B, T]` or `[N]`.
            `policy_loss` does not copy them: they share memory with its argument, unless that had
            to be cast or made contiguous. Computed from logits or hidden states, they are 0 at
            masked tokens; `linear_policy_loss` with `metrics=False` also leaves 0 at tokens that it
            did not project.
        entropy: the entropies in nats, in the shape of `logprobs`; None if `policy_loss` was called
            without them.

    Examples:
        >>> import torch, fastrl
        >>> result = fastrl.policy_loss(torch.zeros(1, 2), torch.ones(1), torch.ones(1, 2))
        >>> result.metrics["active_tokens"]
        tensor(2.)
    """

    loss: Tensor
    metrics: Mapping[str, Tensor]
    logprobs: Tensor
    entropy: Tensor | None


def policy_loss(
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    policy_weights: Tensor | None = None,
    objective: Preset | Objective | TokenLoss = "grpo",
    normalizer: Normalizer | None = None,
    group_size: int | None = None,
    group_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: Backend = "auto",
) -> PolicyLoss:
    """Return the loss of PPO, GRPO or another `Objective`, with gradients and metrics.

        L = sum_t w_t is_t [c_t f(log r_t, A_t) + kl_coef k_t] - entropy_coef sum_t w_t H_t
        log r_t = logprobs_t - old_logprobs_t

    `Objective` defines f and k, and `Objective.preset` names the papers (PPO, arXiv 1707.06347;
    GRPO, arXiv 2402.03300; and others). `token_weights` defines the weights w_t and
    `RolloutCorrection` the correction is_t; c_t are the `policy_weights`, or 0 for a token that a
    mask of the objective drops. The loss is differentiable in `logprobs` and `entropy`; all other
    arguments are constants.

    Args:
        logprobs: log-probabilities of the tokens under the policy, in nats, `[B, T]` or packed
            `[N]`.
        advantages: one per sequence, `[B]` (packed `[S]`, with `cu_seqlens`), or one per token,
            `[B, T]` (packed `[N]`, which takes precedence if S = N).
        mask: 0/1, the shape of `logprobs`; masked tokens have no effect, even if they are NaN.
        old_logprobs: log-probabilities under the old policy, the denominator of the ratio, in the
            shape of `mask`; None means on policy, with ratio 1.
        ref_logprobs: log-probabilities under the reference policy, in the shape of `mask`; needed
            if `kl_coef > 0`, and refused if it is None.
        rollout_logprobs: log-probabilities from the engine that sampled the tokens, in the shape of
            `mask`; for `rollout_correction` and `off_policy_threshold`.
        entropy: the entropy at each token in nats, the shape of `logprobs`; needed if
            `entropy_coef` is not 0 or `top_entropy_quantile` is below 1.
        policy_weights: constant factors in the policy term alone, such as importance weights or
            masks, in any shape that `advantages` may have.
        objective: the name of a preset, an `Objective`, or a function
            `(logprobs, old_logprobs, ref_logprobs, advantages) -> loss per token`.
        normalizer: the global denominator from `global_normalizer`, a number or a tensor of one
            element; None counts this call alone. If the objective has separate aggregations for KL
            or entropy, a mapping with the keys `"policy"`, `"kl"` and `"entropy"`.
        group_size: for `prompt-mean`: the number of consecutive sequences for the same prompt.
        group_ids: for `prompt-mean`: integers `[B]` (packed `[S]`), the prompt of each sequence.
        cu_seqlens: integers `[S + 1]`, the bounds of packed sequences, from 0 to N.
        backend: `auto`, or the backend to use. A function as objective needs `auto` or `reference`,
            because PyTorch evaluates it.

    Returns:
        The loss, a scalar, with its metrics, as a `PolicyLoss`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has the wrong shape or value, is missing, or has no effect.
        RuntimeError: the call is inside a transform of `torch.func`.

    Examples:
        >>> import torch, fastrl
        >>> logprobs = torch.tensor([[-1.8]], requires_grad=True)
        >>> result = fastrl.policy_loss(
        ...     logprobs,
        ...     torch.tensor([0.2]),
        ...     torch.tensor([[1]]),
        ...     old_logprobs=torch.tensor([[-2.1]]),
        ... )
        >>> round(result.metrics["ratio_mean"].item(), 2), round(result.loss.item(), 2)
        (1.35, -0.24)
        >>> result.loss.backward()
        >>> logprobs.grad  # clipped
        tensor([[0.]])
    """
    refuse_transforms("policy_loss")
    tokens = per_token("logprobs", logprobs)
    chosen = as_objective(objective)
    inputs = loss_inputs(
        tokens,
        unread_mask("mask", mask, tokens, "logprobs"),
        advantages,
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
        rollout_logprobs=rollout_logprobs,
        policy_weights=policy_weights,
        objective=chosen,
        normalizer=normalizer,
        group_size=group_size,
        group_ids=group_ids,
        cu_seqlens=cu_seqlens,
        dtype=torch.float64 if tokens.dtype == torch.float64 else torch.float32,
        backend=resolve(backend, tokens.device, tokens.dtype, unsupported_reason(chosen)),
    )
    if entropy is None and chosen.entropy_coef:
        raise ValueError("entropy is needed when objective.entropy_coef is not 0")
    if entropy is None and chosen.top_entropy_quantile < 1:
        raise ValueError("entropy is needed when objective.top_entropy_quantile is below 1")
    padded = inputs.padded("logprobs", tokens, tokens)
    refuse_no_logprobs("logprobs", padded.detach(), inputs.active)
    padded_entropy = None if entropy is None else inputs.padded("entropy", entropy, tokens)
    return loss_of_logprobs(padded, padded_entropy, inputs, tokens.shape)


def clipped_tokens(
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    old_logprobs: Tensor | None = None,
    objective: Preset | Objective | TokenLoss = "grpo",
    cu_seqlens: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Return the tokens of a policy loss on which a bound of the `Objective` acts.

    These are the tokens that the metrics `clip_low`, `clip_high` and `clip_fraction` count (of PPO,
    arXiv 1707.06347, those whose loss the clip changes). Where the advantage is negative, an upper
    bound of `ppo_clip` acts only by `Objective.dual_clip` or `delta`; those of `cispo` act at any
    sign.

    Args:
        logprobs: log-probabilities of the tokens under the policy, in nats, `[B, T]` or packed
            `[N]`.
        advantages: one per sequence, `[B]` (packed `[S]`, with `cu_seqlens`), or one per token,
            `[B, T]` (packed `[N]`, which takes precedence if S = N).
        mask: 0/1, the shape of `logprobs`; masked tokens have no effect, even if they are NaN.
        old_logprobs: log-probabilities under the old policy, the denominator of the ratio, in the
            shape of `mask`; None means on policy, with ratio 1.
        objective: the name of a preset, an `Objective`, or a function, which has no bounds.
        cu_seqlens: integers `[S + 1]`, the bounds of packed sequences, from 0 to N.
        backend: `auto` or `reference`; the function is plain torch on every device.

    Returns:
        int8 in the shape of `logprobs`: 1 where an upper bound acts (`clip_high`, `dual_clip` or
        `delta`), -1 where the lower one does, else 0; 0 at masked tokens.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has the wrong shape or value, or is missing.

    Examples:
        >>> import torch, fastrl
        >>> old, advantages = torch.full((1, 3), -1.0), torch.tensor([[1.0, 1.0, -1.0]])
        >>> new = torch.tensor([[-0.5, -1.5, -1.5]])
        >>> fastrl.clipped_tokens(new, advantages, torch.ones(1, 3), old_logprobs=old)
        tensor([[ 1,  0, -1]], dtype=torch.int8)
    """
    torch_only(backend)
    tokens, chosen = per_token("logprobs", logprobs), as_objective(objective)
    active, bounds = as_mask("mask", mask, tokens, "logprobs"), bounds_of(tokens, cu_seqlens)
    if tokens.dim() == 1 and bounds is None and chosen.level != "token":
        raise ValueError("cu_seqlens is needed for sequence-level ratios of packed tokens")
    constant = checked_constant("advantages", advantages, tokens, bounds)
    dtype = torch.float64 if tokens.dtype == torch.float64 else torch.float32
    padded, old = (
        None if x is None else as_padded(name, x, tokens, dtype).detach()
        for name, x in (("logprobs", tokens), ("old_logprobs", old_logprobs))
    )
    assert padded is not None
    active = active.view_as(padded)
    refuse_no_logprobs("logprobs", padded, active)
    if old is not None:
        refuse_no_logprobs("old_logprobs", old, active)
    if callable(chosen.surrogate):
        return torch.zeros_like(tokens, dtype=torch.int8)
    found = reference.clipped_tokens(
        padded, old, constant.to(dtype), active, chosen.arguments, bounds
    )
    return found.reshape(tokens.shape)


def loss_of_logprobs(
    logprobs: Tensor,
    entropy: Tensor | None,
    inputs: LossInputs,
    shape: torch.Size,
    compared: TeacherStats | None = None,
    centered: CenteringStats | None = None,
) -> PolicyLoss:
    """Return the differentiable loss of `[B, T]` log-probabilities, the results in `shape`."""
    detached = logprobs.detach()
    detached_entropy = None if entropy is None else entropy.detach()
    arguments = inputs.corrected_arguments(detached, detached_entropy)
    loss, slope, entropy_slope, metrics = inputs.evaluate(detached, detached_entropy, arguments)
    if torch.is_grad_enabled():
        loss = with_gradients(loss, [(logprobs, slope), (entropy, entropy_slope)], inputs.backend)
    if compared is None and centered is None:
        return policy_loss_result(loss, metrics, detached, detached_entropy, inputs, shape)
    active, still = inputs.active, without_gradient(slope, entropy_slope)
    of_term: list[Tensor] = []
    if centered is not None:
        weights = inputs.centering_weights(detached, detached_entropy)
        assert weights is not None
        loss, metrics, still, *of_term = add_centering(
            loss, metrics, centered, weights, arguments, active, still
        )
    if compared is not None:
        objective = inputs.objective
        weights = divergence_weights(objective, arguments, active)
        loss, metrics = add_divergence(loss, metrics, compared, weights, active, still, objective)
    metrics = torch.cat([metrics, *of_term])
    return policy_loss_result(loss, metrics, detached, detached_entropy, inputs, shape)


def policy_loss_result(
    loss: Tensor,
    metrics: Tensor,
    logprobs: Tensor,
    entropy: Tensor | None,
    inputs: LossInputs,
    shape: torch.Size,
) -> PolicyLoss:
    """Return a `PolicyLoss` with log-probabilities and entropies in the caller's shape."""
    if logprobs.shape != shape:
        logprobs = logprobs.reshape(shape)
        entropy = None if entropy is None else entropy.reshape(shape)
    has = {"has_kl": inputs.has_reference(), "has_centering": inputs.objective.score_centering}
    named = LossMetrics(metrics, **has)
    return PolicyLoss(loss, named, logprobs, entropy)

"""The policy loss from token log-probabilities: ratio, clip, KL, aggregation, metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.backend import Backend, resolve
from fastrl.checks import per_token, unread_mask
from fastrl.objective import Objective, TokenLoss, as_objective
from fastrl.objective.presets import Preset
from fastrl.ops._autograd.known_gradient import with_gradients
from fastrl.ops._loss.inputs import LossInputs, loss_inputs, unsupported_reason
from fastrl.ops._loss.term_weights import Normalizer
from fastrl.ops.metrics import LossMetrics
from fastrl.tracing import refuse_transforms


class PolicyLoss(NamedTuple):
    """A policy loss and what is worth watching about it.

    Attributes:
        loss: scalar, differentiable.
        metrics: 0-d tensors on the device, without gradient: `policy_loss` (without KL and
            entropy), `kl` to the reference and `kl_old` to the old policy (k3), `entropy` (the
            exact one where it is known, else the sampled estimate -log p), `ratio_mean`,
            `ratio_max`, `ratio_min`, `clip_low`, `clip_high`, `clip_fraction` (shares of valid
            tokens where a bound acts), `active_tokens`, `zero_grad_fraction`.
        logprobs: the log-probabilities of the tokens that the loss saw, detached, `[B, T]` or
            `[N]`; from logits or hidden states 0 at masked tokens.
        entropy: the entropies it saw, likewise; None where `policy_loss` was given none.

    Example:
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
    """Return the policy loss of PPO, GRPO and their variants, with gradient and metrics.

    L = sum_t w_t is_t [c_t f(log r_t, A_t) + kl_coef k_t] - entropy_coef sum_t w_t H_t with
    log r_t = logprobs - old_logprobs; f and k are those of `Objective`, w_t those of
    `token_weights`, is_t the rollout correction, c_t the `policy_weights`, 0 where a mask of the
    objective drops a token. Gradients flow to `logprobs` and `entropy`; everything else is a
    constant.

    Args:
        logprobs: `[B, T]` or packed `[N]`.
        advantages: `[B]` or `[B, T]`; packed `[S]` (with `cu_seqlens`) or `[N]`, which it is
            taken for where S = N.
        mask: 0/1, the shape of `logprobs`; masked tokens are inert, whatever they hold.
        old_logprobs: those of the policy that the ratio is against; None is the on-policy case,
            ratio exactly 1.
        ref_logprobs: those of the reference policy; needed where `kl_coef > 0`.
        rollout_logprobs: those of the engine that sampled; for `rollout_correction` and
            `off_policy_threshold`.
        entropy: the entropy at each token; needed where `entropy_coef` is not 0 or
            `top_entropy_quantile` below 1.
        policy_weights: constant factors of the policy term alone, shaped like `advantages`:
            importance weights or masks.
        objective: the name of a preset, an `Objective`, or a function
            `(logprobs, old_logprobs, ref_logprobs, advantages) -> loss per token`.
        normalizer: the global denominator, as in `token_weights`; a mapping of `"policy"`, `"kl"`
            and `"entropy"` where the objective has aggregations of their own for them.
        group_size: as in `token_weights`, for `prompt-mean`.
        group_ids: as in `token_weights`, for `prompt-mean`.
        cu_seqlens: int `[S + 1]`, where packed sequences begin and end.
        backend: `auto`, or the backend to use. A function as objective takes `auto` or `reference`:
            PyTorch evaluates it.

    Returns:
        `PolicyLoss`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has the wrong shape or value, is missing, or has no effect.

    Example:
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
        >>> logprobs.grad  # the clip holds
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
    of_tokens = None if entropy is None else inputs.padded("entropy", entropy, tokens)
    return loss_of_logprobs(padded, of_tokens, inputs, tokens.shape)


def loss_of_logprobs(
    logprobs: Tensor, entropy: Tensor | None, inputs: LossInputs, shape: torch.Size
) -> PolicyLoss:
    """Return the loss of `[B, T]` log-probabilities, differentiable; `shape` is the caller's."""
    seen = logprobs.detach()
    seen_entropy = None if entropy is None else entropy.detach()
    arguments = inputs.masked_arguments(seen, seen_entropy)
    loss, slope, entropy_slope, metrics = inputs.evaluate(seen, seen_entropy, arguments)
    if torch.is_grad_enabled():
        loss = with_gradients(loss, [(logprobs, slope), (entropy, entropy_slope)])
    return policy_loss_result(loss, metrics, seen, seen_entropy, shape)


def policy_loss_result(
    loss: Tensor, metrics: Tensor, logprobs: Tensor, entropy: Tensor | None, shape: torch.Size
) -> PolicyLoss:
    """Return loss and metrics with what the loss saw, in the caller's shape."""
    if logprobs.shape != shape:
        logprobs = logprobs.reshape(shape)
        entropy = None if entropy is None else entropy.reshape(shape)
    return PolicyLoss(loss, LossMetrics(metrics), logprobs, entropy)

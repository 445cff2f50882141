"""The policy loss from token log-probabilities: ratio, clip, KL, aggregation, metrics."""

from __future__ import annotations

from math import inf
from typing import NamedTuple, cast

import torch
from torch import Tensor

from fastrl import reference
from fastrl.backend import Backend, resolve
from fastrl.checks import as_mask, floating, on_device, per_token, same_shape, saveable
from fastrl.library import METRICS, operators
from fastrl.objective import (
    KL_ESTIMATORS,
    KL_GRADIENTS,
    LEVELS,
    RATIOS,
    Objective,
    TokenLoss,
    as_objective,
)
from fastrl.objective.presets import Preset
from fastrl.ops._autograd.known_gradient import with_gradients
from fastrl.ops._loss.term_weights import Normalizer, TermWeights, Weighing, base_weights
from fastrl.ops.token_weights import bounds_of
from fastrl.reference import Sequences
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

    Example:
        >>> import torch, fastrl
        >>> result = fastrl.policy_loss(torch.zeros(1, 2), torch.ones(1), torch.ones(1, 2))
        >>> result.metrics["active_tokens"]
        tensor(2.)
    """

    loss: Tensor
    metrics: dict[str, Tensor]


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
    """Return the policy loss of PPO, GRPO and kin, fused with its gradient and its metrics.

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
            importance weights or masks of one's own.
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
    inputs = loss_inputs(
        tokens,
        as_mask("mask", mask, tokens, "logprobs"),
        advantages,
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
        rollout_logprobs=rollout_logprobs,
        policy_weights=policy_weights,
        objective=objective,
        normalizer=normalizer,
        group_size=group_size,
        group_ids=group_ids,
        cu_seqlens=cu_seqlens,
        dtype=torch.float64 if tokens.dtype == torch.float64 else torch.float32,
    )
    if entropy is None and inputs.objective.entropy_coef:
        raise ValueError("entropy is needed where objective.entropy_coef is not 0")
    if entropy is None and inputs.objective.top_entropy_quantile < 1:
        raise ValueError("entropy is needed where objective.top_entropy_quantile is below 1")
    if entropy is not None:
        entropy = inputs.canonical("entropy", entropy, tokens, keep_gradient=True)
    chosen = resolve(backend, tokens.device, tokens.dtype, inputs.unable())
    return loss_of_logprobs(
        inputs.canonical("logprobs", tokens, tokens, keep_gradient=True), entropy, inputs, chosen
    )


class LossInputs(NamedTuple):
    """What the loss needs beside log-probabilities, all `[B, T]` and without gradient."""

    advantages: Tensor
    mask: Tensor
    weighing: Weighing
    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    cu_seqlens: Tensor | None
    sequences: Sequences
    objective: Objective

    # no property: torch.compile of torch 2.10 traces none of a NamedTuple
    def unable(self) -> str | None:
        """Return why compiled kernels cannot evaluate the objective, or None."""
        if callable(self.objective.ratio):
            return (
                "the objective is a Python function, which PyTorch evaluates (where no backend is "
                "named, the fastest does what is left)"
            )
        return None

    def canonical(
        self, name: str, value: object, like: Tensor, *, keep_gradient: bool = False
    ) -> Tensor:
        """Return a per-token tensor as contiguous `[B, T]` in the dtype of the arithmetic."""
        return _canonical(name, value, like, self.advantages.dtype, keep_gradient=keep_gradient)

    def kernel_objective(self) -> tuple[int, int, int, list[float]]:
        """Return ratio, KL and coefficients as the registered operators take them."""
        o = self.objective

        def bound(value: float | None) -> float:
            return inf if value is None else float(value)

        return (
            RATIOS.index(cast("str", o.ratio)),
            KL_ESTIMATORS.index(o.kl_estimator),
            KL_GRADIENTS.index(o.kl_gradient),
            [
                float(o.clip_low),
                float(o.clip_high),
                bound(o.dual_clip),
                bound(o.delta),
                float(o.sapo_temperature_pos),
                float(o.sapo_temperature_neg),
                float(o.kl_coef),
                bound(o.kl_clamp),
                *(float(distance) for distance in o.log_ratio_bounds),
                float(o.entropy_coef),
            ],
        )


def loss_inputs(
    tokens: Tensor,
    mask: Tensor,
    advantages: object,
    *,
    old_logprobs: object,
    ref_logprobs: object,
    rollout_logprobs: object,
    policy_weights: object,
    objective: object,
    normalizer: object,
    group_size: object,
    group_ids: object,
    cu_seqlens: object,
    dtype: torch.dtype,
) -> LossInputs:
    """Check the arguments that every policy loss shares; `tokens` is `[B, T]` or `[N]`."""
    chosen = as_objective(objective)
    packed = tokens.dim() == 1
    bounds = bounds_of(tokens, cu_seqlens)
    padded = (mask[None] if packed else mask).contiguous()
    sequences = reference.sequences_of(padded, bounds)
    if ref_logprobs is None and chosen.kl_coef:
        raise ValueError("ref_logprobs is needed where objective.kl_coef is above 0")
    corrections = chosen.rollout_corrections
    if rollout_logprobs is None and corrections:
        raise ValueError("rollout_logprobs is needed where objective.rollout_correction is set")
    drops = chosen.off_policy_threshold is not None
    if rollout_logprobs is not None and not (corrections or drops):
        raise ValueError(
            "rollout_logprobs has no effect unless objective.rollout_correction or "
            "objective.off_policy_threshold is set"
        )
    by_sequence = chosen.level != "token" or drops or any(c.level != "token" for c in corrections)
    if packed and bounds is None and by_sequence:
        raise ValueError("cu_seqlens is needed for sequence-level ratios of packed tokens")

    def constant(name: str, value: object) -> Tensor | None:
        return None if value is None else _canonical(name, value, tokens, dtype)

    def spread(name: str, value: object) -> Tensor:
        whole = _spread(name, value, tokens, padded, sequences, bounds)
        return saveable(whole.to(dtype).contiguous())

    base, entropy_on = base_weights(
        padded,
        sequences,
        chosen,
        packed=packed,
        cut=bounds is not None,
        normalizer=normalizer,
        group_size=group_size,
        group_ids=group_ids,
        dtype=dtype,
    )
    scores, old = spread("advantages", advantages), constant("old_logprobs", old_logprobs)
    factors = None if policy_weights is None else spread("policy_weights", policy_weights)
    return LossInputs(
        advantages=scores,
        mask=saveable(padded),
        weighing=Weighing(
            chosen,
            padded,
            sequences,
            scores,
            base,
            entropy_on,
            factors,
            old,
            constant("rollout_logprobs", rollout_logprobs),
        ),
        old_logprobs=old,
        ref_logprobs=constant("ref_logprobs", ref_logprobs),
        cu_seqlens=bounds,
        sequences=sequences,
        objective=chosen,
    )


def loss_of_logprobs(
    logprobs: Tensor, entropy: Tensor | None, inputs: LossInputs, backend: str
) -> PolicyLoss:
    """Return loss and metrics from `[B, T]` log-probabilities, differentiable through autograd."""
    weights = inputs.weighing.weights(
        logprobs.detach(), None if entropy is None else entropy.detach()
    )
    loss, slope, metrics = evaluate(logprobs.detach(), entropy, weights, inputs, backend)
    entropy_slope = None
    if inputs.objective.entropy_coef:
        of_entropy = weights.policy if weights.entropy is None else weights.entropy
        entropy_slope = -inputs.objective.entropy_coef * of_entropy
    if torch.is_grad_enabled():
        loss = with_gradients(loss, [(logprobs, slope), (entropy, entropy_slope)])
    return PolicyLoss(loss, named_metrics(metrics))


def evaluate(
    logprobs: Tensor,
    entropy: Tensor | None,
    weights: TermWeights,
    inputs: LossInputs,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss, slope dL/dlogprobs and the metrics vector; nothing here is differentiable."""
    entropy = None if entropy is None else entropy.detach()
    if backend == "reference":
        return reference.policy_loss(
            logprobs,
            inputs.advantages,
            inputs.mask,
            weights.policy,
            inputs.sequences,
            inputs.objective,
            old_logprobs=inputs.old_logprobs,
            ref_logprobs=inputs.ref_logprobs,
            entropy=entropy,
            kl_weights=weights.kl,
            entropy_weights=weights.entropy,
        )
    loss, slope, metrics = operators(backend).policy_loss_fwd(
        logprobs,
        inputs.advantages,
        inputs.mask,
        *weights,
        inputs.old_logprobs,
        inputs.ref_logprobs,
        entropy,
        inputs.cu_seqlens,
        LEVELS.index(inputs.objective.level),
        *inputs.kernel_objective(),
    )
    return loss, slope, metrics


def named_metrics(metrics: Tensor) -> dict[str, Tensor]:
    """Return the metrics vector as a dict of 0-d tensors."""
    return dict(zip(METRICS, metrics.detach().unbind(), strict=True))


def _canonical(
    name: str, value: object, like: Tensor, dtype: torch.dtype, *, keep_gradient: bool = False
) -> Tensor:
    result = same_shape(name, floating(name, value), like, "logprobs")
    result = result if keep_gradient else result.detach()
    result = result[None] if result.dim() == 1 else result
    return saveable(result.to(dtype).contiguous())


def _spread(
    name: str,
    value: object,
    tokens: Tensor,
    mask: Tensor,
    sequences: Sequences,
    cu_seqlens: Tensor | None,
) -> Tensor:
    """Spread values of `[B]` or `[S]` sequences over their tokens; return `[B, T]`."""
    given = floating(name, value).detach()
    on_device(name, given, tokens, "logprobs")
    if given.shape == tokens.shape:
        return given[None] if given.dim() == 1 else given
    by_sequence = tokens.dim() == 2 or cu_seqlens is not None
    if by_sequence and given.shape == (sequences.count,):
        return sequences.spread(given, mask)
    expected = f"{tuple(tokens.shape)}" + (f" or ({sequences.count},)" if by_sequence else "")
    raise ValueError(f"{name} must have shape {expected}, got {tuple(given.shape)}")

"""verl's token functions, value loss and KL on fastrl, under verl's names."""

from __future__ import annotations

import os
import sys

import torch
from torch import Tensor

import fastrl
from fastrl.integrations.formulas import kl_estimate, straight_through
from fastrl.integrations.verl.aggregation import agg_loss, aggregation
from fastrl.integrations.verl.logits import may_overwrite, rows, statistic
from fastrl.integrations.verl.masks import masked_mean

_KL_ESTIMATORS = {
    "kl": "k1",
    "k1": "k1",
    "abs": "abs",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
}


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """Return the log-probabilities of labels, log softmax(logits)[label], by `token_logprobs`.

    Args:
        logits: `[..., V]`.
        labels: integers `[...]`: the token that each position predicts.
        inplace_backward: let the backward write the gradient over the logits wherever verl's does,
            that is if verl has found flash-attn and VERL_DISABLE_FLASH_ATTN_CE is not 1. It is
            ignored otherwise, and if it would overwrite a leaf.

    Returns:
        Log-probabilities in nats, fp32 `[...]`.

    Raises:
        TypeError: the logits are a nested tensor or a DTensor, or an argument has the wrong type.
        ValueError: a label is outside the vocabulary.

    Examples:
        >>> import torch
        >>> from fastrl.integrations.verl import logprobs_from_logits
        >>> logprobs_from_logits(torch.zeros(1, 4), torch.tensor([2]))
        tensor([-1.3863])
    """
    flat = rows("logits", logits)
    # True is the default, so it does not mean that nothing else has saved the logits
    verl = sys.modules.get("verl.utils.torch_functional")
    overwrites = (
        inplace_backward
        and getattr(verl, "FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE", False)
        and os.environ.get("VERL_DISABLE_FLASH_ATTN_CE") != "1"  # verl also reads it at each call
    )
    return fastrl.token_logprobs(
        flat,
        labels.reshape(flat.shape[:-1]),
        inplace_backward=overwrites and may_overwrite(flat),
    ).reshape(logits.shape[:-1])


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Return the entropies -sum p log p, by `token_stats`.

    Args:
        logits: `[..., V]`; a logit of -inf contributes 0.

    Returns:
        Entropies in nats, fp32 `[...]`.

    Raises:
        TypeError: the logits are a nested tensor or a DTensor.

    Examples:
        >>> import torch
        >>> from fastrl.integrations.verl import entropy_from_logits
        >>> entropy_from_logits(torch.zeros(1, 4))
        tensor([1.3863])
    """
    return statistic("entropy", "logits", logits)


def entropy_from_logits_with_chunking(logits: Tensor, chunk_size: int = 2048) -> Tensor:
    """Return `entropy_from_logits`, which needs no chunking."""
    del chunk_size
    return entropy_from_logits(logits)


def calculate_sum_pi_squared_from_logits(logits: Tensor) -> Tensor:
    """Return sum p^2, fp32, `[...]` from logits `[..., V]`, by `token_stats`.

    The result has no gradient: verl only weights baselines with it.

    Examples:
        >>> import torch
        >>> from fastrl.integrations.verl.functions import calculate_sum_pi_squared_from_logits
        >>> calculate_sum_pi_squared_from_logits(torch.zeros(1, 4))
        tensor([0.2500])
    """
    return statistic("sum_sq_probs", "logits", logits)


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    loss_scale_factor: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the clipped value loss and the share of tokens where the clip acts, by `value_loss`.

        max((V - R)^2, (V_old + clip(V - V_old) - R)^2) / 2

    `agg_loss` aggregates the losses of tokens.

    Args:
        vpreds: V, `[B, T]`.
        returns: R, `[B, T]`.
        values: V_old, `[B, T]`.
        response_mask: 0/1, `[B, T]`; other values are factors.
        cliprange_value: bound on |V - V_old|.
        loss_agg_mode: how tokens are weighted: a row of the table in `token_weights`.
        dp_size: the number of ranks over which data parallelism averages the gradients.
        batch_num_tokens: the number of tokens in the global batch; None counts this batch.
        global_batch_size: the number of sequences in the global batch; None counts this batch.
        loss_scale_factor: the length in `seq-mean-token-sum-norm`, in tokens; None is T.

    Returns:
        Two scalars: the loss, and the share.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has the wrong shape or value.

    Examples:
        >>> import torch
        >>> from fastrl.integrations.verl import compute_value_loss
        >>> one = torch.ones(1, 2)
        >>> compute_value_loss(2 * one, 0 * one, one, one, cliprange_value=0.5)
        (tensor(2.), tensor(0.))
    """
    counts = (dp_size, batch_num_tokens, global_batch_size, loss_scale_factor)
    how, clip = aggregation(loss_agg_mode, response_mask, *counts), float(cliprange_value)
    if how.factors is not None:
        valid, dtype = response_mask.bool(), torch.promote_types(vpreds.dtype, torch.float32)
        v, r, old = (torch.where(valid, x, 0.0).to(dtype) for x in (vpreds, returns, values))
        held = torch.where(v > old + clip, old + clip, torch.where(v < old - clip, old - clip, v))
        free, bounded = (v - r).square() / 2, (held - r).square() / 2
        share = masked_mean((bounded > free).to(v.dtype), response_mask)
        loss = torch.where(bounded > free, bounded, free)  # `maximum` halves it in ties
        return agg_loss(loss, response_mask, loss_agg_mode, *counts), share
    result = fastrl.value_loss(
        vpreds, returns, how.mask, old_values=values, clip=clip, **how.options
    )
    return result.loss * how.scale, result.metrics["clip_fraction"]


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Return a KL estimate per token, or with `full` the KL itself.

    Args:
        logprob: log-probabilities of the sampled tokens under the policy in nats, any shape. With
            `full`, log-probabilities or logits of the whole vocabulary, `[B, T, V]`.
        ref_logprob: under the reference, the shape of `logprob`.
        kl_penalty: `kl` or `k1`, `abs`, `mse` or `k2`, `low_var_kl` or `k3` (clamped to +-10), as
            in `kl_divergence`. A `+` keeps the value and takes the gradient of k2, whose
            expectation is the gradient of the KL. `full` is KL(policy, reference) by
            `token_divergence`, with an exact gradient for the policy alone; so is `full+`. verl
            raises for `full`: its batches have log-probabilities of the sampled tokens only.

    Returns:
        The estimates in nats, the shape of `logprob`; with `full`, fp32 `[B, T]`.

    Raises:
        NotImplementedError: `kl_penalty` is unknown, or the arguments of `full` are not
            `[B, T, V]`.

    Examples:
        >>> import torch
        >>> from fastrl.integrations.verl import kl_penalty
        >>> kl_penalty(torch.tensor([-1.0]), torch.tensor([-2.0]), "low_var_kl")
        tensor([0.3679])
        >>> kl_penalty(torch.tensor([[[2.0, 0.0]]]), torch.zeros(1, 1, 2), "full")
        tensor([[0.3278]])
    """
    if kl_penalty.removesuffix("+") == "full":
        return _exact_kl(logprob, ref_logprob)
    estimator = _KL_ESTIMATORS.get(kl_penalty.removesuffix("+"))
    if estimator is None:
        raise NotImplementedError(
            f"kl_penalty must be one of {', '.join((*_KL_ESTIMATORS, 'full'))}, with or without "
            f"'+', got {kl_penalty!r}"
        )
    value = kl_estimate(logprob, ref_logprob, estimator)
    if not kl_penalty.endswith("+") or estimator == "k2":
        return value
    return straight_through(value, kl_estimate(logprob, ref_logprob, "k2"))


def _exact_kl(logits: Tensor, reference: Tensor) -> Tensor:
    for name, given in (("logprob", logits), ("ref_logprob", reference)):
        if given.dim() != 3:
            raise NotImplementedError(
                f"{name} must be [B, T, V] with kl_penalty 'full', log-probabilities or logits of "
                f"the whole vocabulary, got {tuple(given.shape)}. Without storing these, "
                "fastrl.linear_policy_loss(..., teacher=teacher, objective=Objective("
                "kl_estimator='exact', kl_coef=...)) has the exact KL as its KL term"
            )
    teacher = fastrl.Teacher.from_logits(rows("ref_logprob", reference), beta=1.0)
    return fastrl.token_divergence(rows("logprob", logits), teacher)

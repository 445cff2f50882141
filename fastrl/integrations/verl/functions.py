"""verl's token functions, advantages, value loss and KL on fastrl, under its names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

import fastrl
from fastrl.integrations.kl_estimates import kl_estimate, straight_through
from fastrl.integrations.verl.aggregation import agg_loss, aggregation
from fastrl.integrations.verl.masks import gae_with_factors, has_factors, masked_mean
from fastrl.ops._rows import refuse_unsafe_inplace

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
    """Return log softmax(logits)[label], `[...]` from logits `[..., V]`, by `token_logprobs`.

    `inplace_backward` lets the backward write the gradient over the logits, as verl does with
    flash-attn; it is ignored if that would overwrite a leaf.

    Example:
        >>> import torch
        >>> from fastrl.integrations.verl import logprobs_from_logits
        >>> logprobs_from_logits(torch.zeros(1, 4), torch.tensor([2]))
        tensor([-1.3863])
    """
    rows = _rows("logits", logits)
    return fastrl.token_logprobs(
        rows,
        labels.reshape(rows.shape[:-1]),
        inplace_backward=inplace_backward and _may_overwrite(rows),
    ).reshape(labels.shape)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Return -sum p log p, `[...]` from logits `[..., V]`, by `token_stats`.

    Logits of -inf contribute 0.

    Example:
        >>> import torch
        >>> from fastrl.integrations.verl import entropy_from_logits
        >>> entropy_from_logits(torch.zeros(1, 4))
        tensor([1.3863])
    """
    rows = _rows("logits", logits)
    any_token = torch.zeros(rows.shape[:-1], dtype=torch.int64, device=rows.device)
    entropy = fastrl.token_stats(rows, any_token, outputs=("entropy",)).entropy
    assert entropy is not None
    return entropy.reshape(logits.shape[:-1])


def entropy_from_logits_with_chunking(logits: Tensor, chunk_size: int = 2048) -> Tensor:
    """Return `entropy_from_logits`, which needs no chunking."""
    del chunk_size
    return entropy_from_logits(logits)


def compute_gae_advantage_return(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Return whitened GAE advantages and returns `[B, T]`; masked tokens are skipped.

    A_t = delta_t + gamma lam A_{t+1} by `gae`, then (A - mean) / sqrt(var + 1e-8) over the mask.
    Mask values between 0 and 1 interpolate between the two, as in verl.

    Example:
        >>> import torch
        >>> from fastrl.integrations.verl import compute_gae_advantage_return
        >>> rewards, mask = torch.tensor([[0.0, 9.0, 1.0]]), torch.tensor([[1, 0, 1]])
        >>> compute_gae_advantage_return(rewards, torch.zeros(1, 3), mask, 0.5, 1.0)[1]
        tensor([[0.5000, 0.0000, 1.0000]])
    """
    if has_factors(response_mask):
        return gae_with_factors(
            token_level_rewards, values, response_mask, float(gamma), float(lam)
        )
    result = fastrl.gae(
        token_level_rewards, values, response_mask, gamma=float(gamma), lam=float(lam)
    )
    return fastrl.whiten(result.advantages, response_mask), result.returns


def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Iterable[Any],
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> tuple[Tensor, Tensor]:
    """Return (r - mean) / (std + epsilon) of each response times its mask, twice, `[B, T]`.

    r is the sum of a response's rewards, `index` its group (any hashable); a group of one has
    mean 0 and std 1. `norm_adv_by_std_in_grpo=False` omits the division (Dr. GRPO).

    Example:
        >>> import torch
        >>> from fastrl.integrations.verl import compute_grpo_outcome_advantage
        >>> rewards, mask = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.ones(2, 2)
        >>> compute_grpo_outcome_advantage(rewards, mask, ["a", "a"])[0]
        tensor([[ 0.7071,  0.7071],
                [-0.7071, -0.7071]])
    """
    del config  # verl does not read it either
    numbers: dict[Any, int] = {}
    names = index.tolist() if hasattr(index, "tolist") else index
    ids = [numbers.setdefault(name, len(numbers)) for name in names]
    group_ids = torch.tensor(ids, dtype=torch.int64, device=token_level_rewards.device)
    scores = fastrl.group_advantages(
        token_level_rewards.sum(-1),
        group_ids=group_ids,
        scale="group" if norm_adv_by_std_in_grpo else "none",
        eps=epsilon,
        singleton="raw",
    ).advantages
    if norm_adv_by_std_in_grpo:
        alone = group_ids.bincount(minlength=len(numbers))[group_ids] == 1
        scores = torch.where(alone, scores / (1 + epsilon), scores)
    advantages = torch.where(response_mask.bool(), scores[:, None], 0.0) * response_mask
    return advantages, advantages


def compute_grpo_vectorized_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Iterable[Any],
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> tuple[Tensor, Tensor]:
    """Return `compute_grpo_outcome_advantage`, which is already vectorized."""
    return compute_grpo_outcome_advantage(
        token_level_rewards, response_mask, index, epsilon, norm_adv_by_std_in_grpo, config
    )


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

    max((V - R)^2, (V_old + clip(V - V_old) - R)^2) / 2, aggregated as in `agg_loss`.

    Example:
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
    """Return a KL estimate per token.

    `kl` / `k1`, `abs`, `mse` / `k2`, `low_var_kl` / `k3` (clamped to +-10). A `+` keeps the value
    and takes the gradient of k2, which is the gradient of the KL in expectation.

    Example:
        >>> import torch
        >>> from fastrl.integrations.verl import kl_penalty
        >>> kl_penalty(torch.tensor([-1.0]), torch.tensor([-2.0]), "low_var_kl")
        tensor([0.3679])
    """
    estimator = _KL_ESTIMATORS.get(kl_penalty.removesuffix("+"))
    if estimator is None:
        raise NotImplementedError(
            f"kl_penalty must be one of {', '.join(_KL_ESTIMATORS)}, with or without '+', "
            f"got {kl_penalty!r}"
        )
    value = kl_estimate(logprob, ref_logprob, estimator)
    if not kl_penalty.endswith("+") or estimator == "k2":
        return value
    return straight_through(value, kl_estimate(logprob, ref_logprob, "k2"))


def _rows(name: str, logits: Tensor) -> Tensor:
    if logits.is_nested or type(logits).__name__ == "DTensor":
        kind = "a nested tensor" if logits.is_nested else "a DTensor"
        raise TypeError(f"{name} must be a plain padded or packed tensor, got {kind}")
    return logits if logits.dim() in (2, 3) else logits.reshape(-1, logits.shape[-1])


def _may_overwrite(logits: Tensor) -> bool:
    try:
        refuse_unsafe_inplace("inplace_backward", logits)
    except ValueError:
        return False
    return True

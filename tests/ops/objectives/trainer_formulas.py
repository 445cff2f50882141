"""What other trainers compute, transcribed from their formulas: golden values in float64.

TRL 1.16 `GRPOTrainer` and `GMPOTrainer`, verl 0.9 `core_algos`, OpenRLHF 0.11 `PolicyLoss`, each
with the terms that its training step adds. Everything is `[B, T]`; `mask` is float 0/1.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Batch(NamedTuple):
    logprobs: Tensor
    old: Tensor
    ref: Tensor
    rollout: Tensor
    entropy: Tensor
    advantages: Tensor
    mask: Tensor


def sequence_mean(x, mask):
    """Masked mean of each row; 0 where the row is empty."""
    return (x * mask).sum(-1) / mask.sum(-1).clamp(min=1)


def token_mean(x, mask, count=None):
    return (x * mask).sum() / (mask.sum().clamp(min=1) if count is None else count)


def mean_of_filled(per_sequence, mask, count=None):
    filled = (mask.sum(-1) > 0).double()
    return (per_sequence * filled).sum() / (filled.sum() if count is None else count)


def ratio_within(ratio, low, high):
    return torch.clamp(ratio, 1 - low, 1 + high)


# --- TRL


def trl_sampling_ratio(b, mode, low, high):
    level, kind = mode.split("_")
    difference = (b.old - b.rollout) * b.mask
    if level == "sequence":
        difference = difference.sum(-1, keepdim=True)
    ratio = difference.exp()
    if kind == "truncate":
        return ratio.clamp(min=low, max=high)
    return ratio * ((ratio >= (low or 0)) & (ratio <= high))


def trl(
    b,
    loss_type,
    level="token",
    epsilon=(0.2, 0.2),
    delta=None,
    temperatures=(1.0, 1.05),
    beta=0.0,
    bias_correction=False,
    entropy_coef=0.0,
    top_entropy_quantile=1.0,
    off_policy_mask_threshold=None,
    sampling=None,
    max_completion_length=None,
    num_items=None,
):
    A, mask = b.advantages, b.mask
    log_ratio = b.logprobs - b.old
    if level == "sequence":
        log_ratio = sequence_mean(log_ratio, mask)[:, None]
    ratio = log_ratio.exp()
    top = torch.ones_like(mask)
    if top_entropy_quantile < 1:
        cut = torch.quantile(b.entropy[mask > 0], 1 - top_entropy_quantile)
        top = ((b.entropy >= cut) & (mask > 0)).double()

    if loss_type == "cispo":
        loss = -ratio.clamp(max=epsilon[1]).detach() * A * b.logprobs
    elif loss_type == "sapo":
        tau = torch.where(A > 0, *(torch.tensor(t, dtype=A.dtype) for t in temperatures))
        loss = -A * torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    elif loss_type == "gmpo":
        held = log_ratio.clamp(-epsilon[0], epsilon[1])
        one_sided = torch.where(
            A > 0, torch.minimum(log_ratio, held), torch.maximum(log_ratio, held)
        )
        loss = (
            -A * sequence_mean(one_sided, mask).exp()[:, None]
        )  # TRL: a constant -A for an empty row too
    else:
        free = ratio if delta is None else ratio.clamp(max=delta)
        loss = -torch.minimum(free * A, ratio_within(ratio, *epsilon) * A)
    if off_policy_mask_threshold is not None:
        sampled = b.old if sampling is None else b.rollout
        drift = sequence_mean(sampled - b.logprobs.detach(), mask)[:, None]
        loss = loss * ((A >= 0) | (drift <= off_policy_mask_threshold))
    loss = loss * top
    if sampling is not None:
        loss = loss * trl_sampling_ratio(b, *sampling)
    if beta:
        difference = b.ref - b.logprobs
        kl = difference.exp() - difference - 1
        loss = loss + beta * (kl * ratio if bias_correction else kl)
    loss = loss * mask

    rows = mask.shape[0]
    if loss_type in ("grpo", "sapo", "gmpo"):
        total = sequence_mean(loss, mask).mean()
    elif loss_type == "bnpo":
        total = token_mean(loss, mask)
    elif loss_type == "dr_grpo":
        total = loss.sum() / (rows * max_completion_length)
    elif loss_type == "luspo":
        total = loss.sum(-1).mean()
    else:
        total = loss.sum() / num_items
    return total - entropy_coef * token_mean(b.entropy, mask * top)


# --- verl


def verl_aggregate(x, mask, mode, tokens=None, sequences=None, scale=None):
    if mode == "token-mean":
        return token_mean(x, mask, tokens)
    if mode == "token-sum":
        return (x * mask).sum()
    if mode == "seq-mean-token-mean":
        return mean_of_filled((x * mask).sum(-1) / (mask.sum(-1) + 1e-8), mask, sequences)
    total = mean_of_filled((x * mask).sum(-1), mask, sequences)
    return total / (scale or mask.shape[-1]) if mode.endswith("norm") else total


def verl_rollout_weights(b, level, low, high):
    difference = b.old - b.rollout
    if level == "sequence":
        difference = (difference * b.mask).sum(-1, keepdim=True).expand_as(difference)
    raw = difference.clamp(-20, 20).exp()
    if low is None:
        return raw.clamp(max=high)
    return raw * ((raw >= low) & (raw <= high))


def verl(
    b,
    loss_mode,
    mode="token-mean",
    clip=(0.2, 0.2),
    clip_ratio_c=3.0,
    temperatures=(1.0, 1.05),
    kl_coef=0.0,
    kl_type="k3",
    entropy_coef=0.0,
    rollout=None,
    counts=None,
):
    A, mask = b.advantages, b.mask
    counts = counts or {}
    log_ratio = b.logprobs - b.old
    weights = 1.0 if rollout is None else verl_rollout_weights(b, *rollout)
    if loss_mode == "geo_mean":
        n = mask.sum(-1) + 1e-8
        sign = A.sign()
        held = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-clip[0], clip[1]))
        ratio = ((held * mask).sum(-1) / n).exp()
        policy = (-((A * mask).sum(-1) / n) * ratio).mean()
    else:
        by_sequence = loss_mode in ("gspo", "sapo")
        if loss_mode == "gspo":
            s = sequence_mean(log_ratio, mask).detach()[:, None]
            ratio = (b.logprobs - b.logprobs.detach() + s).clamp(max=10).exp()
            loss = torch.maximum(-A * ratio, -A * ratio_within(ratio, *clip))
        elif loss_mode == "reinforce":
            loss = -A * b.logprobs
        else:
            ratio = log_ratio.clamp(-20, 20).exp()
            if loss_mode == "cispo":
                loss = -ratio_within(ratio, *clip).detach() * A * b.logprobs
            elif loss_mode == "sapo":
                tau = torch.where(A > 0, *(torch.tensor(t, dtype=A.dtype) for t in temperatures))
                loss = -A * torch.sigmoid(tau * (ratio - 1)) * 4 / tau
            else:
                loss = torch.maximum(-A * ratio, -A * ratio_within(ratio, *clip))
                capped = torch.minimum(-A * clip_ratio_c, loss)
                loss = torch.where(A < 0, capped, loss)
        own = "seq-mean-token-mean" if by_sequence else mode
        policy = verl_aggregate(loss * weights, mask, own, **counts)
    total = policy - entropy_coef * verl_aggregate(b.entropy, mask, mode, **counts)
    if kl_coef:
        total = total + kl_coef * verl_aggregate(verl_kl(b, kl_type), mask, mode, **counts)
    return total


def verl_kl(b, kind):
    difference = b.logprobs - b.ref
    name = kind.rstrip("+")
    if name == "k1":
        value = difference
    elif name == "abs":
        value = difference.abs()
    elif name == "k2":
        value = difference.square() / 2
    else:
        x = (-difference).clamp(-20, 20)
        value = (x.exp() - x - 1).clamp(-10, 10)
    if not kind.endswith("+") or name == "k2":
        return value
    k2 = difference.square() / 2
    return k2 - k2.detach() + value.detach()


# --- OpenRLHF


def openrlhf_aggregate(x, mask, by_token=True, count=None):
    if by_token:
        return token_mean(x, mask, count)
    return mean_of_filled((x * mask).sum(-1) / (mask.sum(-1) + 1e-8), mask, count)


def openrlhf(
    b,
    kind="ppo",
    clip=(0.2, 0.2),
    dual_clip=None,
    correction=None,
    bounds=None,
    kl_coef=0.0,
    kl_estimator="k3",
    entropy_coef=0.0,
    count=None,
):
    A, mask = b.advantages, b.mask
    log_ratio = b.logprobs - b.old
    if kind == "gspo":
        ratio = sequence_mean(log_ratio, mask).exp()[:, None] * mask
    else:
        ratio = log_ratio.clamp(-20, 20).exp()
    gain = torch.minimum(ratio * A, ratio_within(ratio, *clip) * A)
    if dual_clip is not None:
        gain = torch.where(A < 0, torch.maximum(gain, dual_clip * A), gain)
    loss = -gain
    if correction is not None:
        difference = b.old - b.rollout
        weight = difference.exp()
        if correction == "icepop":
            weight = weight * ((weight >= bounds[0]) & (weight <= bounds[1]))
        elif correction == "tis":
            weight = weight.clamp(*bounds)
        else:
            mean = sequence_mean(difference, mask).exp()[:, None]
            weight = weight * ((mean >= bounds[0]) & (mean <= bounds[1]))
        loss = loss * weight
    total = openrlhf_aggregate(loss, mask, kind != "gspo", count)
    if kl_coef:
        difference = b.logprobs - b.ref
        if kl_estimator == "k2":
            difference = difference.square() / 2
        elif kl_estimator == "k3":
            difference = (-difference).exp() - 1 + difference
        total = total + kl_coef * openrlhf_aggregate(difference.clamp(-10, 10), mask)
    return total - entropy_coef * openrlhf_aggregate(b.entropy, mask)


# --- advantages of a group of rewards: eps and the group of one differ


def group_norm(rewards, group_ids, eps, alone):
    """(r - mean) / (std + eps), the unbiased std; a group of one gets `alone(r)`."""
    result = torch.empty_like(rewards)
    for i, own in enumerate(group_ids):
        group = torch.stack([r for r, g in zip(rewards, group_ids, strict=True) if g == own])
        if len(group) == 1:
            result[i] = alone(rewards[i])
            continue
        spread = math.sqrt(float((group - group.mean()).square().sum()) / (len(group) - 1))
        result[i] = (rewards[i] - group.mean()) / (spread + eps)
    return result

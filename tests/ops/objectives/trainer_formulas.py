"""What other trainers compute, transcribed from their formulas: golden values in float64.

TRL 1.16 `GRPOTrainer` and `GMPOTrainer`, verl 0.9 `core_algos`, OpenRLHF 0.11 `PolicyLoss`, each
with the terms that its training step adds. Everything is `[B, T]`; `mask` is float 0/1.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tests.integrations import openrlhf_formulas
from tests.integrations.verl import loss_formulas
from tests.integrations.verl.cases import transcribed
from tests.integrations.verl.formulas import agg_loss, kl_penalty


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


def token_mean(x, mask):
    return (x * mask).sum() / mask.sum().clamp(min=1)


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


def gamma_weights(A, log_ratio, mask, factors=None):
    """TRL's `get_gamma_weights` with its defaults."""
    lowest = math.log(1e-8)
    log_w = (log_ratio.clamp(-20, 20) * mask).sum(-1, keepdim=True)
    if factors is not None:
        log_w = log_w + factors.log().clamp(lowest, 20).sum(-1, keepdim=True)
    log_w = log_w.clamp(lowest, 20)
    k, decay = torch.where(A >= 0, 2.0, 3.0), torch.where(A >= 0, 3.0, 2.0)
    return (decay + k * log_w - decay * log_w.exp()).exp().detach()


def trl(
    b,
    loss_type,
    level="token",
    epsilon=(0.2, 0.2),
    delta=None,
    temperatures=(1.0, 1.05),
    beta=0.0,
    bias_correction=True,  # GMPO has no such correction
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
    factors = None if sampling is None else trl_sampling_ratio(b, *sampling)
    top = torch.ones_like(mask)
    if top_entropy_quantile < 1:
        cut = torch.quantile(b.entropy[mask > 0], 1 - top_entropy_quantile)
        top = ((b.entropy >= cut) & (mask > 0)).double()

    if loss_type == "cispo":
        loss = -ratio.clamp(max=epsilon[1]).detach() * A * b.logprobs
    elif loss_type == "sapo":
        tau = torch.where(A > 0, *(torch.tensor(t, dtype=A.dtype) for t in temperatures))
        loss = -A * torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    elif loss_type == "vespo":
        loss = -gamma_weights(A, log_ratio, mask, factors) * A * b.logprobs
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
    if sampling is not None and loss_type != "vespo":
        loss = loss * factors
    if beta:
        difference = b.ref - b.logprobs
        kl = difference.exp() - difference - 1
        corrects = bias_correction and loss_type != "gmpo"
        loss = loss + beta * (kl * ratio if corrects else kl)
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


# --- verl and OpenRLHF: the formulas that their drop-ins are tested with, and the terms beside them


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
    kl_coef=0.0,
    kl_type="k3",
    entropy_coef=0.0,
    rollout=None,
    **counts,
):
    bounds = {"clip_ratio_low": clip[0], "clip_ratio_high": clip[1]}
    config = transcribed(**bounds, tau_pos=1.0, tau_neg=1.05, global_batch_info=counts)
    weights = None if rollout is None else verl_rollout_weights(b, *rollout)
    of_policy = "seq-mean-token-mean" if loss_mode == "gspo" else mode
    formula = getattr(loss_formulas, f"compute_policy_loss_{loss_mode}")
    total, _ = formula(b.old, b.logprobs, b.advantages, b.mask, of_policy, config, weights)
    total = total - entropy_coef * agg_loss(b.entropy, b.mask, mode, **counts)
    if kl_coef:
        kl = kl_penalty(b.logprobs, b.ref, kl_type)
        total = total + kl_coef * agg_loss(kl, b.mask, mode, **counts)
    return total


def openrlhf(b, kl_coef=0.0, kl_estimator="k3", entropy_coef=0.0, **options):
    formula = openrlhf_formulas.PolicyLoss(**options)
    total = formula(b.logprobs, b.old, b.advantages, b.mask, b.rollout)[0]
    if kl_coef:
        kl = openrlhf_formulas.compute_approx_kl(b.logprobs, b.ref, kl_estimator=kl_estimator)
        total = total + kl_coef * token_mean(kl, b.mask)
    return total - entropy_coef * token_mean(b.entropy, b.mask)


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

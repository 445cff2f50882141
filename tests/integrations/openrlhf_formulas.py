"""What OpenRLHF 0.11 computes, transcribed from its formulas in float64.

Masked tokens are removed by `torch.where`; gradients come from autograd.
"""

import torch

from tests.integrations.formulas import chosen, clipped, gae, kl, mean, only, sequence_mean


def aggregate(f, mask, token_level, dp_size=1, batch_num_tokens=None, global_batch_size=None):
    if token_level:
        count, total, own = batch_num_tokens, only(mask, f).sum(), mask.sum()
    else:
        count, total = global_batch_size, sequence_mean(f, mask).sum()
        own = (mask.sum(-1) > 0).sum()
    return total / own if count is None else total / count * dp_size


class PolicyLoss:
    def __init__(self, **options):
        self.o = options

    def __call__(self, log_probs, old_log_probs, advantages, mask, rollout_log_probs, **counts):
        o, A = self.o, advantages.double()
        gspo, correct = o.get("policy_loss_type") == "gspo", "is_correction_level" in o
        lp, old, rollout = (only(mask, x) for x in (log_probs, old_log_probs, rollout_log_probs))
        log_ratio = (lp - old).clamp(-20, 20)
        if gspo:
            log_ratio = sequence_mean(lp - (rollout if correct else old), mask)
        r = log_ratio.exp()
        free, held = clipped(r, A, o.get("clip_eps_low", 0.2), o.get("clip_eps_high", 0.2))
        f, vllm_kl, filtered = torch.maximum(free, held), None, None
        if "dual_clip" in o:
            f = torch.where(A < 0, torch.minimum(f, -o["dual_clip"] * A), f)
        if correct and not gspo:
            weights, filtered = corrected(old, rollout, mask, **o)
            f, vllm_kl = f * weights, mean(rollout - old, mask)
        loss = aggregate(f, mask, o.get("token_level_loss", True) and not gspo, **counts)
        return loss, mean(held > free, mask), mean(old - lp, mask).detach(), vllm_kl, filtered


def corrected(
    old,
    rollout,
    mask,
    *,
    is_correction_level,
    is_correction_threshold,
    is_correction_mode="mask",
    is_correction_gating="ratio",
    **others,
):
    """Return the weights of the rollout correction, and the share of what it drops."""
    (low, high), by_sequence = is_correction_threshold, is_correction_level == "seq"
    statistic = old - rollout
    if is_correction_gating != "ratio":
        p, q = rollout.exp().clamp(1e-6, 1 - 1e-6), old.exp().clamp(1e-6, 1 - 1e-6)
        statistic = (p - q).abs()
        if is_correction_gating == "binary_kl":
            statistic = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    statistic = sequence_mean(statistic, mask) if by_sequence else statistic
    statistic = statistic.exp() if is_correction_gating == "ratio" else statistic
    inside = (statistic >= low) & (statistic <= high)
    weights = inside * (old - rollout).exp()
    if is_correction_mode == "clip":
        weights = statistic.clamp(low, high)
    share = (~inside).double()
    return weights, share.mean() if by_sequence else mean(share, mask)


class ValueLoss:
    def __init__(self, clip_eps=None, token_level_loss=True):
        self.clip_eps, self.token_level_loss = clip_eps, token_level_loss

    def __call__(self, values, old_values, returns, mask, **counts):
        f = (values.double() - returns) ** 2
        if self.clip_eps is not None:
            held = old_values + (values.double() - old_values).clamp(-self.clip_eps, self.clip_eps)
            f = torch.maximum(f, (held - returns) ** 2)
        return aggregate(f / 2, mask, self.token_level_loss, **counts)


def log_probs_from_logits(logits, labels, temperature=1.0):
    return chosen(logits.double() / temperature, labels)


def compute_approx_kl(
    log_probs, log_probs_base, log_probs_old=None, kl_estimator="k1", unbiased_gradient=False
):
    d = log_probs.double() - log_probs_base.double()
    value = kl(d, kl_estimator, 20).clamp(-10, 10)
    if not unbiased_gradient:
        return value
    weight = 1.0
    if log_probs_old is not None:
        weight = (log_probs - log_probs_old).double().exp().clamp(max=10).detach()
    slope = weight * d**2 / 2
    return value.detach() + slope - slope.detach()


def get_advantages_and_returns(values, rewards, action_mask, gamma, lambd):
    V, r = only(action_mask, values), only(action_mask, rewards)
    advantages = gae(r, V, torch.ones_like(V), gamma, lambd)
    return advantages, advantages + V

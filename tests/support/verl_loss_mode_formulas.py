"""verl 0.9's other policy losses, transcribed from their formulas in float64."""

import torch

from tests.support.verl_formulas import agg_loss, bounds, mean, only


def aggregated(f, mask, mode, config, weights, **metrics):
    f = f if weights is None else f * weights
    means = {f"actor/{key}": mean(x, mask).item() for key, x in metrics.items()}
    return agg_loss(f, mask, mode, **config.global_batch_info), means


def log_ratio_of(old_log_prob, log_prob, mask, bound=float("inf")):
    return only(mask, log_prob - old_log_prob).clamp(-bound, bound)


def within_a_divergence(old, log_prob, A, mask, mode, config, weights, kept):
    cap = config.get("clip_ratio_c", 20.0)
    log_ratio = log_ratio_of(old, log_prob, mask, 20).detach()
    r = log_ratio.exp()
    return aggregated(
        -A.double() * r.clamp(max=cap) * log_prob.double() * kept,
        mask,
        mode,
        config,
        weights,
        pg_clipfrac=~kept,
        ppo_kl=-log_ratio,
        pg_clipfrac_lower=(r > cap) & kept,
    )


def compute_policy_loss_dppo_tv(
    old_log_prob,
    log_prob,
    advantages,
    response_mask,
    loss_agg_mode="token-mean",
    config=None,
    rollout_is_weights=None,
):
    low, high = bounds(config)
    moved = log_prob.detach().double().exp() - old_log_prob.double().exp()
    kept = torch.where(advantages > 0, ~(moved > high), ~(-moved > low))
    arguments = (old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config)
    return within_a_divergence(*arguments, rollout_is_weights, kept)


def compute_policy_loss_dppo_kl(
    old_log_prob,
    log_prob,
    advantages,
    response_mask,
    loss_agg_mode="token-mean",
    config=None,
    rollout_is_weights=None,
):
    low, high = bounds(config)
    p, old = log_prob.detach().double().exp(), old_log_prob.double().exp()
    taken = torch.distributions.Bernoulli
    distance = torch.distributions.kl_divergence(taken(old), taken(p))
    up, down = (advantages > 0) & (p > old), ~(advantages > 0) & (p < old)
    kept = ~(up & (distance > high)) & ~(down & (distance > low))
    arguments = (old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config)
    return within_a_divergence(*arguments, rollout_is_weights, kept)


def compute_policy_loss_clip_cov(
    old_log_prob,
    log_prob,
    advantages,
    response_mask,
    loss_agg_mode="token-mean",
    config=None,
    rollout_is_weights=None,
):
    low, high = bounds(config)
    own, A = config.policy_loss, advantages.double()
    log_ratio = log_ratio_of(old_log_prob, log_prob, response_mask)
    r = log_ratio.exp()
    free, bounded = -A * r, -A * r.clamp(1 - low, 1 + high)
    current = log_prob.detach().double()
    together = (A - mean(A, response_mask)) * (current - mean(current, response_mask))
    eligible = (together > own.clip_cov_lb) & (together < own.clip_cov_ub)
    eligible &= response_mask.bool() & (bounded <= free)
    places, kept = eligible.nonzero(), torch.ones_like(A)
    if len(places):
        count = max(int(own.clip_cov_ratio * response_mask.sum().item()), 1)
        for place in places[torch.randperm(len(places))[:count]]:
            kept[tuple(place)] = 0
    return aggregated(
        torch.maximum(free, bounded) * kept,
        response_mask,
        loss_agg_mode,
        config,
        rollout_is_weights,
        pg_clipfrac=1 - kept,
        ppo_kl=-log_ratio,
    )


def compute_policy_loss_kl_cov(
    old_log_prob,
    log_prob,
    advantages,
    response_mask,
    loss_agg_mode="token-mean",
    config=None,
    rollout_is_weights=None,
):
    own, A, valid = config.policy_loss, advantages.double(), response_mask.bool()
    log_ratio = log_ratio_of(old_log_prob, log_prob, response_mask)
    scores, current = A[valid], log_prob.detach().double()[valid]
    together = torch.full_like(A, -float("inf"))
    together[valid] = (scores - scores.mean()) * (current - current.mean())
    count = max(1, int(len(scores) * own.kl_cov_ratio))
    penalized = together >= together.flatten().sort(descending=True).values[count - 1]
    return aggregated(
        -A * log_ratio.exp() + own.ppo_kl_coef * log_ratio.abs() * penalized,
        response_mask,
        loss_agg_mode,
        config,
        rollout_is_weights,
        ppo_kl=log_ratio.abs(),
    )


def compute_policy_loss_dro(
    old_log_prob,
    log_prob,
    advantages,
    response_mask,
    loss_agg_mode="token-mean",
    config=None,
    rollout_is_weights=None,
):
    log_ratio = log_ratio_of(old_log_prob, log_prob, response_mask)
    f = config.policy_loss.dro_beta * log_ratio**2 / 2 - log_prob.double() * advantages
    return aggregated(
        f, response_mask, loss_agg_mode, config, rollout_is_weights, ppo_kl=-log_ratio
    )


def compute_policy_loss_reinforce(
    rollout_log_prob,
    log_prob,
    advantages,
    response_mask,
    loss_agg_mode="seq-mean-token-sum",
    config=None,
    rollout_is_weights=None,
):
    log_ratio = log_ratio_of(rollout_log_prob, log_prob, response_mask)
    f = -log_prob.double() * advantages
    return aggregated(
        f, response_mask, loss_agg_mode, config, rollout_is_weights, ppo_kl=-log_ratio
    )

"""What verl 0.9 computes, transcribed from its formulas in float64, with its names and arguments.

Masked tokens are removed by `torch.where`, the others multiplied by their mask; gradients come from
autograd.
"""

import torch


def only(mask, x):
    return torch.where(mask.bool(), x.double(), 0.0)


def weighed(mask, x):
    return only(mask, x) * mask


def mean(x, mask):
    return weighed(mask, x).sum() / mask.sum()


def whiten(x, mask):
    centred, count = x - mean(x, mask), mask.double().sum()
    variance = mean(centred**2, mask) * count / (count - 1)
    return centred / (variance + 1e-8).sqrt()


def members(index):
    """Return for each response the responses of its group."""
    return [[j for j, other in enumerate(index) if other == name] for name in index]


def logprobs_from_logits(logits, labels, inplace_backward=True):
    return logits.double().log_softmax(-1).gather(-1, labels[..., None])[..., 0]


def entropy_from_logits(logits):
    return torch.distributions.Categorical(logits=logits.double()).entropy()


def entropy_from_logits_with_chunking(logits, chunk_size=2048):
    return entropy_from_logits(logits)


def compute_gae_advantage_return(token_level_rewards, values, response_mask, gamma, lam):
    rewards, V, mask = token_level_rewards.double(), values.double(), response_mask.double()
    advantages, (after, trace) = torch.zeros_like(V), torch.zeros(2, len(V)).double()
    for t in reversed(range(V.shape[1])):
        step = rewards[:, t] + gamma * after - V[:, t] + gamma * lam * trace
        trace = mask[:, t] * step + (1 - mask[:, t]) * trace
        after = mask[:, t] * V[:, t] + (1 - mask[:, t]) * after
        advantages[:, t] = trace
    return only(mask, whiten(advantages, mask)), advantages + V


def compute_grpo_outcome_advantage(
    token_level_rewards,
    response_mask,
    index,
    epsilon=1e-6,
    norm_adv_by_std_in_grpo=True,
    config=None,
):
    scores = token_level_rewards.double().sum(-1)
    result = torch.zeros_like(scores)
    for i, group in enumerate(members(index)):
        centre, spread = 0.0, 1.0
        if len(group) > 1:
            centre, spread = scores[group].mean(), scores[group].std()
        result[i] = scores[i] - centre
        if norm_adv_by_std_in_grpo:
            result[i] /= spread + epsilon
    result = weighed(response_mask, result[:, None].expand(response_mask.shape))
    return result, result


def compute_grpo_vectorized_outcome_advantage(
    token_level_rewards,
    response_mask,
    index,
    epsilon=1e-6,
    norm_adv_by_std_in_grpo=True,
    config=None,
):
    return compute_grpo_outcome_advantage(
        token_level_rewards, response_mask, index, epsilon, norm_adv_by_std_in_grpo, config
    )


def agg_loss(
    loss_mat,
    loss_mask,
    loss_agg_mode,
    dp_size=1,
    batch_num_tokens=None,
    global_batch_size=None,
    loss_scale_factor=None,
):
    x, lengths = weighed(loss_mask, loss_mat), loss_mask.sum(-1)
    tokens = loss_mask.sum() if batch_num_tokens is None else batch_num_tokens
    sequences = (lengths > 0).sum() if global_batch_size is None else global_batch_size
    if loss_agg_mode == "token-mean":
        return x.sum() / tokens * dp_size
    if loss_agg_mode == "token-sum":
        return x.sum() * dp_size
    if loss_agg_mode == "seq-mean-token-sum":
        return x.sum() / sequences * dp_size
    if loss_agg_mode == "seq-mean-token-sum-norm":
        width = loss_mask.shape[-1] if loss_scale_factor is None else loss_scale_factor
        return x.sum() / sequences * dp_size / width
    assert loss_agg_mode == "seq-mean-token-mean"
    return (x.sum(-1) / torch.where(lengths > 0, lengths, 1)).sum() / sequences * dp_size


def compute_value_loss(
    vpreds,
    returns,
    values,
    response_mask,
    cliprange_value,
    loss_agg_mode="token-mean",
    dp_size=1,
    batch_num_tokens=None,
    global_batch_size=None,
    loss_scale_factor=None,
):
    held = values.double() + (vpreds.double() - values).clamp(-cliprange_value, cliprange_value)
    free, bounded = (vpreds.double() - returns) ** 2, (held - returns) ** 2
    loss = agg_loss(
        torch.maximum(free, bounded) / 2,
        response_mask,
        loss_agg_mode,
        dp_size,
        batch_num_tokens,
        global_batch_size,
        loss_scale_factor,
    )
    return loss, mean(bounded > free, response_mask)


def kl_penalty(logprob, ref_logprob, kl_penalty):
    d = logprob.double() - ref_logprob.double()
    values = {
        "k1": d,
        "abs": d.abs(),
        "k2": d**2 / 2,
        "k3": (torch.exp((-d).clamp(-20, 20)) - 1 + d.clamp(-20, 20)).clamp(-10, 10),
    }
    names = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
    base = kl_penalty.removesuffix("+")
    value = values[names.get(base, base)]
    if base == kl_penalty:
        return value
    return value.detach() + values["k2"] - values["k2"].detach()


def policy_loss(f, mask, mode, config, weights, log_ratio, clipped=None, lower=None):
    f = f if weights is None else f * weights
    share = [0.0 if x is None else mean(x, mask).item() for x in (clipped, lower)]
    return agg_loss(f, mask, mode, **config.global_batch_info), {
        "actor/pg_clipfrac": share[0],
        "actor/ppo_kl": mean(-log_ratio, mask).item(),
        "actor/pg_clipfrac_lower": share[1],
    }


def bounds(config):
    low, high = config.clip_ratio_low, config.clip_ratio_high
    low = config.clip_ratio if low is None else low
    return low, config.clip_ratio if high is None else high


def compute_policy_loss_vanilla(
    old_log_prob,
    log_prob,
    advantages,
    response_mask,
    loss_agg_mode="token-mean",
    config=None,
    rollout_is_weights=None,
):
    low, high = bounds(config)
    A, cap = advantages.double(), config.get("clip_ratio_c", 3.0)
    log_ratio = only(response_mask, log_prob - old_log_prob).clamp(-20, 20)
    r = log_ratio.exp()
    free, bounded = -A * r, -A * r.clamp(1 - low, 1 + high)
    worse = torch.maximum(free, bounded)
    f = torch.where(A < 0, torch.minimum(worse, -A * cap), worse)
    lower = (A < 0) & (worse > -A * cap)
    return policy_loss(
        f,
        response_mask,
        loss_agg_mode,
        config,
        rollout_is_weights,
        log_ratio,
        bounded > free,
        lower,
    )


def compute_policy_loss_gspo(
    old_log_prob,
    log_prob,
    advantages,
    response_mask,
    loss_agg_mode="seq-mean-token-mean",
    config=None,
    rollout_is_weights=None,
):
    low, high = bounds(config)
    A, log_ratio = advantages.double(), only(response_mask, log_prob - old_log_prob)
    of_sequence = weighed(response_mask, log_ratio).sum(-1) / response_mask.sum(-1).clamp(min=1)
    moving = log_prob.double() - log_prob.double().detach()
    s = (moving + of_sequence.detach()[:, None]).clamp(max=10).exp()
    free, bounded = -A * s, -A * s.clamp(1 - low, 1 + high)
    return policy_loss(
        torch.maximum(free, bounded),
        response_mask,
        loss_agg_mode,
        config,
        rollout_is_weights,
        log_ratio,
        bounded > free,
    )


def compute_policy_loss_sapo(
    old_log_prob,
    log_prob,
    advantages,
    response_mask,
    loss_agg_mode="seq-mean-token-mean",
    config=None,
    rollout_is_weights=None,
):
    A, log_ratio = advantages.double(), only(response_mask, log_prob - old_log_prob)
    log_ratio = log_ratio.clamp(-20, 20)
    tau = torch.where(A > 0, config.tau_pos, config.tau_neg)
    f = -4 / tau * torch.sigmoid(tau * (log_ratio.exp() - 1)) * A
    return policy_loss(
        f, response_mask, "seq-mean-token-mean", config, rollout_is_weights, log_ratio
    )


def compute_policy_loss_cispo(
    old_log_prob,
    log_prob,
    advantages,
    response_mask,
    loss_agg_mode="token-mean",
    config=None,
    rollout_is_weights=None,
):
    low, high = bounds(config)
    log_ratio = only(response_mask, log_prob - old_log_prob).clamp(-20, 20)
    r = log_ratio.exp()
    held = r.clamp(1 - low, 1 + high)
    return policy_loss(
        -held.detach() * advantages.double() * log_prob,
        response_mask,
        loss_agg_mode,
        config,
        rollout_is_weights,
        log_ratio,
        held != r,
    )


def compute_policy_loss_geo_mean(
    old_log_prob,
    log_prob,
    advantages,
    response_mask,
    loss_agg_mode="token-mean",
    config=None,
    rollout_is_weights=None,
):
    low, high = bounds(config)
    log_ratio, lengths = only(response_mask, log_prob - old_log_prob), response_mask.sum(-1)
    A = only(response_mask, advantages)
    held = log_ratio.clamp(-low, high)
    chosen = A.sign() * torch.minimum(A.sign() * log_ratio, A.sign() * held)
    chosen = weighed(response_mask, chosen)
    f = -weighed(response_mask, A).sum(-1) / (lengths + 1e-8)
    f = f * (chosen.sum(-1) / (lengths + 1e-8)).exp()
    if rollout_is_weights is not None:
        log_weights = weighed(response_mask, (rollout_is_weights + 1e-10).log())
        f = f * (log_weights.sum(-1) / (lengths + 1e-8)).exp()
    beyond = held != log_ratio
    _, metrics = policy_loss(
        log_ratio,
        response_mask,
        "token-mean",
        config,
        None,
        log_ratio,
        beyond & (A > 0),
        beyond & (A < 0),
    )
    return f.mean(), metrics


def compute_policy_loss_gpg(
    old_log_prob,
    log_prob,
    advantages,
    response_mask,
    loss_agg_mode="token-mean",
    config=None,
    rollout_is_weights=None,
):
    f = -log_prob.double() * advantages
    loss, _ = policy_loss(f, response_mask, loss_agg_mode, config, rollout_is_weights, log_prob)
    return loss, {}

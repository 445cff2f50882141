"""What verl 0.9 computes, transcribed from its formulas in float64, with its names and arguments.

Masked tokens are removed by `torch.where`, the others multiplied by their mask; gradients come from
autograd.
"""

import torch

from tests.integrations.formulas import chosen, gae, kl, logits_of, mean, only, weighed


def whiten(x, mask):
    centred, count = x - mean(x, mask), mask.double().sum()
    variance = mean(centred**2, mask) * count / (count - 1)
    return centred / (variance + 1e-8).sqrt()


def members(index):
    """Return for each response the responses of its group."""
    return [[j for j, other in enumerate(index) if other == name] for name in index]


def logprobs_from_logits(logits, labels, inplace_backward=True):
    return chosen(logits, labels)


def entropy_from_logits(logits):
    logprobs = logits.double().log_softmax(-1)
    return -torch.where(logprobs.isinf(), 0.0, logprobs.exp() * logprobs).sum(-1)


def entropy_from_logits_with_chunking(logits, chunk_size=2048):
    return entropy_from_logits(logits)


def calculate_sum_pi_squared_from_logits(logits):
    return logits.detach().double().softmax(-1).square().sum(-1)


def linear(hidden, weight, labels, temperature=1.0):
    """Return log-probability and entropy of each token, `[N]`: verl's fused functions."""
    logits = logits_of(hidden.reshape(-1, hidden.shape[-1]), weight) / temperature
    return logprobs_from_logits(logits, labels.flatten()), entropy_from_logits(logits)


def compute_gae_advantage_return(token_level_rewards, values, response_mask, gamma, lam):
    advantages = gae(token_level_rewards, values, response_mask, gamma, lam)
    return only(response_mask, whiten(advantages, response_mask.double())), advantages + values


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


compute_grpo_vectorized_outcome_advantage = compute_grpo_outcome_advantage


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
    width = loss_mask.shape[-1] if loss_scale_factor is None else loss_scale_factor
    of_tokens = (x.sum(-1) / torch.where(lengths > 0, lengths, 1)).sum()
    return (
        dp_size
        * {
            "token-mean": x.sum() / tokens,
            "token-sum": x.sum(),
            "seq-mean-token-sum": x.sum() / sequences,
            "seq-mean-token-sum-norm": x.sum() / sequences / width,
            "seq-mean-token-mean": of_tokens / sequences,
        }[loss_agg_mode]
    )


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
    counts = (dp_size, batch_num_tokens, global_batch_size, loss_scale_factor)
    d = vpreds.double() - values  # whose slope on a bound is 1 with every torch
    held = values.double() + torch.where(d.abs() > cliprange_value, d.sign() * cliprange_value, d)
    free, bounded = (vpreds.double() - returns) ** 2, (held - returns) ** 2
    loss = agg_loss(torch.maximum(free, bounded) / 2, response_mask, loss_agg_mode, *counts)
    return loss, mean(bounded > free, response_mask)


def kl_penalty(logprob, ref_logprob, kl_penalty):
    d = logprob.double() - ref_logprob.double()
    names = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
    base = kl_penalty.removesuffix("+")
    kind = names.get(base, base)
    value = kl(d, kind, 20).clamp(-10, 10) if kind == "k3" else kl(d, kind)
    if base == kl_penalty:
        return value
    return value.detach() + kl(d, "k2") - kl(d, "k2").detach()

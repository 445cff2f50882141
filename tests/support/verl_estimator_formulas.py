"""verl 0.9's other advantage estimators, transcribed response by response in float64."""

import torch

from tests.support.verl_formulas import members, weighed, whiten


def of_each(score, token_level_rewards, response_mask, index):
    """Return score(response, its group, all rewards) times the mask, twice."""
    rewards = token_level_rewards.double().sum(-1)
    found = [score(i, group, rewards) for i, group in enumerate(members(index))]
    found = torch.stack([torch.as_tensor(x).double() for x in found])
    found = weighed(response_mask, found[:, None].expand(response_mask.shape))
    return found, found


def centred(i, group, rewards):
    return rewards[i] - rewards[group].mean() if len(group) > 1 else rewards[i]


def normalized(epsilon, by_std):
    def score(i, group, rewards):
        spread = rewards[group].std() if len(group) > 1 else 1.0
        return centred(i, group, rewards) / (spread + epsilon if by_std else 1.0)

    return score


def compute_gdpo_outcome_advantage(
    token_level_rewards,
    response_mask,
    index,
    epsilon=1e-6,
    norm_adv_by_std_in_grpo=True,
    config=None,
    non_tensor_batch=None,
    batch=None,
    **kwargs,
):
    parts, weights = [token_level_rewards], None
    if config is not None and non_tensor_batch is not None and batch is not None:
        keys, weights = config.get("gdpo_reward_keys"), config.get("gdpo_reward_weights", None)
        parts = [torch.tensor(list(non_tensor_batch[key])).float()[:, None] for key in keys]
    score = normalized(epsilon, norm_adv_by_std_in_grpo)
    found = [of_each(score, x, response_mask, index)[0] for x in parts]
    found = sum(w * x for w, x in zip(weights or [1.0] * len(parts), found, strict=True))
    found = weighed(response_mask, whiten(found, response_mask))
    return found, found


def compute_grpo_passk_outcome_advantage(
    token_level_rewards,
    response_mask,
    index,
    epsilon=1e-6,
    norm_adv_by_std_in_grpo=True,
    config=None,
    **kwargs,
):
    def score(i, group, rewards):
        if len(group) < 2:
            raise ValueError("at least 2 samples per group")
        ordered = sorted(rewards[group].tolist())
        gain = ordered[-1] - ordered[-2] if rewards[i].item() == ordered[-1] else 0.0
        by_std = config.get("norm_adv_by_std_in_grpo", True)
        return gain / (rewards[group].std() + epsilon) if by_std else gain

    return of_each(score, token_level_rewards, response_mask, index)


def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards, response_mask, index, epsilon=1e-6, config=None, **kwargs
):
    found, _ = of_each(centred, token_level_rewards, response_mask, index)
    found = weighed(response_mask, whiten(found, response_mask))
    return found, found


def compute_rloo_outcome_advantage(
    token_level_rewards, response_mask, index, epsilon=1e-6, config=None, **kwargs
):
    def score(i, group, rewards):
        others = [j for j in group if j != i]
        return rewards[i] - (rewards[others].mean() if others else 0.0)

    return of_each(score, token_level_rewards, response_mask, index)


def compute_rloo_vectorized_outcome_advantage(
    token_level_rewards, response_mask, index, epsilon=1e-6, config=None, **kwargs
):
    def score(i, group, rewards):
        others = [j for j in group if j != i]
        return rewards[i] - rewards[others].mean() if others else 0.0

    return of_each(score, token_level_rewards, response_mask, index)


def compute_opo_outcome_advantage(
    token_level_rewards, response_mask, index, epsilon=1e-6, config=None, **kwargs
):
    lengths = response_mask.double().sum(-1)

    def score(i, group, rewards):
        baseline = (lengths[group] * rewards[group]).sum() / lengths[group].sum()
        return rewards[i] - baseline if len(group) > 1 else rewards[i]

    return of_each(score, token_level_rewards, response_mask, index)


def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards, response_mask, config=None, **kwargs
):
    rewards, mask = token_level_rewards.double(), response_mask.double()
    returns, after = torch.zeros_like(rewards), torch.zeros(len(rewards)).double()
    for t in reversed(range(rewards.shape[1])):
        now = rewards[:, t] + config.gamma * after
        returns[:, t] = mask[:, t] * now
        after = mask[:, t] * now + (1 - mask[:, t]) * after
    return weighed(response_mask, whiten(returns, response_mask)), returns


def compute_remax_outcome_advantage(
    token_level_rewards, reward_baselines, response_mask, config=None, **kwargs
):
    rewards = weighed(response_mask, token_level_rewards)
    returns = rewards.sum(-1, keepdim=True) - rewards.cumsum(-1) + rewards
    return returns - reward_baselines.double()[:, None] * response_mask, returns


def compute_gpg_outcome_advantage(
    token_level_rewards,
    response_mask,
    index,
    epsilon=1e-6,
    f_norm=1.0,
    alpha=1.0,
    config=None,
    **kwargs,
):
    def score(i, group, rewards):
        rewarded = max((rewards != 0).sum().item(), 1)
        return len(rewards) / rewarded * centred(i, group, rewards) / f_norm

    return of_each(score, token_level_rewards, response_mask, index)

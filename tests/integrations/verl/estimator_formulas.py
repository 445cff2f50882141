"""verl 0.9's other advantage estimators, transcribed response by response in float64."""

import types

import torch

from tests.integrations.formulas import weighed
from tests.integrations.verl.formulas import members, whiten


def each(score):
    """Turn score(response, its group, x) into verl's function: the score times the mask, twice.

    x has the rewards and lengths of all responses, and the options.
    """

    def compute(token_level_rewards, response_mask, index, epsilon=1e-6, **options):
        x = types.SimpleNamespace(epsilon=epsilon, **options)
        x.rewards, x.lengths = token_level_rewards.double().sum(-1), response_mask.double().sum(-1)
        found = [torch.as_tensor(score(i, group, x)) for i, group in enumerate(members(index))]
        found = torch.stack([each.double() for each in found])[:, None]
        found = weighed(response_mask, found.expand(response_mask.shape))
        return found, found

    return compute


def whitened(advantages, mask):
    found = weighed(mask, whiten(advantages, mask))
    return found, found


def centred(i, group, x):
    return x.rewards[i] - x.rewards[group].mean() if len(group) > 1 else x.rewards[i]


@each
def normalized(i, group, x):
    spread = x.rewards[group].std() if len(group) > 1 else 1.0
    return centred(i, group, x) / (spread + x.epsilon if x.by_std else 1.0)


def compute_gdpo_outcome_advantage(
    token_level_rewards,
    response_mask,
    index,
    norm_adv_by_std_in_grpo=True,
    config=None,
    non_tensor_batch=None,
    batch=None,
):
    parts, weights = [token_level_rewards], None
    if config is not None and non_tensor_batch is not None and batch is not None:
        keys, weights = config.get("gdpo_reward_keys"), config.get("gdpo_reward_weights", None)
        parts = [torch.tensor(list(non_tensor_batch[key])).float()[:, None] for key in keys]
    by_std = norm_adv_by_std_in_grpo
    found = [normalized(x, response_mask, index, by_std=by_std)[0] for x in parts]
    total = sum(w * x for w, x in zip(weights or [1.0] * len(parts), found, strict=True))
    return whitened(total, response_mask)


@each
def compute_grpo_passk_outcome_advantage(i, group, x):
    ordered = sorted(x.rewards[group].tolist())
    gain = ordered[-1] - ordered[-2] if x.rewards[i].item() == ordered[-1] else 0.0
    by_std = x.config.get("norm_adv_by_std_in_grpo", True)
    return gain / (x.rewards[group].std() + x.epsilon) if by_std else gain


def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards, response_mask, index
):
    return whitened(each(centred)(token_level_rewards, response_mask, index)[0], response_mask)


@each
def compute_rloo_outcome_advantage(i, group, x):
    others = [j for j in group if j != i]
    return x.rewards[i] - (x.rewards[others].mean() if others else 0.0)


@each
def compute_rloo_vectorized_outcome_advantage(i, group, x):
    others = [j for j in group if j != i]
    return x.rewards[i] - x.rewards[others].mean() if others else 0.0


@each
def compute_opo_outcome_advantage(i, group, x):
    lengths, rewards = x.lengths[group], x.rewards[group]
    return x.rewards[i] - (0.0 if len(group) == 1 else (lengths * rewards).sum() / lengths.sum())


@each
def compute_gpg_outcome_advantage(i, group, x):
    rewarded = max((x.rewards != 0).sum().item(), 1)
    return len(x.rewards) / rewarded * centred(i, group, x) / x.f_norm


def compute_reinforce_plus_plus_outcome_advantage(token_level_rewards, response_mask, config):
    rewards, mask = token_level_rewards.double(), response_mask.double()
    returns, after = torch.zeros_like(rewards), torch.zeros(len(rewards)).double()
    for t in reversed(range(rewards.shape[1])):
        now = rewards[:, t] + config.gamma * after
        returns[:, t] = mask[:, t] * now
        after = mask[:, t] * now + (1 - mask[:, t]) * after
    return weighed(response_mask, whiten(returns, response_mask)), returns


def compute_remax_outcome_advantage(token_level_rewards, reward_baselines, response_mask):
    rewards = weighed(response_mask, token_level_rewards)
    returns = rewards.sum(-1, keepdim=True) - rewards.cumsum(-1) + rewards
    return returns - reward_baselines.double()[:, None] * response_mask, returns

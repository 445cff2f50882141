"""PPO's rewards per token, and four estimates of the advantage, each of which improves the last."""

from typing import Any

import torch
from torch import Tensor

from fastrl import discounted_returns, gae, group_advantages, whiten
from fastrl.train.config import PpoConfig

_KL_HORIZON = 10000  # completions


def compared(rewards: Tensor, config: PpoConfig) -> Tensor:
    """Return the rewards of sequences ``[N]`` in the form that the estimate needs.

    For ``group`` they are (reward - mean) / deviation over the completions of a prompt. The KL
    penalty is subtracted from the result and not from the rewards. Completions with equal rewards
    differ only in the penalty, whose noise, divided by its own deviation, would count as much as a
    reward. A reward that is NaN is none, and is left out.
    """
    if config.advantage != "group":
        return rewards
    return group_advantages(rewards, group_size=config.group_size, convention="trl").advantages


def token_rewards(rewards: Tensor, penalty: Tensor, mask: Tensor) -> Tensor:
    """Return rewards ``[N, T]``: the reward of a sequence at its last token, minus the penalty."""
    lengths = mask.sum(1, keepdim=True)
    last = mask & (mask.cumsum(1) == lengths)
    return torch.where(last, rewards[:, None], 0.0) - torch.where(mask, penalty, 0.0)


def advantages_and_returns(
    rewards: Tensor, values: Tensor | None, mask: Tensor, counted: Tensor, config: PpoConfig
) -> tuple[Tensor, Tensor]:
    """Return the advantages ``[N, T]`` of tokens with rewards r, and their discounted returns R.

    R_t = sum of gamma^(k - t) r_k over the tokens k >= t. With ``config.advantage``:

    - ``reward``: A = R. Tokens that led to a reward become more likely, even if the reward was
      small; the variance is large (REINFORCE, Williams 1992).
    - ``value``: A = R - V, with V learned: better or worse than expected. R still has the noise of
      all later tokens. Scaled to mean 0 and deviation 1, like ``gae``.
    - ``gae``: A = sum of (gamma lam)^(k - t) (r_k + gamma V_{k+1} - V_k): later tokens count
      through V, which has less noise and some error; lam weighs the two (Schulman et al. 2016).
    - ``group``: A = R of rewards that are compared within the group of a prompt, see `compared`:
      the group takes the place of V (GRPO, Shao et al. 2024).

    Args:
        rewards: Per token ``[N, T]``, from `token_rewards`; completions of a prompt are
            consecutive.
        values: ``[N, T]``, for ``value`` and ``gae``; None otherwise.
        mask: Bool ``[N, T]``, the tokens of the completions.
        counted: Bool ``[N, T]``, the tokens in the loss.
        config: Names the estimate, gamma, lam and group size.

    Returns:
        Advantages, and the targets of the value model, or without one the returns R.
    """
    if config.advantage in ("value", "gae"):
        assert values is not None
        lam = 1.0 if config.advantage == "value" else config.lam
        advantages, returns = gae(rewards, values, mask, gamma=config.gamma, lam=lam)
        return whiten(advantages, counted), returns
    returns = discounted_returns(rewards, mask, gamma=config.gamma)
    return returns, returns


class KlPenalty:
    """The coefficient of the KL penalty, which follows the measured KL if ``kl_target`` is set.

    After N completions with a mean KL per token of d it is multiplied by

        1 + clip(d / kl_target - 1, -0.2, 0.2) min(N, 10000) / 10000

    (Ziegler et al. 2019, https://arxiv.org/abs/1909.08593, section 2.2, in the form of TRL and
    verl).

    Attributes:
        coefficient: The current coefficient.
    """

    def __init__(self, config: PpoConfig) -> None:
        self.coefficient = config.kl_coef
        self._target = config.kl_target

    def update(self, kl: float, completions: int) -> None:
        """Adapt the coefficient to the mean KL of a step."""
        if self._target is not None:
            error = min(max(kl / self._target - 1, -0.2), 0.2)
            self.coefficient *= 1 + error * min(completions, _KL_HORIZON) / _KL_HORIZON

    def state_dict(self) -> dict[str, Any]:
        """Return the coefficient."""
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.coefficient = float(state_dict["coefficient"])

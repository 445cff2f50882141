"""The critic: the expected return, from the policy's last hidden states."""

from typing import Any

import torch
from torch import Tensor, nn

from fastrl.train.config import PpoConfig
from fastrl.train.policy import batches, policy_outputs
from fastrl.train.rollout import Rollout


class ValueHead(nn.Module):
    """A hidden layer and one value per token, initially 0."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.inner = nn.Linear(hidden_size, hidden_size)
        self.outer = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Values ``[n]`` of hidden states ``[n, H]``."""
        return self.outer(torch.relu(self.inner(hidden.float()))).squeeze(-1)  # type: ignore[no-any-return]


@torch.no_grad()
def rollout_values(model: Any, head: ValueHead, rollout: Rollout, config: PpoConfig) -> Tensor:
    """Values ``[N, T]`` before each token of the completions, by micro-batches."""
    values = torch.zeros_like(rollout.logprobs)
    for batch in batches(rollout, torch.arange(len(values)), rollout.mask, config):
        batch.put(head(policy_outputs(model, batch, config).states), into=values)
    return values

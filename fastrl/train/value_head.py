"""The critic: what a sequence will return, read from the policy's last hidden state."""

from typing import Any

import torch
from torch import Tensor, nn

from fastrl.train.config import PpoConfig
from fastrl.train.gradients import autocast
from fastrl.train.rollout import Rollout, forward


class ValueHead(nn.Module):
    """A hidden layer and one number per token, 0 for every token at the start."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.inner = nn.Linear(hidden_size, hidden_size)
        self.outer = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Values [N, T] of hidden states [N, T, H]."""
        return self.outer(torch.relu(self.inner(hidden.float()))).squeeze(-1)  # type: ignore[no-any-return]


def logits_and_values(
    model: Any, head: ValueHead, rollout: Rollout, config: PpoConfig
) -> tuple[Tensor, Tensor]:
    """Logits [N, T, V] for the sampled tokens, values [N, T] of the states they were chosen in."""
    with autocast(config, model):
        out = forward(model, rollout, hidden=True)
    states = out.hidden_states[-1][:, -rollout.token_ids.shape[1] - 1 : -1]
    return out.logits[:, :-1], head(states)


@torch.no_grad()
def rollout_values(model: Any, head: ValueHead, rollout: Rollout, config: PpoConfig) -> Tensor:
    """Values [N, T], a micro-batch at a time."""
    rows = torch.arange(len(rollout.mask)).split(config.micro_batch)
    return torch.cat([logits_and_values(model, head, rollout.rows(r), config)[1] for r in rows])

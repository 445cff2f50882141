"""The critic: the expected return before each token, from hidden states."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from fastrl.integrations.transformers import backbone
from fastrl.train.config import PpoConfig
from fastrl.train.packing import PackedBatch
from fastrl.train.policy import (
    PolicyOutputs,
    batches,
    hidden_states,
    policy_logprobs,
    policy_outputs,
)
from fastrl.train.rollout import Rollout


class ValueModel(nn.Module):
    """A hidden layer and one value per token, initially 0, on hidden states.

    With ``value_model="shared"`` these are the policy's hidden states. With ``"separate"`` they
    come from a backbone of its own, a copy of the policy's that only the value loss trains.
    """

    def __init__(self, model: Any, config: PpoConfig) -> None:
        super().__init__()
        width = model.get_input_embeddings().weight.shape[1]
        self.inner = nn.Linear(width, width)
        self.outer = nn.Linear(width, 1)
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)
        self.backbone: Any = None
        if config.value_model == "separate":
            self.backbone = copy.deepcopy(backbone(model))
        self.to(model.device)

    def forward(self, outputs: PolicyOutputs, batch: PackedBatch, config: PpoConfig) -> Tensor:
        """Return values ``[n]`` before the scored tokens; ``outputs`` are the policy's."""
        states = outputs.states
        if self.backbone is not None:
            states = hidden_states(self.backbone, batch, config)
        assert states is not None
        return self.outer(torch.relu(self.inner(states.float()))).squeeze(-1)  # type: ignore[no-any-return]

    def follow(self, model: Any) -> None:
        """Copy the policy's current weights to a separate backbone."""
        if self.backbone is not None:
            self.backbone.load_state_dict(backbone(model).state_dict())


@torch.no_grad()
def rollout_values_and_logprobs(
    model: Any, critic: ValueModel, rollout: Rollout, config: PpoConfig
) -> tuple[Tensor, Tensor]:
    """Return the values before the tokens of completions, and log-probabilities, ``[N, T]`` each.

    A backbone that policy and critic share runs once.
    """
    values, logprobs = torch.zeros_like(rollout.logprobs), torch.zeros_like(rollout.logprobs)
    for batch in batches(rollout, torch.arange(len(values)), rollout.mask, config):
        outputs = policy_outputs(model, batch, config)
        of_tokens = critic(outputs, batch, config)
        batch.put(of_tokens, into=values)
        batch.put(policy_logprobs(outputs, batch, config), into=logprobs)
    return values, logprobs

"""The models beside the policy: its reference, a teacher, and the critic of PPO."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastrl import Teacher
from fastrl.integrations.transformers import backbone, lm_head
from fastrl.train.checkpoint import reading, store, unchanged_generators, verify
from fastrl.train.config import GrpoConfig, PpoConfig, RunConfig
from fastrl.train.loading import load, model_path
from fastrl.train.packing import PackedBatch
from fastrl.train.policy import (
    PolicyOutputs,
    batches,
    check_head,
    check_packing,
    completion_logprobs,
    hidden_states,
    policy_logprobs,
    policy_outputs,
)
from fastrl.train.rollout import Rollout
from fastrl.train.vocabulary import limit_rows, token_count


class Reference:
    """The reference of the KL: a frozen copy of the initial policy, or the model without adapter.

    Raises:
        ValueError: The stored copy is missing or damaged.
    """

    def __init__(self, model: Any, config: RunConfig, stored: Path, *, resumed: bool) -> None:
        self._config, self._adapted, self._frozen = config, model, None
        if config.lora_rank is not None:
            return
        self._frozen = copy.deepcopy(model).requires_grad_(False)  # with its attention, tiles, ...
        if not resumed:
            store(stored, self._frozen.save_pretrained)
            return
        with reading(stored), unchanged_generators():  # making a model may use them
            verify(stored)
            weights = type(model).from_pretrained(stored, dtype=model.dtype, use_safetensors=True)
            self._frozen.load_state_dict(weights.state_dict())

    def logprobs(self, rollout: Rollout, rows: Tensor) -> Tensor:
        """Return log-probabilities ``[N, T]`` of ``rows``; see `completion_logprobs`."""
        if self._frozen is not None:
            return completion_logprobs(self._frozen, rollout, rows, self._config)
        with self._adapted.disable_adapter():
            return completion_logprobs(self._adapted, rollout, rows, self._config)


class TeacherModel:
    """The model that ``config.teacher`` names, which must have the same tokens as the policy.

    It is frozen, and runs over the policy's own samples. It computes in the run's precision and at
    its temperature, as the policy does: if the two agree, they agree at every temperature.

    Raises:
        ValueError: There is no such model, it cannot be run like the policy, or it has other
            tokens.
    """

    def __init__(self, config: GrpoConfig, policy: Any, tokenizer: Any) -> None:
        self._config, path = config, model_path(str(config.teacher))
        dtype = "bfloat16" if config.precision == "bfloat16" else config.dtype
        try:
            with unchanged_generators():  # a run with a teacher begins as one without
                self.model, own = load(path, policy.device, dtype)
            check_head(self.model, config)
            self.model.requires_grad_(False).set_attn_implementation(config.attention)
            check_packing(self.model, config)
        except (ImportError, ValueError) as error:
            raise ValueError(f"teacher: {error}") from error
        rows = {model: _rows(model, config) for model in (policy, self.model)}
        needed = min(token_count(tokenizer), rows[policy])
        if own.get_vocab() != tokenizer.get_vocab() or rows[self.model] < needed:
            raise ValueError(
                f"teacher must have the tokens of the model, {config.model or 'the small new one'}"
                f": {len(tokenizer)}; {path} has {len(own)} tokens and a head of "
                f"{rows[self.model]} rows, "
                f"{len(own.get_vocab().items() & tokenizer.get_vocab().items())} tokens are the "
                "same"
            )
        # heads may be padded to different numbers of rows: leave out what only one of them has
        for model, count in rows.items():
            if count > min(rows.values()):
                limit_rows(model, min(rows.values()))

    @torch.no_grad()
    def __call__(self, batch: PackedBatch) -> Teacher:
        """Return the teacher's distributions at the scored tokens of a packed row."""
        states, logits, head = policy_outputs(self.model, batch, self._config)
        beta, temperature = self._config.teacher_beta, self._config.temperature
        options: dict[str, Any] = {"beta": beta, "temperature": temperature}
        if logits is not None:
            return Teacher.from_logits(logits, **options)
        assert states is not None
        assert head is not None
        return Teacher.from_hidden(states, **head.arguments(), **options)


def _rows(model: Any, config: RunConfig) -> int:
    """Return the number of rows of the head that the loss reads."""
    head = lm_head(model) if config.loss == "linear" else model.get_output_embeddings()
    return len(head.weight)


class ValueModel(nn.Module):
    """The critic, a hidden layer and one value per token, initially 0, on hidden states.

    A value is the expected return before the token. With ``value_model="shared"`` the hidden states
    are the policy's. With ``"separate"`` they come from a backbone of its own, a copy of the
    policy's that only the value loss trains.
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

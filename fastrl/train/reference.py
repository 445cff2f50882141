"""The reference policy of the KL, which is the policy before the first step, frozen."""

import copy
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from fastrl.train.checkpoint import store, unchanged_generators, verify
from fastrl.train.config import RunConfig
from fastrl.train.policy import completion_logprobs
from fastrl.train.rollout import Rollout


class Reference:
    """The initial policy: a frozen copy, or the model without its adapter.

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
        try:
            verify(stored)
            with unchanged_generators():  # making a model may use them, copying it does not
                weights = type(model).from_pretrained(
                    stored, dtype=model.dtype, use_safetensors=True
                )
            self._frozen.load_state_dict(weights.state_dict())
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise ValueError(f"resume: {stored} cannot be read: {error}") from error

    def logprobs(self, rollout: Rollout, rows: Tensor) -> Tensor:
        """Return log-probabilities ``[N, T]`` of ``rows``; see `completion_logprobs`."""
        if self._frozen is not None:
            return completion_logprobs(self._frozen, rollout, rows, self._config)
        with self._adapted.disable_adapter():
            return completion_logprobs(self._adapted, rollout, rows, self._config)

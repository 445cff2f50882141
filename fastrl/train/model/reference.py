"""The reference of the KL: the policy before the first step, frozen."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from fastrl.train.config import GrpoConfig, PpoConfig, RunConfig
from fastrl.train.model import stored_model
from fastrl.train.model.stored_model import REFERENCE
from fastrl.train.policy import rollout_logprobs
from fastrl.train.rollout import Rollout
from fastrl.train.run import checkpoint


class Reference:
    """The initial policy: a frozen copy, or the model without its adapter.

    Args:
        model: The model that is trained.
        config: With ``lora_rank``, the model has an adapter, and nothing is copied or stored.
        run: The directory of the run, which keeps the copy for when it is resumed.
        resumed: Whether the copy is loaded from there.

    Raises:
        ValueError: The stored copy is missing or damaged.
    """

    def __init__(self, model: Any, config: RunConfig, run: Path, *, resumed: bool) -> None:
        self._adapted, self._frozen = model, None
        if config.lora_rank is None:
            self._frozen = _frozen_copy(model, run / REFERENCE, resumed=resumed)

    @contextmanager
    def policy(self) -> Iterator[Any]:
        """The reference as a model, to be called without gradients."""
        if self._frozen is not None:
            yield self._frozen
            return
        with self._adapted.disable_adapter():
            yield self._adapted

    def logprobs(self, rollout: Rollout, rows: Tensor, config: GrpoConfig | PpoConfig) -> Tensor:
        """Log-probabilities ``[N, T]`` of the completions ``rows``, as `rollout_logprobs`."""
        with self.policy() as model:
            return rollout_logprobs(model, rollout, rows, config)


def _frozen_copy(model: Any, path: Path, *, resumed: bool) -> Any:
    frozen = copy.deepcopy(model).requires_grad_(False)  # with its attention, tiles and so on
    if not resumed:
        stored_model.store(path, frozen.save_pretrained)
        return frozen
    stored_model.verify(path)
    before = checkpoint.rng_state()  # making a model may use the generators, copying does not
    try:
        stored = type(model).from_pretrained(
            path, dtype=model.dtype, use_safetensors=True, trust_remote_code=False
        )
        frozen.load_state_dict(stored.state_dict())
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"resume: {path} cannot be read: {error}") from error
    checkpoint.set_rng_state(before)
    return frozen

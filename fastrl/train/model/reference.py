"""The reference of the KL: the policy before the first step, frozen."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM

from fastrl.train.config import GrpoConfig, PpoConfig, RunConfig
from fastrl.train.distributed import ranks
from fastrl.train.distributed.sharding import sharded, whole_state
from fastrl.train.model import stored_model
from fastrl.train.model.recomputation import tile_mlps, without_dropout
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
            if ranks.count() > 1 and config.parallel == "fsdp":
                self._frozen = _frozen_shards(model, config, run / REFERENCE, resumed=resumed)
            else:
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


def _frozen_shards(model: Any, config: RunConfig, path: Path, *, resumed: bool) -> Any:
    """Another model with the stored weights, sharded: FSDP2 cannot copy one."""
    if not resumed:
        weights = whole_state(model)
        save = partial(model.save_pretrained, state_dict=weights)
        ranks.from_first(lambda: stored_model.store(path, save))
    before = checkpoint.rng_state()
    frozen = ranks.agreed(lambda: _stored(path, config, model.dtype)).requires_grad_(False)
    sharded(frozen, config, model.device)
    without_dropout(frozen)
    if config.mlp_tile is not None:
        tile_mlps(frozen, config.mlp_tile)
    frozen.set_attn_implementation(config.attention)
    checkpoint.set_rng_state(before)
    return frozen


def _stored(path: Path, config: RunConfig, dtype: torch.dtype) -> Any:
    stored_model.verify(path)
    try:
        return AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, use_safetensors=True, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"resume: {path} cannot be read: {error}") from error


def _frozen_copy(model: Any, path: Path, *, resumed: bool) -> Any:
    frozen = copy.deepcopy(model).requires_grad_(False)  # with its attention, tiles and so on
    if not resumed:
        ranks.from_first(lambda: stored_model.store(path, frozen.save_pretrained))
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

"""Which backbones of a trainer run on packed rows, and why others do not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from transformers.utils import logging

from fastrl.integrations.transformers import backbone
from fastrl.integrations.transformers.packed import (
    is_whole,
    packed_forward,
    why_not_packed,
    why_padded_now,
)
from fastrl.integrations.transformers.wrappers import causal_model

logger = logging.get_logger(__name__)


class PackedBackbones:
    """The backbones of a trainer's models, on rows without padding where that is possible.

    Some reasons against it hold for the whole run and on all ranks, others for some calls and maybe
    on one rank. Only the first kind decides which rank runs a trial, because a trial of a sharded
    backbone takes all ranks.
    """

    def __init__(
        self, trainer: Any, *, packed: bool | None, tokens: int | None, reason: str | None
    ) -> None:
        """Try the backbones that can run now; the arguments are those of `FusedModels`."""
        self._trainer = trainer
        self._tokens = tokens
        self._required = bool(packed)
        self._given_up = "packed is False" if packed is False else None  # the same on all ranks
        self._left: dict[nn.Module, str] = {}  # backbones whose last call was not packed
        self._said: set[str] = set()
        self._reads_padding = False
        self._could_be_packed = False  # but for that: no sequence has gaps
        self._proven: set[nn.Module] = set()
        self._give_up(reason)
        if not self._required and trainer.accelerator.state.dynamo_plugin.backend != "NO":
            self._give_up("torch_compile=True, and packed rows leave the graph for each attention")
        self._give_up(_why_its_loss_reads_padding(trainer))
        for part in map(backbone, models_of(trainer) if self._given_up is None else ()):
            if is_whole(part) and not _is_loaded_on_one_rank(trainer):
                self._give_up(why_not_packed(part))
                self._proven.add(part)
            self._look_at(part)

    @property
    def reason(self) -> str | None:
        """Why the backbones do not run on packed rows, or None."""
        return self._given_up or next(iter(self._left.values()), None)

    def forward(
        self, part: nn.Module, padded: Callable[..., Any], own: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return the forward of a backbone on packed rows, or on TRL's batches where they fail.

        A sharded or new backbone is tried in its first call, inside its wrappers.

        Args:
            part: the backbone.
            padded: its forward on TRL's batches, possibly compiled.
            own: its own forward.
        """
        if self._given_up is not None:
            return padded
        packed = packed_forward(part, padded, self._tokens)

        def run(*arguments: Any, **inputs: Any) -> Any:
            before = self.reason
            if part not in self._proven:
                self._proven.add(part)
                self._give_up(why_not_packed(part, own))
            if self._reads_padding:
                return padded(*arguments, **inputs)
            self._look_at(part, inputs)
            if self.reason != before:
                self._say()
            return (packed if self._given_up is None else padded)(*arguments, **inputs)

        return run

    @contextlib.contextmanager
    def reading(self, token_ids: Tensor, inputs: dict[str, Any]) -> Iterator[None]:
        """Leave batches padded in which padding predicts a token: packed rows lack its state."""
        mask = inputs.get("attention_mask")
        if self._given_up is None and mask is not None and mask.ndim == 2:
            real = mask[:, : token_ids.shape[1]] != 0
            if real.shape == token_ids.shape:
                self._reads_padding = bool(((token_ids != -100) & ~real).any())
            if self._reads_padding:
                begins = real & ~nn.functional.pad(real, (1, -1))
                self._could_be_packed = bool((begins.sum(1) <= 1).all())
        try:
            yield
        finally:
            self._reads_padding = self._could_be_packed = False

    def counts_positions(self, part: nn.Module, *, always: bool) -> bool:
        """Return whether a call that is not packed needs the positions that packed rows have.

        Args:
            part: the backbone.
            always: whether every such call does, or only one among packed ones.
        """
        if not always or self._could_be_packed:
            return self._could_be_packed
        return bool(self._given_up or self._reads_padding or why_padded_now(part))

    def _give_up(self, reason: str | None) -> None:
        """Run on padded batches from now on, if there is a reason."""
        if reason is not None and self._given_up is None:
            self._refuse_if_required(reason)
            self._given_up = reason

    def _look_at(self, part: nn.Module, inputs: dict[str, Any] | None = None) -> None:
        """Note what keeps a call of a backbone from packed rows."""
        reason = None if self._given_up else why_padded_now(part, inputs)
        if reason is None:
            self._left.pop(part, None)
        else:
            self._refuse_if_required(reason)
            self._left[part] = reason

    def _refuse_if_required(self, reason: str) -> None:
        if self._required:
            raise ValueError(f"packed must be None or False: {reason}")

    def _say(self) -> None:
        """Log a reason that came up in training, once."""
        if self.reason in {None, *self._said} or not self._trainer.accelerator.is_main_process:
            return
        self._said.add(str(self.reason))
        name = type(self._trainer).__name__
        logger.warning(f"{name} leaves batches as TRL gives them: {self.reason}")


def models_of(trainer: Any) -> list[nn.Module]:
    """Return the policy, and the reference and the teacher that are other models."""
    names = ("model", "ref_model", "teacher_model")
    found = [getattr(trainer, name, None) for name in names]
    return list({causal_model(model): model for model in found if model is not None}.values())


def _why_its_loss_reads_padding(trainer: Any) -> str | None:
    function = getattr(trainer, "compute_loss_func", None)
    if callable(function) and not str(getattr(function, "__module__", "")).startswith("trl."):
        return "compute_loss_func reads logits, which may be those of padding"
    if getattr(trainer.args, "label_smoothing_factor", 0.0):
        return "label_smoothing_factor reads logits, which may be those of padding"
    return None


def _is_loaded_on_one_rank(trainer: Any) -> bool:
    """Return whether the other ranks have no parameters yet, and could not run a trial."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    return bool(getattr(plugin, "cpu_ram_efficient_loading", False))

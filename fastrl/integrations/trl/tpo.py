"""TRL's `TPOTrainer` on fastrl, without whole logits.

TRL's own loss runs on a stand-in for the logits, which has all values that the loss reads. In a
copy of the loss, functions of the logits are replaced.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastrl.integrations.support import Support
from fastrl.integrations.trl.handle import Choices, with_globals
from fastrl.integrations.trl.logits_trainers import LogitsHandle, Method, shifted

SUPPORT: tuple[Support, ...] = (
    Support(
        option="`TPOTrainer`, every `loss_type`, `tpo_alpha`",
        handling="primitive",
        note="without TRL's whole logits. With `return_outputs=True`, which `compute_metrics` "
        "needs, TRL computes the loss",
    ),
)

_LOSS = "_compute_loss"
_ENTROPY = "selective_log_softmax_and_entropy"


class TpoHandle(LogitsHandle):
    """A `TPOTrainer` that computes log-probabilities with fastrl until `undo()`."""

    def __init__(self, trainer: Any, base: type, choices: Choices) -> None:
        """Replace the loss of an instance of the class `base`."""
        names = getattr(base, _LOSS).__code__.co_names
        if not {_ENTROPY, "F", "cross_entropy"}.issubset(names):
            raise ValueError(
                f"{base.__name__}.{_LOSS} of this version of TRL does not call {_ENTROPY} and "
                "F.cross_entropy, which use_fastrl replaces"
            )
        method = Method(_LOSS, ("model", "inputs", "return_outputs"), _loss)
        super().__init__(trainer, base, choices, method)


def _loss(
    handle: LogitsHandle, model: nn.Module, inputs: dict[str, Any], return_outputs: bool
) -> Any:
    if return_outputs:
        return handle.own(model, inputs, return_outputs)
    labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)

    def call(**options: Any) -> Any:
        options.pop("use_cache")
        outputs = handle.outputs(
            model, shifted(labels), options, ("log_probs", "entropy", "mean_logits", "is_top1")
        )
        predicted = torch.where(outputs.is_top1, shifted(labels), -1)
        rows = Rows(outputs.log_probs, outputs.entropy, outputs.mean_logits, predicted)
        return types.SimpleNamespace(logits=rows)

    loss = with_globals(handle.own, **{_ENTROPY: _logprobs_and_entropy, "F": _Functions()})
    return loss(call, inputs, return_outputs)


@dataclass(frozen=True)
class Rows:
    """All values that TRL's loss reads from logits `[..., V]`; each has the shape `[...]`.

    Attributes:
        logprobs: log-probabilities of the labels.
        entropy: entropies of the distributions.
        means: means of the logits.
        predicted: the likeliest token if it is the label, else -1.
    """

    logprobs: Tensor
    entropy: Tensor
    means: Tensor
    predicted: Tensor

    def _parts(self) -> tuple[Tensor, ...]:
        return self.logprobs, self.entropy, self.means, self.predicted

    def __getitem__(self, index: Any) -> Rows:
        """Return some rows; a tuple ends with the index of the vocabulary."""
        rows = index[:-1] if isinstance(index, tuple) else index
        return Rows(*(part[rows] for part in self._parts()))

    def chunk(self, count: int, dim: int) -> list[Rows]:
        """Return parts, of sequences for example."""
        parts = zip(*(part.chunk(count, dim) for part in self._parts()), strict=True)
        return [Rows(*part) for part in parts]

    def detach(self) -> Rows:
        """Return the rows without gradient."""
        return Rows(*(part.detach() for part in self._parts()))

    def mean(self, dim: int) -> Tensor:
        """Return the mean over the vocabulary."""
        return _of_vocabulary(dim, self.means)

    def argmax(self, dim: int) -> Tensor:
        """Return the likeliest token."""
        return _of_vocabulary(dim, self.predicted)


def _of_vocabulary(dim: int, values: Tensor) -> Tensor:
    if dim != -1:
        raise RuntimeError(f"this version of TRL reduces logits over dimension {dim}, not over -1")
    return values


class _Functions:
    """`torch.nn.functional` for TRL's loss."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.nn.functional, name)

    def cross_entropy(self, rows: Rows, labels: Tensor) -> Tensor:
        """Return the loss of rows; their labels are known already."""
        return -rows.logprobs.mean()


def _logprobs_and_entropy(rows: Rows, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return rows.logprobs, rows.entropy.detach()

"""TRL's experimental `GKDTrainer`, and `GOLDTrainer` for one tokenizer, on fastrl.

Their `compute_loss` calls student and teacher for the logits of all tokens. The instance gets
another method, which computes the divergence and its gradient inside the forwards of both models,
without logits.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fastrl.backend import Backend
from fastrl.integrations.support import Support
from fastrl.integrations.trl.distillation import distillation_loss
from fastrl.integrations.trl.handle import Choices, LossHandle
from fastrl.integrations.trl.two_models import Side, inside_both


def _compares_tokenizers(trainer: Any) -> bool:
    return bool(getattr(trainer, "use_uld_loss", False)) and trainer.teacher_tokenizer is not None


_ULD = Support(
    option="`GOLDTrainer` with `use_uld_loss=True`",
    handling="refused",
    note="the loss compares sorted probabilities of two vocabularies, or probabilities of tokens "
    "matched by name; fastrl has no function for either",
    applies=_compares_tokenizers,
)

SUPPORT: tuple[Support, ...] = (
    Support(
        option="`GKDTrainer` and `GOLDTrainer` of `trl.experimental`, any `beta`, `lmbda`, "
        "`temperature`, accumulation, `seq_kd`, LoRA, a teacher of another width",
        handling="fused",
        note="without the logits of either model. With `compute_metrics`, which needs logits, TRL "
        "computes the evaluation loss",
    ),
    _ULD,
)


class GkdHandle(LossHandle):
    """A `GKDTrainer` or `GOLDTrainer` that runs on fastrl until `undo()`."""

    def __init__(self, trainer: Any, base: type, choices: Choices) -> None:
        """Replace the loss of an instance of the class `base`."""
        super().__init__(trainer, choices, rules=(_ULD,))
        # GKD's `temperature` applies to the sampler alone
        self._uses_temperature = "temperature" in base.compute_loss.__code__.co_names  # type: ignore[attr-defined]

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], count: Tensor | int | None
    ) -> Tensor:
        """Return the mean divergence of a batch."""
        trainer = self.trainer
        mask = inputs["labels"][:, 1:] != -100
        of_models = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        if hasattr(trainer, "_get_model_forward_kwargs"):  # images and such
            of_models |= trainer._get_model_forward_kwargs(inputs)
        temperature = trainer.temperature if self._uses_temperature else 1.0
        return mean_divergence(trainer, model, of_models, mask, count, temperature, self.backend)


def mean_divergence(
    trainer: Any,
    model: nn.Module,
    inputs: dict[str, Any],
    mask: Tensor,
    count: Tensor | int | None,
    temperature: float,
    backend: Backend,
) -> Tensor:
    """Return the mean divergence of a model from the trainer's teacher, for `trainer.beta`.

    Args:
        trainer: the trainer, which has the teacher.
        model: the student, as the trainer calls it.
        inputs: keyword arguments of both models.
        mask: 0/1 of the last K tokens, `[B, K]`.
        count: the number of tokens in all micro-batches and ranks; None counts the tokens in the
            mask.
        temperature: divides the logits of both models.
        backend: `auto`, or the backend for the chunks.
    """
    if count is None:
        count = mask.sum().clamp(min=1)
    elif isinstance(count, Tensor):
        count = count.to(mask.device)
    length = mask.shape[1]

    def compared(student: Side, teacher: Side) -> Tensor:
        loss, _ = distillation_loss(
            student.before_last(length),
            teacher.before_last(length),
            mask,
            count,
            beta=trainer.beta,
            temperature=temperature,
            backend=backend,
        )
        return loss

    trainer.teacher_model.eval()
    with trainer.accelerator.autocast():
        return inside_both(model, trainer.teacher_model, compared, inputs)

"""TRL's trainers that compute log-probabilities from whole logits, on fastrl without them.

Only the method of the instance that calls the model is replaced. TRL's own code uses the
log-probabilities for its loss, rewards and metrics.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastrl.integrations.support import Support
from fastrl.integrations.trl.handle import Choices, Handle
from fastrl.integrations.trl.token_outputs import token_outputs

#: Sequence log-probabilities of chosen and rejected, their logits, and the loss of the chosen.
Forward = tuple[Tensor, ...]

_PROMPTS = Support(
    option="`CPOTrainer`, `ORPOTrainer`, `A2POTrainer`, `OnlineDPOTrainer` with prompt or prefix "
    "tuning (`peft`)",
    handling="refused",
    note="the model returns more positions than there are tokens, which TRL does not expect",
    applies=lambda t: _learns_a_prompt(t.model),
)

SUPPORT: tuple[Support, ...] = (
    Support(
        option="`CPOTrainer` (SimPO, AlphaPO) and `ORPOTrainer`, every `loss_type`",
        handling="primitive",
        note="without TRL's whole logits. Their mean, a metric, is computed as for `DPOTrainer`",
    ),
    Support(
        option="`A2POTrainer`, `OnlineDPOTrainer`",
        handling="primitive",
        note="without TRL's whole logits. TRL generates the completions",
    ),
    _PROMPTS,
)


class LogitsHandle(Handle):
    """A trainer that computes log-probabilities with fastrl until `undo()`.

    Attributes:
        fused: False.
        own: the replaced method of the trainer.
    """

    def __init__(
        self, trainer: Any, base: type, choices: Choices, method: Method | None = None
    ) -> None:
        """Replace the method that calls the models of an instance of the class `base`."""
        name, arguments, function, unpacked = method or _METHODS[base.__name__]
        found = tuple(inspect.signature(getattr(base, name)).parameters)[1:]
        if found != arguments:
            raise ValueError(
                f"{base.__name__}.{name} of this version of TRL takes {', '.join(found)}, not "
                f"{', '.join(arguments)}"
            )
        reason = f"TRL computes the loss of a {base.__name__}, from log-probabilities"
        super().__init__(trainer, choices, reason, (_PROMPTS,), unpacked)
        self.own = self.replace_method(name, functools.partial(function, self))

    def outputs(
        self,
        model: nn.Module,
        token_ids: Tensor,
        inputs: dict[str, Any],
        names: Sequence[str] = ("log_probs",),
        *,
        mean_of_all: bool = False,
    ) -> Any:
        """Return a `FusedCausalLMOutput` of a model, with a value for each of its positions.

        Args:
            model: the policy or the reference, in its wrappers.
            token_ids: `[B, T]`, the token that each position predicts; -100 is left out.
            inputs: keyword arguments of the model.
            names: names of outputs of `token_outputs`.
            mean_of_all: whether `mean_logits` are computed even where a token is -100.
        """
        score = functools.partial(
            token_outputs,
            self.trainer,
            wanted=names,
            backend=self.backend,
            mean_of_all=mean_of_all,
        )
        return self.models.call(model, score, shift_labels=token_ids, **inputs)


def _a2po(
    handle: LogitsHandle,
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    logits_to_keep: int,
) -> Tensor:
    """Return the log-probability of each completion, `[B]`."""
    labels = input_ids.masked_fill(attention_mask == 0, -100)
    labels[:, : labels.shape[1] - logits_to_keep] = -100
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
    logprobs: Tensor = handle.outputs(model, shifted(labels), inputs).log_probs
    return logprobs.sum(1)


def _online_dpo(
    handle: LogitsHandle,
    model: nn.Module,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
    vision_inputs: dict[str, Any] | None = None,
) -> Tensor:
    """Return log-probabilities of all completion tokens, `[B, K]`, as TRL adds up padding, too."""
    prompt, count = prompt_ids.shape[1], completion_ids.shape[1]
    if vision_inputs is None:  # TRL truncates on the left
        cut = max(prompt + count - handle.trainer.max_length, 0)
        prompt_ids, prompt_mask = prompt_ids[:, cut:], prompt_mask[:, cut:]
        prompt = prompt_ids.shape[1]
    input_ids = torch.cat([prompt_ids, completion_ids], 1)
    start = max(prompt - 1, 0)  # without a prompt TRL scores each token at its own position
    token_ids = torch.full_like(input_ids, -100)
    token_ids[:, start : start + count] = completion_ids
    inputs = {
        "input_ids": input_ids,
        "attention_mask": torch.cat([prompt_mask, completion_mask], 1),
    }
    inputs |= {name: x for name, x in (vision_inputs or {}).items() if name in _IMAGES}
    logprobs: Tensor = handle.outputs(model, token_ids, inputs).log_probs
    return logprobs[:, start : start + count]


_IMAGES = ("pixel_values", "pixel_attention_mask", "image_sizes", "image_grid_thw")


def _cpo(handle: LogitsHandle, model: nn.Module, batch: dict[str, Any]) -> Forward:
    """Return the results of `concatenated_forward`, with mean logits `[B, T]` for logits."""
    trainer = handle.trainer
    inputs, labels = _pairs(trainer, batch, trainer.pad_token_id)
    outputs = _outputs_of_pairs(handle, model, shifted(labels), inputs)
    chosen = len(batch["chosen_labels"])
    scored = shifted(labels) != -100
    sums = outputs.log_probs.sum(1)
    nll = sums.new_zeros(())
    if trainer.cpo_alpha:
        nll = -sums[:chosen].sum() / scored[:chosen].sum()
    of_sequences = sums / scored.sum(1) if trainer.loss_type in ("ipo", "simpo") else sums
    return _forward(trainer, outputs, of_sequences, outputs.mean_logits, nll, chosen)


def _orpo(handle: LogitsHandle, model: nn.Module, batch: dict[str, Any]) -> Forward:
    """Return the results of `concatenated_forward`, with mean logits `[B, T - 1]` for logits.

    The loss of the chosen sequences includes their prompts.
    """
    trainer = handle.trainer
    inputs, labels = _pairs(trainer, batch, trainer.padding_value)
    chosen = len(batch["chosen_labels"])
    whole = inputs["input_ids"].masked_fill(inputs["attention_mask"] != 1, -100)
    of_chosen = shifted(whole[:chosen])
    scored = shifted(labels) != -100
    token_ids = shifted(labels)
    token_ids[:chosen] = torch.where(of_chosen != -100, of_chosen, token_ids[:chosen])
    outputs = _outputs_of_pairs(handle, model, token_ids, inputs)
    read = of_chosen != -100
    nll = -torch.where(read, outputs.log_probs[:chosen], 0.0).sum() / read.sum()
    of_sequences = torch.where(scored, outputs.log_probs, 0.0).sum(1) / scored.sum(1)
    return _forward(trainer, outputs, of_sequences, outputs.mean_logits[:, :-1], nll, chosen)


def _pairs(trainer: Any, batch: dict[str, Any], padding: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return the inputs of the model for chosen and rejected, and the labels, `[B, T]`."""
    found = trainer.concatenated_inputs(
        batch, is_encoder_decoder=False, padding_value=padding, device=trainer.accelerator.device
    )
    inputs = {name: found[f"concatenated_{name}"] for name in ("input_ids", "attention_mask")}
    return inputs, found["concatenated_labels"]


def _outputs_of_pairs(
    handle: LogitsHandle, model: nn.Module, token_ids: Tensor, inputs: dict[str, Any]
) -> Any:
    if handle.trainer.aux_loss_enabled:
        inputs["output_router_logits"] = True
    return handle.outputs(model, token_ids, inputs, ("log_probs", "mean_logits"), mean_of_all=True)


def _forward(
    trainer: Any, outputs: Any, logprobs: Tensor, logits: Tensor, nll: Tensor, chosen: int
) -> Forward:
    """Return TRL's tuple from `logprobs` `[B]` and `logits`, which TRL averages."""
    parts = (logprobs[:chosen], logprobs[chosen:], logits[:chosen], logits[chosen:], nll)
    return (*parts, outputs.aux_loss) if trainer.aux_loss_enabled else parts


def shifted(labels: Tensor) -> Tensor:
    """Return the label that each position predicts, -100 for the last, `[B, T]`."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)


def _learns_a_prompt(model: Any) -> bool:
    config = getattr(model, "active_peft_config", None) if hasattr(model, "peft_config") else None
    return bool(getattr(config, "is_prompt_learning", False))


class Method(NamedTuple):
    """A method of a trainer, its arguments, and the function that replaces it."""

    name: str
    arguments: tuple[str, ...]
    function: Callable[..., Any]
    unpacked: str | None = None  # why its models run on padded batches


_SEQUENCES = ("model", "input_ids", "attention_mask", "logits_to_keep")
_PROMPT = ("model", "prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
_PADDING = "TRL reads values of padding tokens, which packed rows do not have"
_PAIRS = ("model", "batch")

_METHODS = {
    "A2POTrainer": Method("_get_sequence_logps", _SEQUENCES, _a2po),
    "OnlineDPOTrainer": Method("_forward", (*_PROMPT, "vision_inputs"), _online_dpo, _PADDING),
    "CPOTrainer": Method("concatenated_forward", _PAIRS, _cpo, _PADDING),
    "ORPOTrainer": Method("concatenated_forward", _PAIRS, _orpo, _PADDING),
}

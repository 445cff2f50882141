"""Log-probabilities and entropies of completions, from hidden states and the LM head."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from fastrl.backend import Backend
from fastrl.integrations.transformers import LmHead, last_hidden_states, lm_head
from fastrl.ops.linear_token_stats import linear_token_stats

Result = TypeVar("Result")


class Completions(NamedTuple):
    """The last K tokens of a batch of sequences, as the linear functions take them.

    Attributes:
        hidden: `[B, K, H]`, the hidden states that predict the tokens.
        token_ids: `[B, K]`.
        mask: `[B, K]`.
        head: the LM head.
    """

    hidden: Tensor
    token_ids: Tensor
    mask: Tensor
    head: LmHead


def completions(
    trainer: Any, model: nn.Module, input_ids: Tensor, attention_mask: Tensor, count: int
) -> Completions:
    """Run the backbone of `model`, which has no wrapper, and return the last `count` tokens."""
    with trainer.accelerator.autocast():
        states = last_hidden_states(model, input_ids=input_ids, attention_mask=attention_mask)
    hidden = states[:, -count - 1 : -1]
    if _float32_head(trainer):
        hidden = hidden.float()
    return Completions(hidden, input_ids[:, -count:], attention_mask[:, -count:], lm_head(model))


def precision_of_head(trainer: Any) -> AbstractContextManager[Any]:
    """Return the autocast under which a GPU multiplies the LM head."""
    if _float32_head(trainer):
        return torch.autocast(trainer.accelerator.device.type, enabled=False)
    return cast("AbstractContextManager[Any]", trainer.accelerator.autocast())


def _float32_head(trainer: Any) -> bool:
    return bool(getattr(trainer.args, "cast_lm_head_to_fp32", False))


def token_stats(
    trainer: Any,
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    count: int,
    *,
    batch_size: int,
    with_entropy: bool,
    backend: Backend,
) -> tuple[Tensor, Tensor | None]:
    """Return log-probabilities and entropies `[B, count]` of a bare model, 0 where masked."""
    wanted = ("logprobs", "entropy") if with_entropy else ("logprobs",)
    found: list[list[Tensor]] = [[] for _ in wanted]
    for start in range(0, input_ids.shape[0], batch_size):
        part = slice(start, start + batch_size)
        tokens = completions(trainer, model, input_ids[part], attention_mask[part], count)
        with precision_of_head(trainer):
            stats = linear_token_stats(
                tokens.hidden,
                token_ids=tokens.token_ids,
                mask=tokens.mask,
                temperature=trainer.temperature,
                outputs=wanted,
                backend=backend,
                **tokens.head.arguments(),
            )
        for name, parts in zip(wanted, found, strict=True):
            parts.append(getattr(stats, name))
    logprobs, *entropy = (torch.cat(parts) for parts in found)
    return logprobs, entropy[0] if entropy else None


def within(trainer: Any, model: nn.Module, function: Callable[[nn.Module], Result]) -> Result:
    """Call `function` with the model inside its wrappers, from the outermost wrapper's forward.

    DDP prepares the gradient reduction in its forward. If only the inner model were called,
    gradients would not be reduced, and the ranks would silently diverge.
    """
    inner = trainer.accelerator.unwrap_model(model)
    if inner is model:
        return function(model)
    previous = inner.__dict__.get("forward")

    def forward(*_: Any, **__: Any) -> Result:
        restore()
        return function(inner)

    def restore() -> None:
        if previous is None:
            inner.__dict__.pop("forward", None)
        else:
            inner.__dict__["forward"] = previous

    inner.__dict__["forward"] = forward
    try:
        result: Result = model()
    finally:
        restore()
    return result

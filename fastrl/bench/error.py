"""What is computed from logits, and the error of an answer against float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fastrl.bench.case import FORWARD, Inputs

CHECKED = 64  # rows that are compared with float64, at most
ROWS_AT_ONCE = 32  # of which float64 is computed, to hold little memory
Part = tuple[slice, slice]


@dataclasses.dataclass(frozen=True)
class Work:
    """What is computed from logits, in torch: the truth in float64, and eager.

    ``values`` are one or more numbers per token, from logits and the inputs with these names; a
    loss is the mean over the mask.
    """

    values: Callable[[Tensor, Inputs], tuple[Tensor, ...]]
    names: tuple[str, ...]
    mean: bool = False

    def output(self, logits: Tensor, tokens: Inputs) -> Tensor | tuple[Tensor, ...]:
        """Return what a provider returns."""
        values = self.values(logits, tokens)
        if self.mean:
            return masked_mean(values[0], tokens)
        return values if len(values) > 1 else values[0]

    def eager(self, logits: Tensor, *tokens: Tensor, upcast: bool) -> Any:
        """Return it as trainers compute it, who cast to float32, or not."""
        logits = logits.float() if upcast else logits
        return self.output(logits, dict(zip(self.names, tokens, strict=True)))


def masked_mean(values: Tensor, tokens: Inputs) -> Tensor:
    """Return the mean over the mask, as trainers write it."""
    mask: Tensor = tokens["mask"]
    return (values * mask).sum() / mask.sum()


def logprobs_of(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probability of each token."""
    return logits.log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)


def clipped(logprobs: Tensor, tokens: Inputs) -> Tensor:
    """Return PPO's clipped loss of each token."""
    ratio = (logprobs - tokens["old_logprobs"]).exp()
    advantages: Tensor = tokens["advantages"]
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


def _loss(logits: Tensor, tokens: Inputs) -> tuple[Tensor, ...]:
    return (clipped(logprobs_of(logits, tokens["token_ids"]), tokens),)


def _logprobs(logits: Tensor, tokens: Inputs) -> tuple[Tensor, ...]:
    return (logprobs_of(logits, tokens["token_ids"]),)


def _stats(logits: Tensor, tokens: Inputs) -> tuple[Tensor, ...]:
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(-1, tokens["token_ids"][..., None]).squeeze(-1)
    return chosen, -(logprobs.exp() * logprobs).sum(-1)


ROLLOUT = ("token_ids", "advantages", "old_logprobs", "mask")
LOGPROBS = Work(_logprobs, ("token_ids",))
STATS = Work(_stats, ("token_ids",))
LOSS = Work(_loss, ROLLOUT, mean=True)


def parts(inputs: Inputs) -> Iterator[Part]:
    """Yield the indices of a few rows at a time, all in order."""
    sequences, tokens = inputs["token_ids"].shape
    for b in range(sequences):
        for t in range(0, tokens, ROWS_AT_ONCE):
            yield slice(b, b + 1), slice(t, min(t + ROWS_AT_ONCE, tokens))


def checked(inputs: Inputs) -> list[Part]:
    """Return the first parts, of as many rows as are compared."""
    rows, found = 0, []
    for b, t in parts(inputs):
        if rows >= CHECKED:
            break
        found.append((b, t))
        rows += t.stop - t.start
    return found


def checked_rows(x: Tensor, inputs: Inputs) -> Tensor:
    """Return the rows that are compared, of a tensor that begins with ``[B, T]``."""
    return torch.cat([x[part].flatten(0, 1) for part in checked(inputs)])


class Error:
    """The error of an answer against float64.

    Log-probabilities and losses relative to the larger of 1 and their size, gradients to their
    largest element; per token and of gradients, only the first rows are compared, and of a trained
    head's the rows of their tokens. The truth is computed once for the inputs of the last call.
    """

    def __init__(self, work: Work, step: str, *, trained: bool = False) -> None:
        self.work, self.step, self.trained = work, step, trained
        self.inputs: Inputs | None = None

    @torch.no_grad()
    def __call__(self, answer: Any, inputs: Inputs) -> float:
        """Return the largest error of an output (forward), or of gradients."""
        if self.inputs is not inputs:
            self.truth, self.inputs = self.exact(inputs), inputs
        found = self.compared(answer, inputs)
        if self.step == FORWARD:
            sizes = [truth.abs().clamp(min=1) for truth in self.truth]
        else:
            sizes = [truth.abs().max() for truth in self.truth]
        pairs = zip(found, self.truth, sizes, strict=True)
        errors = [((one.double() - truth).abs() / size).max() for one, truth, size in pairs]
        return float(torch.stack(errors).max())  # unlike Python's max, NaN if any is

    def compared(self, answer: Any, inputs: Inputs) -> list[Tensor]:
        """Return what is compared of an answer."""
        values = [answer] if torch.is_tensor(answer) else answer
        if self.step == FORWARD:
            return values if self.work.mean else [checked_rows(one, inputs) for one in values]
        rows, *heads = values
        return [checked_rows(rows, inputs), *(head[_columns(inputs)] for head in heads)]

    def exact(self, inputs: Inputs) -> list[Tensor]:
        """Return the truth; a loss and the gradient of a head take a pass over all rows."""
        heads = {name: double(x) for name, x in inputs.items() if name.endswith("weight")}
        every = self.work.mean if self.step == FORWARD else self.trained
        few, found, dhead = checked(inputs), [], torch.zeros(())
        for part in parts(inputs) if every else few:
            logits = _logits(inputs, part, heads).requires_grad_(self.step != FORWARD)
            tokens = {name: _tokens(name, inputs, part, heads) for name in self.work.names}
            with torch.enable_grad():
                values = torch.stack(self.work.values(logits, tokens))
                if self.work.mean:
                    values = values * tokens["mask"] / inputs["mask"].sum()
            if self.step == FORWARD:
                found.append(values.flatten(1))
                continue
            slopes = torch.autograd.grad(values, logits, torch.ones_like(values))[0].flatten(0, 1)
            if part in few:
                found.append(slopes @ heads["weight"] if heads else slopes)
            if self.trained:
                hidden = double(inputs["hidden"][part]).flatten(0, 1)
                dhead = dhead + slopes[:, _columns(inputs)].T @ hidden
        if self.step != FORWARD:
            return [torch.cat(found), dhead] if self.trained else [torch.cat(found)]
        values = torch.cat(found, 1)
        return [values.sum()] if self.work.mean else [*values]


def _columns(inputs: Inputs) -> Tensor:
    """Return the tokens whose rows of the head's gradient are compared."""
    return checked_rows(inputs["token_ids"], inputs).unique()  # type: ignore[no-any-return]


def _logits(inputs: Inputs, part: Part, heads: Inputs, of: str = "") -> Tensor:
    """Return the logits of a few rows in float64, which may have to be computed."""
    if f"{of}weight" in heads:
        logits: Tensor = double(inputs[f"{of}hidden"][part]) @ heads[f"{of}weight"].T
        return logits
    return double(inputs[f"{of}logits"][part])


def _tokens(name: str, inputs: Inputs, part: Part, heads: Inputs) -> Tensor:
    """Return what belongs to a few rows."""
    if name == "teacher_logits":
        return _logits(inputs, part, heads, "teacher_")
    one: Tensor = inputs[name]
    return double((one.expand(inputs["token_ids"].shape) if one.dim() == 2 else one)[part])


def double(x: Tensor) -> Tensor:
    """Return numbers in float64; integers and masks as they are."""
    return x.double() if x.is_floating_point() else x

"""What is computed from logits, and the error of an answer against float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fastrl.bench.case import FORWARD, Inputs

CHECKED = 64  # rows that are compared with float64
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
    """Return the first and last rows of each sequence, which are compared."""
    sequences, tokens = inputs["token_ids"].shape
    few = min(tokens, max(1, CHECKED // (2 * sequences)))
    ends = [slice(0, few)] + [slice(max(few, tokens - few), tokens)] * (tokens > few)
    return [(slice(b, b + 1), t) for b in range(sequences) for t in ends]


def checked_rows(x: Tensor, inputs: Inputs) -> Tensor:
    """Return the rows that are compared, of a tensor that begins with ``[B, T]``."""
    return torch.cat([x[part].flatten(0, 1) for part in checked(inputs)])


class Error:
    """The error of an answer against float64.

    Log-probabilities and losses relative to the larger of 1 and their size, gradients to their
    largest element; per token and of gradients, 64 rows are compared, and of a trained head's the
    rows of their tokens, the first and the last. An answer that is not finite anywhere has the
    error NaN. The truth is computed once for the inputs of the last call.
    """

    def __init__(self, work: Work, step: str, *, trained: bool = False) -> None:
        self.work, self.step, self.trained = work, step, trained
        self.inputs: Inputs | None = None

    @torch.no_grad()
    def __call__(self, answer: Any, inputs: Inputs) -> float:
        """Return the largest error of an output (forward), or of gradients."""
        if self.inputs is not inputs:
            self.truth, self.inputs = self.exact(inputs), inputs
        values = [answer] if torch.is_tensor(answer) else answer
        if not all(one.isfinite().all() for one in values):
            return torch.nan
        found = self.compared(values, inputs)
        if self.step == FORWARD:
            sizes = [truth.abs().clamp(min=1) for truth in self.truth]
        else:
            sizes = [truth.abs().max() for truth in self.truth]
        pairs = zip(found, self.truth, sizes, strict=True)
        errors = [((one.double() - truth).abs() / size).max() for one, truth, size in pairs]
        return float(torch.stack(errors).max())

    def compared(self, values: Sequence[Tensor], inputs: Inputs) -> Sequence[Tensor]:
        """Return what is compared of an answer."""
        if self.step == FORWARD:
            return values if self.work.mean else [checked_rows(one, inputs) for one in values]
        rows, *heads = values
        return [checked_rows(rows, inputs), *(head[_columns(inputs)] for head in heads)]

    def exact(self, inputs: Inputs) -> list[Tensor]:
        """Return the truth; a loss and the gradient of a head take a pass over all rows."""
        heads = {name: double(x) for name, x in inputs.items() if name.endswith("weight")}
        few = checked(inputs)
        if self.step == FORWARD:
            every = parts(inputs) if self.work.mean else few
            values = torch.cat([self.values(inputs, part, heads)[0] for part in every], 1)
            return [values.sum()] if self.work.mean else [*values]
        slopes = [self.slopes(inputs, part, heads) for part in few]
        found = [torch.cat([one @ heads["weight"] if heads else one for one in slopes])]
        if self.trained:
            columns, dhead = _columns(inputs), torch.zeros((), device=found[0].device)
            for part in parts(inputs):
                hidden = double(inputs["hidden"][part]).flatten(0, 1)
                dhead = dhead + self.slopes(inputs, part, heads)[:, columns].T @ hidden
            found.append(dhead)
        return found

    def values(self, inputs: Inputs, part: Part, heads: Inputs) -> tuple[Tensor, Tensor]:
        """Return the values of a few rows, or their share of the mean, and the logits."""
        logits = _logits(inputs, part, heads).requires_grad_(self.step != FORWARD)
        tokens = {name: _tokens(name, inputs, part, heads) for name in self.work.names}
        with torch.enable_grad():
            values = torch.stack(self.work.values(logits, tokens))
            if self.work.mean:
                values = values * tokens["mask"] / inputs["mask"].sum()
            return values.flatten(1), logits

    def slopes(self, inputs: Inputs, part: Part, heads: Inputs) -> Tensor:
        """Return the gradient of the sum of a few rows' values, by their logits."""
        values, logits = self.values(inputs, part, heads)
        gradient: Tensor = torch.autograd.grad(values, logits, torch.ones_like(values))[0]
        return gradient.flatten(0, 1)


def _columns(inputs: Inputs) -> Tensor:
    """Return the tokens whose rows of the head's gradient are compared."""
    ids = checked_rows(inputs["token_ids"], inputs)
    ends = ids.new_tensor([0, len(inputs["weight"]) - 1])
    return torch.cat([ids, ends]).unique()  # type: ignore[no-any-return]


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

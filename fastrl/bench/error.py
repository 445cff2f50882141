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
    largest element; per token and of gradients, only the first rows are compared. The truth is
    computed once for the inputs of the last call.
    """

    def __init__(self, work: Work, step: str) -> None:
        self.work, self.step = work, step
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

    def logits(self, inputs: Inputs, part: Part) -> Tensor:
        """Return the logits of a few rows in float64."""
        return double(inputs["logits"][part])

    def tokens(self, inputs: Inputs, part: Part) -> Inputs:
        """Return what belongs to these rows."""
        found: Inputs = {}
        for name in [name for name in self.work.names if name in inputs]:
            one = inputs[name]
            one = one.expand(inputs["token_ids"].shape) if one.dim() == 2 else one
            found[name] = double(one[part])
        return found

    def compared(self, answer: Any, inputs: Inputs) -> list[Tensor]:
        """Return what is compared of an answer."""
        if self.step == FORWARD and self.work.mean:
            return [answer]
        values = [answer] if torch.is_tensor(answer) else answer
        return [checked_rows(value, inputs) for value in values]

    def exact(self, inputs: Inputs) -> list[Tensor]:
        """Return the truth."""
        if self.step != FORWARD:
            return [torch.cat([self.slopes(inputs, part) for part in checked(inputs)])]
        if self.work.mean:
            return [torch.stack([self.total(inputs, part) for part in parts(inputs)]).sum()]
        found = []
        for part in checked(inputs):
            values = self.work.values(self.logits(inputs, part), self.tokens(inputs, part))
            found.append([value.flatten() for value in values])
        return [torch.cat(values) for values in zip(*found, strict=True)]

    def total(self, inputs: Inputs, part: Part, logits: Tensor | None = None) -> Tensor:
        """Return these rows' share of the outputs' sum."""
        tokens = self.tokens(inputs, part)
        values = self.work.values(self.logits(inputs, part) if logits is None else logits, tokens)
        total = torch.stack(values)
        if self.work.mean:
            total = total * tokens["mask"] / inputs["mask"].sum()
        return total.sum()

    def slopes(self, inputs: Inputs, part: Part) -> Tensor:
        """Return the gradient of these rows' logits, of outputs whose gradients are 1."""
        leaf = self.logits(inputs, part).requires_grad_()
        with torch.enable_grad():
            total = self.total(inputs, part, leaf)
        gradient: Tensor = torch.autograd.grad(total, leaf)[0]
        return gradient.flatten(0, 1)


class LinearError(Error):
    """The same from hidden states and a head; of its gradient the rows of the checked tokens."""

    def __init__(self, work: Work, step: str, *, trained: bool) -> None:
        super().__init__(work, step)
        self.trained = trained

    def logits(self, inputs: Inputs, part: Part) -> Tensor:
        """Return the logits of a few rows in float64."""
        hidden: Tensor = inputs["hidden"][part]
        logits: Tensor = hidden.double() @ self.heads["weight"].T
        return logits

    def tokens(self, inputs: Inputs, part: Part) -> Inputs:
        """Return what belongs to these rows; a teacher's logits are computed."""
        found = super().tokens(inputs, part)
        if "teacher_weight" in self.heads:
            hidden = double(inputs["teacher_hidden"][part])
            found["teacher_logits"] = hidden @ self.heads["teacher_weight"].T
        return found

    def compared(self, answer: Any, inputs: Inputs) -> list[Tensor]:
        """Return what is compared of an answer."""
        if self.step == FORWARD:
            return super().compared(answer, inputs)
        rows = [checked_rows(answer[0], inputs)]
        return rows + [x[self.columns(inputs)] for x in answer[1:]]

    def columns(self, inputs: Inputs) -> Tensor:
        """Return the tokens whose rows of the head's gradient are compared."""
        ids: Tensor = checked_rows(inputs["token_ids"], inputs)
        return ids.unique()  # type: ignore[no-any-return]

    def exact(self, inputs: Inputs) -> list[Tensor]:
        """Return the truth; the head's gradient takes a pass over all rows."""
        heads = ("weight", "teacher_weight")
        self.heads = {name: inputs[name].double() for name in heads if name in inputs}
        try:
            if self.step == FORWARD:
                return super().exact(inputs)
            compared = checked(inputs)
            dhidden = [self.slopes(inputs, part) @ self.heads["weight"] for part in compared]
            if not self.trained:
                return [torch.cat(dhidden)]
            columns = self.columns(inputs)
            dhead = sum(
                self.slopes(inputs, part)[:, columns].T @ double(inputs["hidden"][part][0])
                for part in parts(inputs)
            )
            return [torch.cat(dhidden), torch.as_tensor(dhead)]
        finally:
            self.heads = {}


def double(x: Tensor) -> Tensor:
    """Return numbers in float64; integers and masks as they are."""
    return x.double() if x.is_floating_point() else x

"""What is computed from logits, and the error of an answer against float64."""

from __future__ import annotations

import dataclasses
import itertools
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
    """Yield the indices of a few rows at a time, all in order, those that are compared apart."""
    sequences, tokens = inputs["token_ids"].shape
    few = _compared(sequences, tokens)
    last = max(few, tokens - few)
    bounds = sorted({0, *range(few, last, ROWS_AT_ONCE), last, tokens})
    for b in range(sequences):
        for begin, end in itertools.pairwise(bounds):
            yield slice(b, b + 1), slice(begin, end)


def checked(inputs: Inputs) -> list[Part]:
    """Return the first and last rows of each sequence, which are compared."""
    sequences, tokens = inputs["token_ids"].shape
    few = _compared(sequences, tokens)
    return [one for one in parts(inputs) if one[1].start < few or one[1].stop > tokens - few]


def _compared(sequences: int, tokens: int) -> int:
    """Return how many rows are compared at each end of a sequence."""
    return min(tokens, max(1, CHECKED // (2 * sequences)))


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
        self.work, self.step, self.trained = work, step, trained and step != FORWARD
        self.inputs: Inputs | None = None

    def __call__(self, answer: Any, inputs: Inputs) -> float:
        """Return the largest error of an output (forward), or of gradients."""
        if self.step == FORWARD:
            return self.of_output(answer, inputs)
        rows, *heads = answer
        found = [checked_rows(rows, inputs), *(head[_columns(inputs)] for head in heads)]
        gradients = self.exact(inputs)[1]
        return _largest(answer, found, gradients, [one.abs().max() for one in gradients])

    def of_output(self, output: Any, inputs: Inputs) -> float:
        """Return the largest error of what a forward returns."""
        values = [output] if torch.is_tensor(output) else output
        found = values if self.work.mean else [checked_rows(one, inputs) for one in values]
        outputs = self.exact(inputs)[0]
        return _largest(values, found, outputs, [one.abs().clamp(min=1) for one in outputs])

    def exact(self, inputs: Inputs) -> tuple[list[Tensor], list[Tensor]]:
        """Return the true output and its gradients."""
        if self.inputs is not inputs:
            self.truth, self.inputs = self._computed(inputs), inputs
        return self.truth

    @torch.no_grad()
    def _computed(self, inputs: Inputs) -> tuple[list[Tensor], list[Tensor]]:
        """One pass: a loss and the gradient of a head take all rows, the rest those compared."""
        heads = {name: double(x) for name, x in inputs.items() if name.endswith("weight")}
        few, columns = checked(inputs), _columns(inputs) if self.trained else None
        values, slopes, dhead = [], [], torch.zeros((), device=inputs["token_ids"].device)
        for part in parts(inputs):
            compared = part in few
            if not (compared or self.trained or self.work.mean):
                continue
            differentiated = self.step != FORWARD and (compared or self.trained)
            logits = _logits(inputs, part, heads).requires_grad_(differentiated)
            tokens = {name: _tokens(name, inputs, part, heads) for name in self.work.names}
            with torch.enable_grad():
                value = torch.stack(self.work.values(logits, tokens))
                if self.work.mean:
                    value = value * tokens["mask"] / inputs["mask"].sum()
            if compared or self.work.mean:
                values.append(value.detach().flatten(1))
            if differentiated:
                slope = torch.autograd.grad(value, logits, torch.ones_like(value))[0].flatten(0, 1)
            if differentiated and compared:
                slopes.append(slope @ heads["weight"] if heads else slope)
            if self.trained:
                hidden = double(inputs["hidden"][part]).flatten(0, 1)
                dhead = dhead + slope[:, columns].T @ hidden
        output = torch.cat(values, 1)
        gradients = [torch.cat(slopes)] if slopes else []
        gradients += [dhead] if self.trained else []
        return [output.sum()] if self.work.mean else [*output], gradients


@torch.no_grad()
def _largest(
    answer: Sequence[Tensor], found: Sequence[Tensor], truth: list[Tensor], sizes: list[Tensor]
) -> float:
    if not all(one.isfinite() for tensor in answer for one in tensor.aminmax()):
        return torch.nan
    triples = zip(found, truth, sizes, strict=True)
    errors = [((one.double() - exact).abs() / size).max() for one, exact, size in triples]
    return float(torch.stack(errors).max())


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

"""What is computed from logits, and the error of an answer against float64."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastrl.bench.case import FORWARD, Inputs

CHECKED = 64  # rows that are compared with float64
ROWS_AT_ONCE = 32  # of which float64 is computed, to hold little memory


@dataclasses.dataclass(frozen=True)
class Work:
    """What is computed from logits, in torch: the truth in float64, and eager.

    ``values`` are one or more numbers per token, from logits and the inputs with these names; a
    loss is the mean over the mask.
    """

    values: Callable[[Tensor, Inputs], tuple[Tensor, ...]]
    names: tuple[str, ...]
    mean: bool = False

    def eager(self, logits: Tensor, *tokens: Tensor, upcast: bool) -> Any:
        """Return what a provider returns, as trainers compute it: cast to float32, or not."""
        inputs = dict(zip(self.names, tokens, strict=True))
        values = self.values(logits.float() if upcast else logits, inputs)
        if self.mean:
            return masked_mean(values[0], inputs)
        return values if len(values) > 1 else values[0]


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


def kept_alone(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the logits with -inf for all tokens but these."""
    banned = torch.ones_like(logits, dtype=torch.bool).scatter(-1, ids, False)
    return logits.masked_fill(banned, -torch.inf)


def _stats(logits: Tensor, tokens: Inputs) -> tuple[Tensor, ...]:
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(-1, tokens["token_ids"][..., None]).squeeze(-1)
    return chosen, -(logprobs.exp() * logprobs).sum(-1)


def _loss(logits: Tensor, tokens: Inputs) -> Tensor:
    return clipped(logprobs_of(logits, tokens["token_ids"]), tokens)


def _divergence(logits: Tensor, tokens: Inputs, beta: float) -> Tensor:
    log_q = logits.log_softmax(-1)
    log_p = tokens["teacher_logits"].to(logits.dtype).log_softmax(-1)

    def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
        return torch.nn.functional.kl_div(log_b, log_a, reduction="none", log_target=True).sum(-1)

    if beta in (0.0, 1.0):
        return kl(log_q, log_p) if beta else kl(log_p, log_q)
    mixture = torch.logaddexp(log_q + math.log1p(-beta), log_p + math.log(beta))
    return beta * kl(log_p, mixture) + (1 - beta) * kl(log_q, mixture)


def divergence(beta: float) -> Work:
    """Return the mean divergence from a teacher."""
    names = ("mask", "teacher_logits")
    return Work(lambda logits, tokens: (_divergence(logits, tokens, beta),), names, mean=True)


ROLLOUT = ("token_ids", "advantages", "old_logprobs", "mask")
LOGPROBS = Work(lambda logits, x: (logprobs_of(logits, x["token_ids"]),), ("token_ids",))
STATS = Work(_stats, ("token_ids",))
LOSS = Work(lambda logits, x: (_loss(logits, x),), ROLLOUT, mean=True)
LOSS_WITH_TEACHER = Work(
    lambda logits, x: (_loss(logits, x) + _divergence(logits, x, 1.0),),
    (*ROLLOUT, "teacher_logits"),
    mean=True,
)
LOSS_OF_KEPT = Work(
    lambda logits, x: (_loss(kept_alone(logits, x["kept_ids"]), x),),
    (*ROLLOUT, "kept_ids"),
    mean=True,
)


def rows_at_once(ids: Tensor) -> tuple[Tensor, ...]:
    """Return the numbers of all rows of tokens ``[B, T]``, a few at a time."""
    rows = torch.arange(ids.numel(), device=ids.device)
    return rows.split(ROWS_AT_ONCE)  # type: ignore[no-any-return]


def at(x: Tensor, rows: Tensor) -> Tensor:
    """Return some rows of a tensor that begins with ``[B, T]``, without a copy of the others."""
    return x[rows // x.shape[1], rows % x.shape[1]]


def checked(ids: Tensor) -> Tensor:
    """Return the first and last rows of each sequence, which are compared."""
    sequences, tokens = ids.shape
    few = max(1, CHECKED // (2 * sequences))
    place = torch.arange(ids.numel(), device=ids.device) % tokens
    return ((place < few) | (place >= tokens - few)).nonzero().flatten()


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
        found = [at(rows, checked(inputs["token_ids"])), *(one[_columns(inputs)] for one in heads)]
        gradients = self.exact(inputs)[1]
        return largest(answer, found, gradients, [one.abs().max() for one in gradients])

    def of_output(self, output: Any, inputs: Inputs) -> float:
        """Return the largest error of what a forward returns."""
        values = [output] if torch.is_tensor(output) else output
        ids = inputs["token_ids"]
        found = values if self.work.mean else [at(x.view(ids.shape), checked(ids)) for x in values]
        outputs = self.exact(inputs)[0]
        return largest(values, found, outputs, [one.abs().clamp(min=1) for one in outputs])

    def exact(self, inputs: Inputs) -> tuple[list[Tensor], list[Tensor]]:
        """Return the true output and its gradients."""
        if self.inputs is not inputs:
            self.truth, self.inputs = self._computed(inputs), inputs
        return self.truth

    @torch.no_grad()
    def _computed(self, inputs: Inputs) -> tuple[list[Tensor], list[Tensor]]:
        """Take all rows for a loss and the gradient of a head, for the rest those compared."""
        ids, mean = inputs["token_ids"], self.work.mean
        heads = {name: double(x) for name, x in inputs.items() if name.endswith("weight")}
        few, columns = checked(ids), _columns(inputs) if self.trained else None
        values, slopes, dhead = [], [], torch.zeros((), device=ids.device)
        every = mean or self.trained
        for rows in rows_at_once(ids) if every else few.split(ROWS_AT_ONCE):
            compared = torch.isin(rows, few)
            differentiated = self.step != FORWARD and bool(self.trained or compared.any())
            logits = _logits(inputs, rows, heads).requires_grad_(differentiated)
            tokens = {name: _tokens(name, inputs, rows, heads) for name in self.work.names}
            with torch.enable_grad():
                value = torch.stack(self.work.values(logits, tokens))
                if mean:
                    value = value * tokens["mask"] / inputs["mask"].sum()
            values.append(value.detach() if mean else value.detach()[:, compared])
            if differentiated:
                slope = torch.autograd.grad(value, logits, torch.ones_like(value))[0]
                slopes.append(slope[compared] @ heads["weight"] if heads else slope[compared])
                if self.trained:
                    dhead = dhead + slope[:, columns].T @ double(at(inputs["hidden"], rows))
        output = torch.cat(values, 1)
        gradients = [torch.cat(slopes)] if slopes else []
        gradients += [dhead] if self.trained else []
        return [output.sum()] if mean else [*output], gradients


@torch.no_grad()
def largest(answer: Any, found: list[Tensor], truth: list[Tensor], sizes: list[Tensor]) -> float:
    """Return the largest error of what was found, relative to its size; NaN if not finite."""
    if not all(one.isfinite() for tensor in answer for one in tensor.aminmax()):
        return torch.nan
    triples = zip(found, truth, sizes, strict=True)
    errors = [((one.double() - exact).abs() / size).max() for one, exact, size in triples]
    return float(torch.stack(errors).max())  # NaN if one is


def _columns(inputs: Inputs) -> Tensor:
    """Return the tokens whose rows of the head's gradient are compared."""
    ids = at(inputs["token_ids"], checked(inputs["token_ids"]))
    ends = ids.new_tensor([0, len(inputs["weight"]) - 1])
    return torch.cat([ids, ends]).unique()  # type: ignore[no-any-return]


def _logits(inputs: Inputs, rows: Tensor, heads: Inputs, of: str = "") -> Tensor:
    """Return the logits of a few rows in float64, which may have to be computed."""
    if f"{of}weight" in heads:
        logits: Tensor = double(at(inputs[f"{of}hidden"], rows)) @ heads[f"{of}weight"].T
        return logits
    return double(at(inputs[f"{of}logits"], rows))


def _tokens(name: str, inputs: Inputs, rows: Tensor, heads: Inputs) -> Tensor:
    """Return what belongs to a few rows."""
    if name == "teacher_logits":
        return _logits(inputs, rows, heads, "teacher_")
    one: Tensor = inputs[name]
    return double(at(one.expand(inputs["token_ids"].shape) if one.dim() == 2 else one, rows))


def double(x: Tensor) -> Tensor:
    """Return numbers in float64; integers and masks as they are."""
    return x.double() if x.is_floating_point() else x

"""Log-probabilities, entropy and the policy loss from logits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fastrl
from fastrl.bench.case import BACKWARD, BOTH, FORWARD, Case, Inputs, Provider
from fastrl.bench.models import MODELS
from fastrl.bench.peers import (
    LOGITS_PEERS,
    Forward,
    Participants,
    imported,
    liger_gradient,
    liger_inputs,
    liger_loss,
)

STD = 3.0  # of the logits
CHECKED = 64  # rows that are compared with float64, at most
ROWS_AT_ONCE = 32  # of which float64 is computed, to hold little memory
MASKED, PACKED, SLICED = VARIANTS = ("half the rows masked", "packed", "sliced")
SEQUENCES = 64  # that are packed into one row
OBJECTIVE = fastrl.Objective(clip_low=0.2, clip_high=0.2, aggregation="token-mean")
ROLLOUT = ("token_ids", "advantages", "old_logprobs", "mask")
Part = tuple[slice, slice]


class Size(NamedTuple):
    """One entry of a selection; ``rows`` are all tokens, or all answers of a group."""

    op: str
    model: str
    rows: int
    dtype: torch.dtype
    variant: str = ""


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
            return (values[0] * tokens["mask"]).sum() / tokens["mask"].sum()
        return values if len(values) > 1 else values[0]


def logprobs_of(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probability of each token."""
    return logits.log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)


def _stats(logits: Tensor, tokens: Inputs) -> tuple[Tensor, ...]:
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(-1, tokens["token_ids"][..., None]).squeeze(-1)
    return chosen, -(logprobs.exp() * logprobs).sum(-1)


def clipped(logprobs: Tensor, tokens: Inputs) -> Tensor:
    """Return PPO's clipped loss of each token."""
    ratio = (logprobs - tokens["old_logprobs"]).exp()
    bounded = ratio.clamp(0.8, 1.2)
    return -torch.minimum(ratio * tokens["advantages"], bounded * tokens["advantages"])


def mean_loss(logprobs: Tensor, tokens: Inputs) -> Tensor:
    """Return the mean of the clipped loss over the mask."""
    return (clipped(logprobs, tokens) * tokens["mask"]).sum() / tokens["mask"].sum()


LOGPROBS = Work(lambda logits, tokens: (logprobs_of(logits, tokens["token_ids"]),), ("token_ids",))
STATS = Work(_stats, ("token_ids",))
LOSS = Work(
    lambda logits, tokens: (clipped(logprobs_of(logits, tokens["token_ids"]), tokens),),
    ROLLOUT,
    mean=True,
)


def parts(inputs: Inputs) -> Iterator[Part]:
    """Yield indices of a few rows at a time, all in order."""
    sequences, tokens = inputs["token_ids"].shape
    for b in range(sequences):
        for t in range(0, tokens, ROWS_AT_ONCE):
            yield slice(b, b + 1), slice(t, min(t + ROWS_AT_ONCE, tokens))


class Error:
    """The error of an answer against float64.

    Log-probabilities and losses relative to the larger of 1 and their size, gradients to their
    largest element; of values per token and of gradients, the first rows at most. The truth is
    computed once for the inputs of the last call.
    """

    def __init__(self, work: Work, step: str) -> None:
        self.work, self.step = work, step
        self.inputs: Inputs | None = None

    @torch.no_grad()
    def __call__(self, answer: Any, inputs: Inputs) -> float:
        """Return the largest error of an output, or of gradients."""
        if self.inputs is not inputs:
            self.truth, self.inputs = self.exact(inputs), inputs
        found = self.compared(answer, inputs)
        worst = 0.0
        for one, truth in zip(found, self.truth, strict=True):
            size = truth.abs().clamp(min=1) if self.step == FORWARD else truth.abs().max()
            error = ((one.double() - truth).abs() / size).max()
            worst = max(worst, float(error.nan_to_num(torch.inf)))
        return worst

    def logits(self, inputs: Inputs, part: Part) -> Tensor:
        """Return the logits of a few rows in float64."""
        logits: Tensor = inputs["logits"][part].double()
        return logits

    def tokens(self, inputs: Inputs, part: Part) -> Inputs:
        """Return what belongs to these rows."""
        found: Inputs = {}
        for name in self.work.names:
            one = inputs[name]
            one = one.expand(inputs["token_ids"].shape) if one.dim() == 2 else one
            found[name] = one[part].double() if one.is_floating_point() else one[part]
        return found

    def compared(self, answer: Any, inputs: Inputs) -> list[Tensor]:
        """Return the part of an answer that is compared with the truth."""
        if self.step != FORWARD:
            return [checked_rows(answer[0], inputs)]
        if self.work.mean:
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
        if self.work.mean:
            return (values[0] * tokens["mask"]).sum() / inputs["mask"].sum()
        return torch.stack(values).sum()

    def slopes(self, inputs: Inputs, part: Part) -> Tensor:
        """Return the gradient of these rows' logits, of outputs whose gradients are 1."""
        leaf = self.logits(inputs, part).requires_grad_()
        with torch.enable_grad():
            total = self.total(inputs, part, leaf)
        (gradient,) = torch.autograd.grad(total, leaf)
        return gradient.flatten(0, 1)


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


def rows_of(size: Size) -> tuple[int, int]:
    """Return sequences and tokens of each: several, since peers take one advantage for each."""
    sequences = next(n for n in (8, 2, 1) if size.rows % n == 0)
    sequences = 1 if size.variant == PACKED else sequences
    return sequences, size.rows // sequences


def raised(vocabulary: int, rows: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Return logits whose token has a probability between 0.01 and 0.99 among normal ones."""
    log_odds = 9.2 * torch.rand(*rows, device=generator.device, generator=generator) - 4.6
    return log_odds + math.log(vocabulary) + STD**2 / 2


def rollout(logprobs: Tensor, variant: str, generator: torch.Generator) -> Inputs:
    """Return what comes with a rollout; about one token in forty is clipped."""
    B, T = logprobs.shape
    random = {"device": logprobs.device, "generator": generator}
    share = 0.5 if variant == MASKED else 1.0
    found: Inputs = {
        "old_logprobs": logprobs + 0.1 * torch.randn(B, T, **random),
        "mask": torch.rand(B, T, **random) < share,
        "of_sequences": torch.randn(SEQUENCES if variant == PACKED else B, **random),
    }
    if variant == PACKED:
        bounds = torch.linspace(0, 1, SEQUENCES + 1, device=logprobs.device).square().mul(T).int()
        found["cu_seqlens"] = bounds
        found["advantages"] = found["of_sequences"].repeat_interleave(bounds.diff())[None]
    else:
        found["advantages"] = found["of_sequences"][:, None]
    return found


def logits_inputs(size: Size, device: torch.device, seed: int) -> Inputs:
    """Return normal logits with one raised target per row, and what comes with a rollout."""
    generator = torch.Generator(device).manual_seed(seed)
    vocabulary = MODELS[size.model].vocabulary
    B, T = rows_of(size)
    longer = T + (size.variant == SLICED)
    logits = torch.empty(B, longer, vocabulary, dtype=size.dtype, device=device)
    logits = logits.normal_(0, STD, generator=generator)[:, :T]
    ids = torch.randint(vocabulary, (B, T), device=device, generator=generator)
    target = raised(vocabulary, (B, T), generator).to(size.dtype)
    logits.scatter_(-1, ids[..., None], target[..., None])
    inputs = {"logits": logits, "token_ids": ids}
    old = [logprobs_of(logits[part].float(), ids[part]).flatten() for part in parts(inputs)]
    return inputs | rollout(torch.cat(old).view(B, T), size.variant, generator)


def token_logprobs(size: Size, step: str, who: Participants) -> Case:
    """The log-probability of one token per row; forward without a graph, as samples are scored."""

    def ours(backend: str) -> Forward:
        return lambda inputs: fastrl.token_logprobs(
            inputs["logits"], inputs["token_ids"], backend=backend
        )

    providers = who.fastrl(ours)
    for peer in LOGITS_PEERS:
        providers += who.peer(*peer[:2], _scored(peer.function), on_gpu=peer.on_gpu)
    return _case(size, step, who, providers, LOGPROBS)


def token_stats(size: Size, step: str, who: Participants) -> Case:
    """Log-probability and entropy; forward without a graph."""

    def ours(backend: str) -> Forward:
        return lambda inputs: fastrl.token_stats(
            inputs["logits"], inputs["token_ids"], backend=backend
        )[:2]

    def trl(inputs: Inputs) -> Any:
        function = imported("trl", "trl.trainer.utils", "selective_log_softmax_and_entropy")
        return function(inputs["logits"], inputs["token_ids"])

    providers = [*who.fastrl(ours), *who.peer("trl", "TRL log-softmax and entropy", trl)]
    return _case(size, step, who, providers, STATS)


def logits_policy_loss(size: Size, step: str, who: Participants) -> Case:
    """The clipped loss, whose gradient fastrl computes in the forward pass."""

    def ours(backend: str) -> Forward:
        return lambda inputs: _loss(inputs["logits"], inputs, backend=backend)

    def in_place(backend: str) -> Forward:
        return lambda inputs: _loss(_of_model(inputs), inputs, backend=backend, inplace=True)

    def logits(loss: Tensor, inputs: Inputs) -> tuple[Tensor, ...]:
        loss.backward()  # type: ignore[no-untyped-call]
        return (inputs["logits"].detach(),)

    def copied(inputs: Inputs) -> Inputs:
        return inputs | {"logits": inputs["logits"].clone()}

    providers = who.fastrl(ours)
    for one in who.fastrl(in_place, named=" in place"):
        one = one._replace(kind="fastrl in place", backward=logits, prepare=one.prepare or copied)
        providers += [] if "reference" in one.name else [one]
    for peer in LOGITS_PEERS:
        providers += who.peer(*peer[:2], _of_logprobs(peer.function), on_gpu=peer.on_gpu)
    if size.variant != PACKED:  # Liger takes one advantage per row of tokens
        providers += who.peer(
            "liger", "Liger triton_grpo_loss in place", liger_loss, on_gpu=True,
            backward=liger_gradient, prepare=liger_inputs,
        )  # fmt: skip
    return _case(size, step, who, providers, LOSS)


def _case(size: Size, step: str, who: Participants, ours: list[Provider], work: Work) -> Case:
    vocabulary = MODELS[size.model].vocabulary
    share = 0.5 if size.variant == MASKED else 1.0
    # Masked rows are not read, but their gradient is written. A loss can leave its gradient at the
    # first reading; with statistics it depends on what follows.
    reads, writes = {FORWARD: (1, 0), BACKWARD: (1, 1), BOTH: (1 if work.mean else 2, 1)}[step]
    names = ("logits", *work.names)
    return Case(
        op=size.op,
        step=step,
        model=size.model,
        shape={"rows": size.rows, "vocabulary": vocabulary},
        dtype=size.dtype,
        inputs=lambda seed: logits_inputs(size, who.device, seed),
        providers=[*ours, *who.eager(_eager(work), names, size.dtype), _copy(step)],
        error=Error(work, step),
        leaves=() if step == FORWARD and not work.mean else ("logits",),
        bytes_moved=int((reads * share + writes) * size.rows * vocabulary * size.dtype.itemsize),
        variant=size.variant,
    )


def _scored(function: Callable[..., Tensor]) -> Forward:
    return lambda inputs: function(inputs["logits"], inputs["token_ids"])


def _of_logprobs(function: Callable[..., Tensor]) -> Forward:
    return lambda inputs: mean_loss(function(inputs["logits"], inputs["token_ids"]), inputs)


def _loss(logits: Tensor, inputs: Inputs, **options: Any) -> Tensor:
    tokens = [inputs[name] for name in ("token_ids", "mask", "old_logprobs")]
    if "cu_seqlens" in inputs:
        logits, *tokens = (x.flatten(0, 1) for x in (logits, *tokens))
        options["cu_seqlens"] = inputs["cu_seqlens"]
    return fastrl.logits_policy_loss(
        logits, tokens[0], inputs["of_sequences"], tokens[1], old_logprobs=tokens[2],
        objective=OBJECTIVE, **options,
    ).loss  # fmt: skip


class _FromModel(torch.autograd.Function):
    """Logits that are not a leaf, like the output of a model."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, anchor: Tensor) -> Tensor:
        return logits.data  # the same memory, but not a view that autograd would guard

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None


def _of_model(inputs: Inputs) -> Tensor:
    logits = inputs["logits"].detach()
    anchor = torch.zeros((), device=logits.device, requires_grad=True)
    found: Tensor = _FromModel.apply(logits, anchor)
    return found


def _copy(step: str) -> Provider:
    held: list[Tensor] = []

    def copy(inputs: Inputs) -> Tensor:
        if not held or held[0].shape != inputs["logits"].shape:
            held[:] = [torch.empty_like(inputs["logits"].detach())]
        return held[0].copy_(inputs["logits"].detach())

    return floor("copy", copy, step)


def floor(name: str, work: Forward, step: str) -> Provider:
    """Return a provider that does the same in any pass."""
    if step == BACKWARD:
        return Provider(name, "floor", lambda inputs: None, lambda _, inputs: work(inputs))
    return Provider(name, "floor", work, lambda answer, _: answer)


def _eager(work: Work) -> Callable[..., Any]:
    def function(logits: Tensor, *tokens: Tensor, upcast: bool) -> Any:
        logits = logits.float() if upcast else logits
        return work.output(logits, dict(zip(work.names, tokens, strict=True)))

    return function

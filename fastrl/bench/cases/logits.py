"""Log-probabilities, entropy and the policy loss from logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fastrl
from fastrl.backend import Backend
from fastrl.bench.case import BACKWARD, BOTH, FORWARD, Case, Inputs, Provider, Size
from fastrl.bench.error import LOGPROBS, LOSS, STATS, Error, Work
from fastrl.bench.inputs import MASKED, PACKED, logits_inputs
from fastrl.bench.models import MODELS
from fastrl.bench.peers import Forward, Participants, liger_grpo, logits_peers, trl_stats

OBJECTIVE = fastrl.Objective(clip_low=0.2, clip_high=0.2, aggregation="token-mean")


def token_logprobs(size: Size, step: str, who: Participants) -> Case:
    """The log-probability of one token per row; forward without a graph, as samples are scored."""

    def ours(inputs: Inputs, backend: Backend) -> Tensor:
        return fastrl.token_logprobs(inputs["logits"], inputs["token_ids"], backend=backend)

    return logits_case(size, step, who, [*who.fastrl(ours), *logits_peers(who)], LOGPROBS)


def token_stats(size: Size, step: str, who: Participants) -> Case:
    """Log-probability and entropy; forward without a graph."""

    def ours(inputs: Inputs, backend: Backend) -> Any:
        return fastrl.token_stats(inputs["logits"], inputs["token_ids"], backend=backend)[:2]

    return logits_case(size, step, who, [*who.fastrl(ours), *trl_stats(who)], STATS)


def logits_policy_loss(size: Size, step: str, who: Participants) -> Case:
    """The clipped loss, whose gradient fastrl computes in the forward pass."""

    def ours(inputs: Inputs, backend: Backend) -> Tensor:
        return _loss(inputs["logits"], inputs, backend=backend)

    def in_place(inputs: Inputs, backend: Backend) -> Tensor:
        return _loss(_of_model(inputs), inputs, backend=backend, inplace=True)

    def over_logits(loss: Tensor, inputs: Inputs) -> tuple[Tensor, ...]:
        torch.autograd.backward(loss)
        return (inputs["logits"].detach(),)

    def copied(inputs: Inputs) -> Inputs:
        logits = inputs["logits"]  # a clone of a slice would not be one
        size, strides = logits.untyped_storage().nbytes() // logits.itemsize, logits.stride()
        copy = logits.new_empty(size).as_strided(logits.shape, strides)
        return inputs | {"logits": copy.copy_(logits)}

    providers = who.fastrl(ours)
    kernels = tuple(name for name in who.backends if name != "reference")
    for one in who._replace(backends=kernels).fastrl(in_place):
        name, kind, prepare = f"{one.name} in place", "fastrl in place", one.prepare or copied
        providers.append(Provider(name, kind, one.forward, over_logits, prepare))
    providers += logits_peers(who, loss=True)
    if size.variant != PACKED:  # Liger takes one advantage per row of tokens
        providers += liger_grpo(who)
    return logits_case(size, step, who, providers, LOSS)


def _loss(logits: Tensor, inputs: Inputs, **options: Any) -> Tensor:
    tokens = [inputs[name] for name in ("token_ids", "mask", "old_logprobs")]
    if "cu_seqlens" in inputs:
        logits, *tokens = (x.flatten(0, 1) for x in (logits, *tokens))
        options["cu_seqlens"] = inputs["cu_seqlens"]
    ids, mask, old = tokens
    return fastrl.logits_policy_loss(
        logits, ids, inputs["sequence_advantages"], mask, old_logprobs=old, objective=OBJECTIVE,
        **options,
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
    found: Tensor = _FromModel.apply(logits, anchor)  # type: ignore[no-untyped-call]
    return found


def logits_case(
    size: Size,
    step: str,
    who: Participants,
    ours_and_peers: list[Provider],
    work: Work,
    inputs: Callable[[Size, torch.device, int], Inputs] = logits_inputs,
) -> Case:
    """Return a case with eager torch and a copy."""
    vocabulary = MODELS[size.model].vocabulary
    copied = ("logits", "teacher_logits") if "teacher_logits" in work.names else ("logits",)
    share = 0.5 if size.variant == MASKED else 1.0
    # Masked rows are not read, but their gradient is written. A loss can leave its gradient at the
    # first reading; with statistics it depends on what follows.
    reads, writes = {FORWARD: (1, 0), BACKWARD: (1, 1), BOTH: (1 if work.mean else 2, 1)}[step]
    moved = (reads * len(copied) * share + writes) * size.rows * vocabulary * size.dtype.itemsize
    eager = who.eager(work.eager, ("logits", *work.names), size.dtype)
    error = Error(work, step)
    return Case(
        size=size,
        step=step,
        shape={"rows": size.rows, "vocabulary": vocabulary},
        inputs=lambda seed: inputs(size, who.device, seed),
        providers=[*ours_and_peers, *eager, floor("copy", Copy(*copied), step)],
        error=error,
        output_error=error.of_output if step == BOTH else None,
        leaves=() if step == FORWARD and not work.mean else ("logits",),
        bytes_moved=int(moved),
    )


class Copy:
    """Copies to memory that it keeps."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.held: dict[str, Tensor] = {}

    def __call__(self, inputs: Inputs) -> None:
        """Copy."""
        for name in self.names:
            source = inputs[name].detach()
            if name not in self.held:
                self.held[name] = torch.empty_like(source)
            self.held[name].copy_(source)


def floor(name: str, work: Forward, step: str) -> Provider:
    """Return a provider whose work is the same in any pass."""
    if step == BACKWARD:
        return Provider(name, "floor", lambda inputs: None, lambda _, inputs: work(inputs))
    return Provider(name, "floor", work, lambda answer, _: answer)

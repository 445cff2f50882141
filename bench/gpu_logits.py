"""Log-probability, entropy, loss and gradient from logits, on a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from bench_logits_policy_loss import _FromModel
from gpu_item import Item, backends, eager_forms, kernels, sequences
from gpu_peers import liger_inputs, liger_loss_gradient, peer, trl_stats
from logits import STD, eager_logprobs
from timing import Case, Provider

import fastrl

CHECKED_ROWS = 64  # rows of logits that are compared with float64, the first ones
PACKED = 64  # sequences of uneven lengths, in one row
OBJECTIVE = fastrl.Objective(clip_low=0.2, clip_high=0.2, aggregation="token-mean")
HOST_BOUND = 2**28  # bytes of logits that a GPU reads in less time than a call takes the host
ENTROPY = 0.01  # weight of the entropy in the gradient of both statistics
STATS, STATS_GRADIENT, LOSS = WORK = (
    "log-probability and entropy",
    "log-probability and entropy, with backward",
    "loss and gradient",
)


class Passes(NamedTuple):
    """How often logits are read, and their gradient written, which is 0 in masked rows."""

    read: int
    written: int

    def of(self, density: float) -> float:
        return self.read * density + self.written


#: The least for each kind of work.
PASSES = {STATS: Passes(1, 0), STATS_GRADIENT: Passes(2, 1), LOSS: Passes(1, 1)}


class Logits(NamedTuple):
    """A shape: rows, vocabulary, share of active rows, whether the rows are a view.

    Packed sequences are for the loss, and without the peers, which do not take them.
    """

    N: int
    V: int
    dtype: torch.dtype = torch.bfloat16
    density: float = 1.0
    sliced: bool = False
    packed: bool = False

    def works(self) -> tuple[str, ...]:
        return (LOSS,) if self.packed else WORK


def logits_item(device, shape: Logits, work: str) -> Item:
    N, V, dtype, density, sliced, packed = shape
    B = 1 if packed else sequences(N)
    T = N // B

    def inputs(seed):
        generator = torch.Generator(device).manual_seed(seed)
        logits = torch.empty(B, T + sliced, V, dtype=dtype, device=device)
        logits.normal_(0, STD, generator=generator)
        logits = logits[:, :T]
        ids = torch.randint(V, (B, T), device=device, generator=generator)
        raised = math.log(V) + STD**2 / 2
        raised = raised + 9.2 * torch.rand(B, T, 1, device=device, generator=generator) - 4.6
        logits.scatter_(-1, ids[..., None], raised.to(dtype))
        old = fastrl.token_logprobs(logits, ids).detach()
        noise = torch.randn(B, T, device=device, generator=generator)
        bounds = torch.linspace(0, 1, PACKED + 1, device=device).square().mul(N).int()
        return {
            **({"cu_seqlens": bounds} if packed else {}),
            "logits": logits,
            "token_ids": ids,
            "advantages": torch.randn(
                PACKED if packed else B, 1, device=device, generator=generator
            ),
            "mask": torch.rand(B, T, device=device, generator=generator) < density,
            "old_logprobs": old + 0.1 * noise,
        }

    providers, error = {
        STATS: (_stats, _stats_error),
        STATS_GRADIENT: (_stats_gradient, _stats_gradient_error),
        LOSS: (_loss_of_logits, _gradient_error),
    }[work]
    held = f", {density:.0%} active" if density < 1 else ""
    view = (", sliced" if sliced else "") + (", packed" if packed else "")
    ours = ("fastrl", "scaled") if packed else ""  # of kinds
    return Item(
        lambda: Case(
            op="logits_policy_loss" if work == LOSS else "token_stats",
            work=work + held + view,
            shape=f"{N} x {V}",
            dtype=dtype,
            bytes_moved=int(PASSES[work].of(density) * N * V * dtype.itemsize),
            inputs=inputs,
            providers=[*(one for one in providers(device) if one.kind.startswith(ours)), _copy()],
            error=error,
        ),
        small=N * V * dtype.itemsize < HOST_BOUND,
        density=density,
    )


def _copy() -> Provider:
    target = {}

    def copy(inputs):
        logits = inputs["logits"]
        if "logits" not in target:
            target["logits"] = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        return target["logits"].copy_(logits)

    return Provider("copy", "floor", copy)


def eager_stats(logits, token_ids, mask):
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(-1, token_ids[..., None]).squeeze(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return chosen * mask, entropy * mask


def _stats(device) -> Iterator[Provider]:
    def ours(backend):
        def run(inputs):
            with torch.no_grad():
                return fastrl.token_stats(
                    inputs["logits"], inputs["token_ids"], mask=inputs["mask"], backend=backend
                )[:2]

        return run

    def of(function):
        def run(inputs):
            with torch.no_grad():
                return function(*(inputs[name] for name in ("logits", "token_ids", "mask")))

        return run

    for backend in backends(device):
        yield Provider(f"fastrl {backend}", f"fastrl {backend}", ours(backend))
    for name, kind, function in eager_forms(eager_stats, device):
        yield Provider(name, kind, of(function))
    yield peer("TRL fused", "trl", of(trl_stats))


def _stats_gradient(device) -> Iterator[Provider]:
    def gradient(function):
        def run(inputs):
            logits = inputs["logits"].detach().requires_grad_()
            logprobs, entropy = function(logits, inputs["token_ids"], inputs["mask"])
            return torch.autograd.grad((logprobs + ENTROPY * entropy).sum(), logits)[0]

        return run

    def ours(backend):
        return lambda logits, ids, mask: fastrl.token_stats(
            logits, ids, mask=mask, backend=backend
        )[:2]

    for backend in backends(device):
        yield Provider(f"fastrl {backend}", f"fastrl {backend}", gradient(ours(backend)))
    for name, kind, function in eager_forms(eager_stats, device):
        yield Provider(name, kind, gradient(function))
    yield peer("TRL fused", "trl", gradient(trl_stats))


def eager_loss(logits, token_ids, advantages, old_logprobs, mask):
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return clipped_loss(eager_logprobs(logits, token_ids), advantages, old_logprobs, mask)


def clipped_loss(logprobs, advantages, old_logprobs, mask):
    ratio = (logprobs - old_logprobs).exp()
    bounded = ratio.clamp(0.8, 1.2)
    return -(torch.minimum(ratio * advantages, bounded * advantages) * mask).sum() / mask.sum()


def _trl_loss(logits, token_ids, advantages, old_logprobs, mask):
    logprobs = trl_stats(logits, token_ids, mask)[0]
    return clipped_loss(logprobs, advantages, old_logprobs, mask)


def _packed(inputs):
    return ("cu_seqlens",) if "cu_seqlens" in inputs else ()


LOSS_INPUTS = ("token_ids", "advantages", "old_logprobs", "mask")


def _ours(logits, ids, advantages, old, mask, cu_seqlens=None, **options):
    if cu_seqlens is not None:
        logits, ids, old, mask = (x.flatten(0, 1) for x in (logits, ids, old, mask))
    return fastrl.logits_policy_loss(
        logits, ids, advantages[:, 0], mask, old_logprobs=old, objective=OBJECTIVE,
        cu_seqlens=cu_seqlens, **options,
    )  # fmt: skip


def _loss_of_logits(device) -> Iterator[Provider]:
    def gradient(function, factor=None):
        def run(inputs):
            logits = inputs["logits"].detach().requires_grad_()
            loss = function(logits, *(inputs[name] for name in (*LOSS_INPUTS, *_packed(inputs))))
            return torch.autograd.grad(loss if factor is None else factor * loss, logits)[0]

        return run

    def ours(backend):
        return lambda *given, **options: _ours(*given, **options, backend=backend).loss

    for backend in backends(device):
        yield Provider(f"fastrl {backend}", f"fastrl {backend}", gradient(ours(backend)))
    for backend in kernels(device):
        name = f"fastrl {backend}"
        yield Provider(f"{name}, half the loss", "scaled", gradient(ours(backend), 0.5))
        yield Provider(
            f"{name} in place",
            f"{name} in place",
            _in_place(backend),
            lambda inputs: {**inputs, "logits": inputs["logits"].clone()},
        )
    for name, kind, function in eager_forms(eager_loss, device):
        yield Provider(name, kind, gradient(function))
    yield peer("TRL fused", "trl", gradient(_trl_loss))
    yield peer("Liger GRPO in place", "liger_kernel", liger_loss_gradient, liger_inputs)


def _in_place(backend):
    def run(inputs):
        anchor = torch.zeros((), device=inputs["logits"].device, requires_grad=True)
        logits = _FromModel.apply(inputs["logits"], anchor)
        given = (inputs[name] for name in (*LOSS_INPUTS, *_packed(inputs)))
        _ours(logits, *given, backend=backend, inplace=True).loss.backward()
        return logits.detach()

    return run


def _rows(inputs):
    """The first rows in float64."""
    cut = {name: x[:1, :CHECKED_ROWS] for name, x in inputs.items() if name != "cu_seqlens"}
    if "cu_seqlens" in inputs:
        of_tokens = inputs["advantages"].repeat_interleave(inputs["cu_seqlens"].diff(), 0)
        cut["advantages"] = of_tokens.t()[:, :CHECKED_ROWS]
    return {name: x.double() if x.is_floating_point() else x for name, x in cut.items()}


def _stats_error(answer, inputs):
    exact = _rows(inputs)
    logprobs = exact["logits"].log_softmax(-1)
    chosen = logprobs.gather(-1, exact["token_ids"][..., None]).squeeze(-1)
    errors = []
    for found, truth in zip(answer, (chosen, -(logprobs.exp() * logprobs).sum(-1)), strict=True):
        wanted = torch.where(exact["mask"], truth, 0.0)
        found = torch.where(exact["mask"], found[:1, :CHECKED_ROWS], 0.0).double()
        errors.append(float(((found - wanted).abs() / wanted.abs().clamp(min=1)).max()))
    return max(errors)


def _stats_gradient_error(answer, inputs):
    exact = _rows(inputs)
    logits = exact["logits"].requires_grad_()
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(-1, exact["token_ids"][..., None]).squeeze(-1)
    total = chosen - ENTROPY * (logprobs.exp() * logprobs).sum(-1)
    (truth,) = torch.autograd.grad((total * exact["mask"]).sum(), logits)
    return float((answer[:1, :CHECKED_ROWS] - truth).abs().max() / truth.abs().max())


def _gradient_error(answer, inputs):
    exact = _rows(inputs)
    logits = exact["logits"].requires_grad_()
    loss = eager_loss(logits, *(exact[name] for name in LOSS_INPUTS)) * exact["mask"].sum()
    (truth,) = torch.autograd.grad(loss / inputs["mask"].sum(), logits)
    return float((answer[:1, :CHECKED_ROWS] - truth).abs().max() / truth.abs().max())

"""From hidden states and the LM head, on a GPU: loss and gradients; log-probabilities."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from gpu_item import Item, backends, eager_forms, kernels, sequences
from gpu_logits import CHECKED_ROWS, LOSS_INPUTS, OBJECTIVE, clipped_loss, eager_loss
from gpu_peers import liger_linear_loss, linear_logprob_peers, peer
from logits import STD, eager_logprobs
from timing import Case, Inputs, Provider

import fastrl

BF16 = torch.bfloat16
TRAINED, FROZEN = "loss and gradients, trained head", "loss and gradients, frozen head"
CHECKED_COLUMNS = 64  # of the vocabulary, whose weight gradient is compared with float64


class Linear(NamedTuple):
    """A shape: rows, width, vocabulary, whether the head is trained, share of active rows."""

    N: int
    H: int
    V: int
    trained: bool = True
    density: float = 1.0


def linear_item(device: torch.device, shape: Linear) -> Item:
    """Loss and gradients, in what is computed in one pass."""
    names = ("hidden", "weight") if shape.trained else ("hidden",)
    gradients = functools.partial(_gradients, names)
    work = TRAINED if shape.trained else FROZEN

    def ours(backend):
        def loss(hidden, weight, ids, advantages, old, mask):
            return fastrl.linear_policy_loss(
                hidden, weight, ids, advantages[:, 0], mask, old_logprobs=old,
                objective=OBJECTIVE, backend=backend,
            ).loss  # fmt: skip

        return loss

    def eager(hidden, weight, *rest):
        return eager_loss(hidden @ weight.T, *rest)

    def of_logprobs(function):
        def loss(hidden, weight, ids, *rest):
            found = function(hidden.flatten(0, 1), weight, ids.flatten())
            return clipped_loss(found.view(ids.shape), *rest)

        return loss

    def providers() -> Iterator[Provider]:
        for backend in backends(device):
            yield Provider(f"fastrl {backend}", f"fastrl {backend}", gradients(ours(backend)))
        for backend in kernels(device):
            name, function = f"fastrl {backend}", ours(backend)
            yield Provider(
                f"{name}, float32 weights, autocast",
                f"{name} autocast",
                _autocast(gradients(function), device),
                _float32_weight(),
            )
            yield Provider(f"{name}, half the loss", "scaled", gradients(function, 0.5))
        for name, kind, function in eager_forms(eager, device):
            yield Provider(name, kind, gradients(function))
        for name, module, function in linear_logprob_peers():
            yield peer(name, module, gradients(of_logprobs(function)))
        yield peer("Liger fused linear GRPO", "liger_kernel", gradients(liger_linear_loss))
        yield Provider("bare GEMMs", "floor", functools.partial(_gemms, shape.trained))

    return _item(
        device, shape, "linear_policy_loss", work, providers,
        GradientError(shape, _loss_slopes), flops=(6 if shape.trained else 4),
    )  # fmt: skip


def logprobs_item(device: torch.device, shape: Linear, *, scored: bool) -> Item:
    """Scoring without a gradient, or the sum of the log-probabilities with its two passes."""
    work = "scoring" if scored else "log-probabilities, two passes with gradients"

    def of(function):
        if scored:

            def run(inputs):
                with torch.no_grad():
                    hidden = inputs["hidden"].flatten(0, 1)
                    return function(hidden, inputs["weight"], inputs["token_ids"].flatten())

            return run

        def total(hidden, weight, ids, advantages, old, mask):
            return function(hidden.flatten(0, 1), weight, ids.flatten()).sum()

        return _gradients(("hidden", "weight"), total)

    def ours(backend):
        return lambda hidden, weight, ids: fastrl.linear_token_logprobs(
            hidden, weight, ids, backend=backend
        )

    def eager(hidden, weight, ids):
        return eager_logprobs((hidden @ weight.T).float(), ids)

    def providers() -> Iterator[Provider]:
        for backend in backends(device):
            yield Provider(f"fastrl {backend}", f"fastrl {backend}", of(ours(backend)))
        for name, kind, function in eager_forms(eager, device):
            yield Provider(name, kind, of(function))
        for name, module, function in linear_logprob_peers():
            yield peer(name, module, of(function))
        if scored:
            yield Provider(
                "bare GEMM", "floor", lambda inputs: inputs["hidden"] @ inputs["weight"].T
            )
        else:
            yield Provider("bare GEMMs", "floor", functools.partial(_gemms, True))

    return _item(
        device, shape, "linear_token_logprobs", work, providers,
        _logprob_error if scored else GradientError(shape, _unit_slopes),
        flops=2 if scored else 6,
    )  # fmt: skip


def _item(device, shape, op, work, providers, error, *, flops) -> Item:
    held = f", {shape.density:.0%} active" if shape.density < 1 else ""
    N, H, V = shape[:3]
    return Item(
        lambda: Case(
            op=op,
            work=work + held,
            shape=f"{N} x {H} x {V}",
            dtype=BF16,
            bytes_moved=0,
            inputs=functools.partial(_inputs, device, shape),
            providers=list(providers()),
            error=error,
        ),
        small=False,
        flops=int(flops * N * H * V * shape.density),
        density=shape.density,
    )


def _inputs(device: torch.device, shape: Linear, seed: int) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    N, H, V = shape[:3]
    B = sequences(N)
    rows = (B, N // B)

    def normal(*size):
        return torch.randn(*size, device=device, generator=generator)

    mask = torch.rand(rows, device=device, generator=generator) < shape.density
    return {
        "hidden": normal(*rows, H).to(BF16),
        "weight": (normal(V, H) * (STD / H**0.5)).to(BF16),
        "token_ids": torch.randint(V, rows, device=device, generator=generator),
        "advantages": normal(B, 1),
        "old_logprobs": -math.log(V) - STD**2 / 2 + 0.1 * normal(*rows),
        "mask": mask,
        "active": int(mask.sum()),
    }


def _gradients(names: tuple[str, ...], function: Callable, factor: float | None = None) -> Callable:
    def run(inputs: Inputs) -> tuple[torch.Tensor, ...]:
        leaves = {name: inputs[name].detach().requires_grad_() for name in names}
        given = {**inputs, **leaves}
        loss = function(given["hidden"], given["weight"], *(inputs[name] for name in LOSS_INPUTS))
        loss = loss if factor is None else factor * loss
        return torch.autograd.grad(loss, list(leaves.values()))

    return run


def _autocast(run: Callable, device: torch.device) -> Callable:
    def under_autocast(inputs: Inputs) -> tuple[torch.Tensor, ...]:
        with torch.autocast(device.type, BF16):
            return run(inputs)

    return under_autocast


def _float32_weight() -> Callable[[Inputs], Inputs]:
    """The weight in float32, converted once: it is not part of the call."""
    held: dict[int, torch.Tensor] = {}

    def prepare(inputs: Inputs) -> Inputs:
        weight = inputs["weight"]
        if weight.data_ptr() not in held:
            held[weight.data_ptr()] = weight.float()
        return {**inputs, "weight": held[weight.data_ptr()]}

    return prepare


def _gemms(dw: bool, inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """The GEMMs of as many rows as are active, in bfloat16."""
    hidden, weight = inputs["hidden"].flatten(0, 1)[: inputs["active"]], inputs["weight"]
    logits = hidden @ weight.T
    return (logits @ weight, logits.T @ hidden) if dw else (logits @ weight,)


def _unit_slopes(logprobs: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    return torch.ones_like(logprobs)


def _loss_slopes(logprobs: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """dL/dlogprobs of the clipped loss in float64."""
    leaf = logprobs.detach().view(inputs["token_ids"].shape).requires_grad_()
    loss = clipped_loss(leaf, inputs["advantages"].double(), inputs["old_logprobs"].double(),
                        inputs["mask"])  # fmt: skip
    return torch.autograd.grad(loss, leaf)[0].flatten()


class GradientError:
    """The larger error of dhidden of the first rows and of dweight of the first columns.

    Both relative to their largest element. The truth takes one pass over all rows in float64; it is
    computed once, for the first inputs of a case.
    """

    def __init__(self, shape: Linear, slopes: Callable[[torch.Tensor, Inputs], torch.Tensor]):
        self.shape, self.slopes = shape, slopes
        self.truth: list[torch.Tensor] = []

    def __call__(self, answer: tuple[torch.Tensor, ...], inputs: Inputs) -> float:
        if not self.truth:
            self.truth = self._exact(inputs)
        came = [answer[0].flatten(0, -2)[:CHECKED_ROWS], *(x[:CHECKED_COLUMNS] for x in answer[1:])]
        pairs = zip(came, self.truth[: len(came)], strict=True)
        return max(float((x - exact).abs().max() / exact.abs().max()) for x, exact in pairs)

    @torch.no_grad()
    def _exact(self, inputs: Inputs) -> list[torch.Tensor]:
        hidden = inputs["hidden"].flatten(0, 1)
        weight, ids = inputs["weight"].double(), inputs["token_ids"].flatten()
        columns = min(CHECKED_COLUMNS, weight.shape[0])
        chosen, probabilities, first = [], [], None
        for begin in range(0, hidden.shape[0], 256):
            part = slice(begin, begin + 256)
            logits = hidden[part].double() @ weight.T
            logprobs = logits.log_softmax(-1)
            chosen.append(logprobs.gather(-1, ids[part, None])[:, 0])
            probabilities.append(logprobs[:, :columns].exp())
            first = logprobs[:CHECKED_ROWS].exp() if first is None else first
        with torch.enable_grad():
            slopes = self.slopes(torch.cat(chosen), inputs)
        taken = torch.nn.functional.one_hot(ids[:CHECKED_ROWS], weight.shape[0])
        rows = (taken - first) * slopes[:CHECKED_ROWS, None]
        of_columns = (ids[:, None] == torch.arange(columns, device=ids.device)).double()
        of_columns = (of_columns - torch.cat(probabilities)) * slopes[:, None]
        return [rows @ weight, of_columns.T @ hidden.double()]


def _logprob_error(answer: torch.Tensor, inputs: Inputs) -> float:
    hidden = inputs["hidden"].flatten(0, 1)[:CHECKED_ROWS].double()
    ids = inputs["token_ids"].flatten()[:CHECKED_ROWS]
    truth = eager_logprobs(hidden @ inputs["weight"].double().T, ids)
    found = answer.flatten()[:CHECKED_ROWS]
    return float(((found - truth).abs() / truth.abs().clamp(min=1)).max())

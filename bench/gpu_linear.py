"""Loss and gradients from hidden states and the LM head, on a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from bench_linear import bare_gemms, trl_loss
from gpu_item import Item, backends, eager_forms, installed
from gpu_logits import CHECKED_ROWS, LOSS_INPUTS, OBJECTIVE, eager_loss
from logits import STD
from timing import Case, Provider

import fastrl

BF16 = torch.bfloat16


def linear_item(device, N, H, V, trained) -> Item:
    names = ("hidden", "weight") if trained else ("hidden",)

    def inputs(seed):
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*size):
            return torch.randn(*size, device=device, generator=generator)

        return {
            "hidden": normal(1, N, H).to(BF16),
            "weight": (normal(V, H) * (STD / H**0.5)).to(BF16),
            "token_ids": torch.randint(V, (1, N), device=device, generator=generator),
            "advantages": normal(1, N),
            "old_logprobs": -math.log(V) - STD**2 / 2 + 0.1 * normal(1, N),
            "mask": torch.ones(1, N, dtype=torch.bool, device=device),
        }

    def gradients(function):
        def run(inputs):
            leaves = {name: inputs[name].detach().requires_grad_() for name in names}
            given = {**inputs, **leaves}
            loss = function(
                given["hidden"], given["weight"], *(inputs[name] for name in LOSS_INPUTS)
            )
            return torch.autograd.grad(loss, list(leaves.values()))

        return run

    def ours(backend):
        def loss(hidden, weight, ids, advantages, old, mask):
            return fastrl.linear_policy_loss(
                hidden, weight, ids, advantages, mask, old_logprobs=old, objective=OBJECTIVE,
                backend=backend,
            ).loss  # fmt: skip

        return loss

    def eager(hidden, weight, *rest):
        return eager_loss(hidden @ weight.T, *rest)

    def error(answer, inputs):
        """Error of the gradient of the first hidden states, which depends on no other row."""
        hidden = inputs["hidden"][:, :CHECKED_ROWS].double().requires_grad_()
        rest = (inputs[name][:, :CHECKED_ROWS] for name in LOSS_INPUTS)
        loss = eager_loss(hidden @ inputs["weight"].double().T, *rest) * min(CHECKED_ROWS, N) / N
        (truth,) = torch.autograd.grad(loss, hidden)
        return float((answer[0][:, :CHECKED_ROWS] - truth).abs().max() / truth.abs().max())

    def gemms(inputs):
        if trained:
            return bare_gemms(inputs) if device.type != "cuda" else _gemms(inputs, dw=True)
        return _gemms(inputs, dw=False)

    def providers() -> Iterator[Provider]:
        for backend in backends(device):
            yield Provider(f"fastrl {backend}", f"fastrl {backend}", gradients(ours(backend)))
        for name, kind, function in eager_forms(eager, device):
            yield Provider(name, kind, gradients(function))
        if installed("trl"):
            yield Provider("TRL chunked", "peer", gradients(trl_loss))
        yield Provider("bare GEMMs", "floor", gemms)

    work = "loss and gradients, " + ("trained head" if trained else "frozen head")
    return Item(
        lambda: Case(
            op="linear_policy_loss",
            work=work,
            shape=f"{N} x {H} x {V}",
            dtype=BF16,
            bytes_moved=0,
            inputs=inputs,
            providers=list(providers()),
            error=error,
        ),
        small=False,
        flops=(6 if trained else 4) * N * H * V,
    )


def _gemms(inputs, *, dw):
    hidden, weight = inputs["hidden"].flatten(0, 1), inputs["weight"]
    logits = hidden @ weight.T
    return logits @ weight, logits.T @ hidden if dw else None

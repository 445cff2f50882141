"""The GRPO loss and its gradient, from logits to the gradient of the logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from logits import eager_loss_sum, gradient_error, make_inputs, torch_forms
from shapes import LOGITS, Logits
from timing import Case, Inputs, Provider, pedantic

import fastrl

OBJECTIVE = {
    "surrogate": "ppo_clip",
    "clip_low": 0.2,
    "clip_high": 0.2,
    "aggregation": "token-mean",
}


def cases(selection: str) -> list[Case]:
    dtypes = (torch.float32, torch.bfloat16)
    return [_case(shape, dtype) for shape in LOGITS[selection] for dtype in dtypes]


def providers(dtype: torch.dtype, **changes: float) -> list[Provider]:
    """All providers of loss and gradient; only fastrl uses `changes` to the objective."""
    objective = fastrl.Objective(**{**OBJECTIVE, **changes})
    return [
        *(_fastrl(backend, objective) for backend in ("cpu", "reference")),
        *(_torch(*form) for form in torch_forms(eager_loss_sum, dtype)),
    ]


def _case(shape: Logits, dtype: torch.dtype) -> Case:
    logits = torch.empty(shape.sequences, shape.tokens, shape.vocab, dtype=dtype)
    return Case(
        op="logits_policy_loss",
        work="loss and gradient",
        shape=f"{shape.sequences * shape.tokens} x {shape.vocab}",
        dtype=dtype,
        bytes_moved=2 * logits.nbytes,
        inputs=lambda seed: make_inputs(shape, dtype, seed),
        providers=[
            _in_place(logits),
            *providers(dtype),
            Provider("copy", "floor", lambda inputs: logits.copy_(inputs["logits"])),
            Provider("copy to new memory", "clone", lambda inputs: inputs["logits"].clone()),
        ],
        error=gradient_error,
    )


def _fastrl(backend: str, objective: fastrl.Objective) -> Provider:
    def run(inputs: Inputs) -> torch.Tensor:
        logits = inputs["logits"].detach().requires_grad_()
        loss = _loss(logits, inputs, objective=objective, backend=backend)
        return torch.autograd.grad(loss, logits)[0]

    return Provider(f"fastrl {backend}", f"fastrl {backend}", run)


def _in_place(buffer: torch.Tensor) -> Provider:
    """The gradient written over the logits; the other forms must first map new memory."""
    objective = fastrl.Objective(**OBJECTIVE)

    def prepare(inputs: Inputs) -> Inputs:
        return {**inputs, "logits": buffer.copy_(inputs["logits"])}

    def run(inputs: Inputs) -> torch.Tensor:
        logits = _FromModel.apply(inputs["logits"], torch.zeros((), requires_grad=True))
        loss = _loss(logits, inputs, objective=objective, backend="cpu", inplace=True)
        loss.backward()
        return logits.detach()  # the gradient is where the logits were

    return Provider("fastrl cpu in place", "fastrl cpu in place", run, prepare)


class _FromModel(torch.autograd.Function):
    """Logits that are not a leaf, like the output of a model."""

    @staticmethod
    def forward(_, logits, anchor):
        return logits.data  # the same memory, but not a view that autograd would guard

    @staticmethod
    def backward(_, gradient):
        return None, None


def _loss(logits: torch.Tensor, inputs: Inputs, **options) -> torch.Tensor:
    return fastrl.logits_policy_loss(
        logits,
        inputs["token_ids"],
        inputs["advantages"][:, 0],
        inputs["mask"],
        old_logprobs=inputs["old_logprobs"],
        **options,
    ).loss


def _torch(name: str, kind: str, function: Callable[..., torch.Tensor]) -> Provider:
    def run(inputs: Inputs) -> torch.Tensor:
        logits = inputs["logits"].detach().requires_grad_()
        rest = (inputs[key] for key in ("token_ids", "advantages", "old_logprobs", "mask"))
        loss = function(logits, *rest) / inputs["mask"].sum()
        return torch.autograd.grad(loss, logits)[0]

    return Provider(name, kind, run)


def test_logits_policy_loss(benchmark, case, provider):
    pedantic(benchmark, case, provider)

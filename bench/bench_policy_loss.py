"""The policy loss and its gradient from given log-probabilities."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from shapes import TOKENS, Tokens
from timing import Case, Inputs, Provider, pedantic

import fastrl

LEVELS = ("token", "sequence")
KL_COEF = 0.04


def cases(selection: str) -> list[Case]:
    return [
        _case(shape, level, kl_coef)
        for shape in TOKENS[selection]
        for level in LEVELS
        for kl_coef in (0.0, KL_COEF)
    ]


def _case(shape: Tokens, level: str, kl_coef: float) -> Case:
    elements = shape.sequences * shape.tokens
    eager = functools.partial(grpo_loss, level=level, kl_coef=kl_coef)
    tensors = 4 if kl_coef else 3  # per token, with the gradient
    return Case(
        op="policy_loss",
        work=f"loss and gradient, {level} level{', KL' if kl_coef else ''}",
        shape=f"{shape.sequences} x {shape.tokens}",
        dtype=torch.float32,
        bytes_moved=tensors * elements * 4 + elements,
        inputs=lambda seed: _inputs(shape, seed),
        providers=[
            _fastrl("cpu", level, kl_coef),
            _fastrl("reference", level, kl_coef),
            _torch("eager", "eager", eager),
            _torch("torch.compile", "compile", torch.compile(eager, dynamic=False)),
        ],
        error=lambda answer, inputs: _error(eager, answer, inputs),
    )


def _inputs(shape: Tokens, seed: int) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    size = (shape.sequences, shape.tokens)
    logprobs = -torch.rand(size, generator=generator) * 4
    lengths = torch.randint(1, shape.tokens + 1, (shape.sequences, 1), generator=generator)
    return {
        "logprobs": logprobs,
        "old_logprobs": logprobs + 0.2 * torch.randn(size, generator=generator),
        "ref_logprobs": logprobs + 0.2 * torch.randn(size, generator=generator),
        "advantages": torch.randn(shape.sequences, 1, generator=generator),
        "mask": torch.arange(shape.tokens) < lengths,
    }


def grpo_loss(
    logprobs, old_logprobs, ref_logprobs, advantages, mask, *, level, kl_coef
) -> torch.Tensor:
    """The token mean of GRPO's clipped loss, or GSPO's with one ratio per sequence, and the KL."""
    log_ratio = logprobs - old_logprobs
    if level == "sequence":
        log_ratio = (log_ratio * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)
    ratio = log_ratio.exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    if kl_coef:
        from_ref = ref_logprobs - logprobs
        loss = loss + kl_coef * (from_ref.exp() - from_ref - 1)
    return (loss * mask).sum() / mask.sum()


def _fastrl(backend: str, level: str, kl_coef: float) -> Provider:
    objective = fastrl.Objective(
        surrogate="ppo_clip",
        level=level,
        clip_low=0.2,
        clip_high=0.2,
        kl_coef=kl_coef,
        aggregation="token-mean",
    )

    def run(inputs: Inputs) -> torch.Tensor:
        logprobs = inputs["logprobs"].detach().requires_grad_()
        result = fastrl.policy_loss(
            logprobs,
            inputs["advantages"][:, 0],
            inputs["mask"],
            old_logprobs=inputs["old_logprobs"],
            ref_logprobs=inputs["ref_logprobs"] if kl_coef else None,
            objective=objective,
            backend=backend,
        )
        return torch.autograd.grad(result.loss, logprobs)[0]

    return Provider(f"fastrl {backend}", f"fastrl {backend}", run)


def _torch(name: str, kind: str, function: Callable[..., torch.Tensor]) -> Provider:
    return Provider(name, kind, lambda inputs: _gradient(function, inputs))


def _gradient(function: Callable[..., torch.Tensor], inputs: Inputs) -> torch.Tensor:
    logprobs = inputs["logprobs"].detach().requires_grad_()
    others = (inputs[name] for name in ("old_logprobs", "ref_logprobs", "advantages", "mask"))
    loss = function(logprobs, *others)
    return torch.autograd.grad(loss, logprobs)[0]


def _error(eager: Callable[..., torch.Tensor], answer: torch.Tensor, inputs: Inputs) -> float:
    exact = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    truth = _gradient(eager, exact)
    return float((answer - truth).abs().max() / truth.abs().max())


def test_policy_loss(benchmark, case, provider):
    pedantic(benchmark, case, provider)

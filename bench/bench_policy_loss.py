"""The policy loss and its gradient from given log-probabilities."""

from __future__ import annotations

from collections.abc import Callable

import torch
from shapes import TOKENS, Tokens
from timing import Case, Inputs, Provider, pedantic

import fastrl

LEVELS = ("token", "sequence")


def cases(selection: str) -> list[Case]:
    return [_case(shape, level) for shape in TOKENS[selection] for level in LEVELS]


def _case(shape: Tokens, level: str) -> Case:
    elements = shape.sequences * shape.tokens
    eager = token_level_loss if level == "token" else sequence_level_loss
    return Case(
        op="policy_loss",
        work=f"loss and gradient, {level} level",
        shape=f"{shape.sequences} x {shape.tokens}",
        dtype=torch.float32,
        bytes_moved=3 * elements * 4 + elements,
        inputs=lambda seed: _inputs(shape, seed),
        providers=[
            _fastrl("cpu", level),
            _fastrl("reference", level),
            _torch("eager", "eager", eager),
            _torch("torch.compile", "compile", torch.compile(eager)),
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
        "advantages": torch.randn(shape.sequences, 1, generator=generator),
        "mask": torch.arange(shape.tokens) < lengths,
    }


def token_level_loss(logprobs, old_logprobs, advantages, mask) -> torch.Tensor:
    """GRPO: a ratio per token, averaged over tokens."""
    ratio = (logprobs - old_logprobs).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return (loss * mask).sum() / mask.sum()


def sequence_level_loss(logprobs, old_logprobs, advantages, mask) -> torch.Tensor:
    """GSPO: one ratio per sequence, the exponential of its mean log-ratio."""
    log_ratio = ((logprobs - old_logprobs) * mask).sum(-1, keepdim=True) / mask.sum(
        -1, keepdim=True
    )
    ratio = log_ratio.exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return (loss * mask).sum() / mask.sum()


def _fastrl(backend: str, level: str) -> Provider:
    objective = fastrl.Objective(
        surrogate="ppo_clip", level=level, clip_low=0.2, clip_high=0.2, aggregation="token-mean"
    )

    def run(inputs: Inputs) -> torch.Tensor:
        logprobs = inputs["logprobs"].detach().requires_grad_()
        result = fastrl.policy_loss(
            logprobs,
            inputs["advantages"][:, 0],
            inputs["mask"],
            old_logprobs=inputs["old_logprobs"],
            objective=objective,
            backend=backend,
        )
        return torch.autograd.grad(result.loss, logprobs)[0]

    return Provider(f"fastrl {backend}", f"fastrl {backend}", run)


def _torch(name: str, kind: str, function: Callable[..., torch.Tensor]) -> Provider:
    return Provider(name, kind, lambda inputs: _gradient(function, inputs))


def _gradient(function: Callable[..., torch.Tensor], inputs: Inputs) -> torch.Tensor:
    logprobs = inputs["logprobs"].detach().requires_grad_()
    loss = function(logprobs, inputs["old_logprobs"], inputs["advantages"], inputs["mask"])
    return torch.autograd.grad(loss, logprobs)[0]


def _error(eager: Callable[..., torch.Tensor], answer: torch.Tensor, inputs: Inputs) -> float:
    exact = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    truth = _gradient(eager, exact)
    return float((answer - truth).abs().max() / truth.abs().max())


def test_policy_loss(benchmark, case, provider):
    pedantic(benchmark, case, provider)

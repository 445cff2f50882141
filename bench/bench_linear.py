"""The GRPO loss and its gradients from hidden states and a trainable LM head."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from logits import STD, eager_logprobs, eager_loss_sum, raised_logits, sampled
from shapes import LINEAR, Linear
from timing import Case, Inputs, Provider, pedantic

import fastrl

Gradients = tuple[torch.Tensor, ...]
REST = ("token_ids", "advantages", "old_logprobs", "mask")


def cases(selection: str) -> list[Case]:
    dtypes = (torch.float32, torch.bfloat16)
    return [_case(shape, dtype) for shape in LINEAR[selection] for dtype in dtypes]


def _case(shape: Linear, dtype: torch.dtype) -> Case:
    rows = shape.sequences * shape.tokens
    elements = (rows + shape.vocab) * shape.hidden
    return Case(
        op="linear_policy_loss",
        work="loss and gradients of hidden states and head",
        shape=f"{rows} x {shape.hidden} x {shape.vocab}",
        dtype=dtype,
        bytes_moved=2 * elements * dtype.itemsize,
        inputs=lambda seed: linear_inputs(shape, dtype, seed),
        providers=[
            fastrl_provider("cpu"),
            _torch("eager", "eager", eager),
            _torch("torch.compile", "compile", torch.compile(eager)),
            Provider("three bare GEMMs", "floor", bare_gemms),
            *([_trl()] if importlib.util.find_spec("trl") else []),
        ],
        error=gradients_error,
    )


def linear_inputs(shape: Linear, dtype: torch.dtype, seed: int) -> Inputs:
    """Hidden states whose logits are as in the other benchmarks: normal, one raised per row."""
    generator = torch.Generator().manual_seed(seed)
    rows = (shape.sequences, shape.tokens)
    weight = torch.randn(shape.vocab, shape.hidden, generator=generator)
    weight *= STD / shape.hidden**0.5
    token_ids = torch.randint(shape.vocab, rows, generator=generator)
    hidden = torch.randn(*rows, shape.hidden, generator=generator)
    chosen = weight[token_ids]
    missing = raised_logits(shape.vocab, rows, generator) - (hidden * chosen).sum(-1)
    hidden += (missing / chosen.square().sum(-1))[..., None] * chosen
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    logprobs = eager_logprobs(hidden.float() @ weight.float().T, token_ids)
    inputs = {"hidden": hidden, "weight": weight, "token_ids": token_ids}
    return inputs | sampled(logprobs, generator)


def eager(hidden: torch.Tensor, weight: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    logits = hidden @ weight.T
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return eager_loss_sum(logits, *rest)


def trl_loss(hidden, weight, token_ids, advantages, old_logprobs, mask):
    """The clipped loss on the log-probabilities of TRL 1.16's chunked LM head."""
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    flat = hidden.reshape(-1, hidden.shape[-1])
    tile = 32768  # TRL's default
    found = ChunkedLogProbFunction.apply(
        flat, weight, None, token_ids.reshape(-1), 1.0, tile, None, 1.0, ()
    )
    logprobs = found[0].view(token_ids.shape)
    ratio = (logprobs - old_logprobs).exp()
    bounded = ratio.clamp(0.8, 1.2)
    return -(torch.minimum(ratio * advantages, bounded * advantages) * mask).sum() / mask.sum()


def bare_gemms(inputs: Inputs) -> Gradients:
    """Only the GEMMs, in float32: logits, gradient of hidden states, gradient of the head."""
    hidden = inputs["hidden"].float().flatten(0, 1)
    weight = inputs["weight"].float()
    logits = hidden @ weight.T
    return logits @ weight, logits.T @ hidden


def _leaves(inputs: Inputs) -> Gradients:
    return tuple(inputs[name].detach().requires_grad_() for name in ("hidden", "weight"))


def fastrl_provider(backend: str) -> Provider:
    objective = fastrl.Objective(clip_low=0.2, clip_high=0.2, aggregation="token-mean")

    def run(inputs: Inputs) -> Gradients:
        leaves = _leaves(inputs)
        result = fastrl.linear_policy_loss(
            *leaves,
            inputs["token_ids"],
            inputs["advantages"][:, 0],
            inputs["mask"],
            old_logprobs=inputs["old_logprobs"],
            kept=inputs.get("kept"),
            objective=objective,
            backend=backend,
        )
        return torch.autograd.grad(result.loss, leaves)

    return Provider(f"fastrl {backend}", f"fastrl {backend}", run)


def _trl() -> Provider:
    def run(inputs: Inputs) -> Gradients:
        leaves = _leaves(inputs)
        return torch.autograd.grad(trl_loss(*leaves, *(inputs[name] for name in REST)), leaves)

    return Provider("TRL chunked", "peer", run)


def _torch(name: str, kind: str, function: Callable[..., torch.Tensor]) -> Provider:
    return Provider(name, kind, lambda inputs: _gradients(function, inputs))


def _gradients(function: Callable[..., torch.Tensor], inputs: Inputs) -> Gradients:
    leaves = _leaves(inputs)
    loss = function(*leaves, *(inputs[name] for name in REST)) / inputs["mask"].sum()
    return torch.autograd.grad(loss, leaves)


def gradients_error(answer: Gradients, inputs: Inputs) -> float:
    """The larger error of the two gradients, relative to the gradient's largest element."""
    exact = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    pairs = zip(answer, _gradients(eager, exact), strict=True)
    return max(float((found - truth).abs().max() / truth.abs().max()) for found, truth in pairs)


def test_linear_policy_loss(benchmark, case, provider):
    pedantic(benchmark, case, provider)

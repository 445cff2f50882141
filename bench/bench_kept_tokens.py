"""The GRPO loss and its gradients where each token was sampled from a part of the vocabulary."""

from __future__ import annotations

import torch
from bench_linear import REST, fastrl_provider, linear_inputs
from logits import eager_loss_sum
from shapes import LINEAR, Linear
from timing import Case, Inputs, Provider, pedantic

import fastrl

#: Tokens that each row has kept.
COUNTS = (32, 512)


def cases(selection: str) -> list[Case]:
    dtypes = (torch.float32, torch.bfloat16)
    return [
        _case(shape, dtype, count)
        for shape in LINEAR[selection]
        for dtype in dtypes
        for count in COUNTS
    ]


def _case(shape: Linear, dtype: torch.dtype, count: int) -> Case:
    rows = shape.sequences * shape.tokens
    return Case(
        op=f"linear_policy_loss, {count} kept",
        work=f"{count} tokens of each row kept",
        shape=f"{rows} x {shape.hidden} x {shape.vocab}",
        dtype=dtype,
        bytes_moved=2 * (rows + shape.vocab) * shape.hidden * dtype.itemsize,
        inputs=lambda seed: kept_inputs(shape, dtype, seed, count),
        providers=[
            fastrl_provider("cpu"),
            Provider("the whole vocabulary", "all rows", fastrl_provider("cpu").run, _whole),
            Provider("full softmax with -inf", "eager", masked_softmax),
        ],
        error=_error,
    )


def kept_inputs(shape: Linear, dtype: torch.dtype, seed: int, count: int) -> Inputs:
    """Random tokens and each row's own, so that a row of the head is seldom read twice."""
    inputs = linear_inputs(shape, dtype, seed)
    ids = inputs["token_ids"].flatten()
    kept = torch.randint(shape.vocab, (len(ids), 2 * count))
    rows = [[i, *row] for i, row in zip(ids.tolist(), kept.tolist(), strict=True)]
    sets = fastrl.KeptTokens.from_lists([[*dict.fromkeys(row)][:count] for row in rows])
    logits = inputs["hidden"].float() @ inputs["weight"].float().T
    logprobs = fastrl.token_logprobs(logits, inputs["token_ids"], kept=sets)
    noise = 0.1 * torch.randn(logprobs.shape)
    return inputs | {"kept": sets, "old_logprobs": logprobs + noise}


def _whole(inputs: Inputs) -> Inputs:
    return {name: x for name, x in inputs.items() if name != "kept"}


def outside(inputs: Inputs) -> torch.Tensor:
    """Which tokens no row has kept, `[B, T, V]`."""
    kept, ids = inputs["kept"], inputs["token_ids"]
    rows = torch.arange(ids.numel()).repeat_interleave(kept.counts())
    result = torch.ones(ids.numel(), len(inputs["weight"]), dtype=torch.bool)
    result[rows, kept.token_ids.long()] = False
    return result.view(*ids.shape, -1)


def eager_of_kept(hidden, weight, banned, *rest):
    logits = hidden @ weight.T
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return eager_loss_sum(logits.masked_fill(banned, -torch.inf), *rest)


def masked_softmax(inputs: Inputs) -> tuple[torch.Tensor, ...]:
    leaves = tuple(inputs[name].detach().requires_grad_() for name in ("hidden", "weight"))
    loss = eager_of_kept(*leaves, outside(inputs), *(inputs[name] for name in REST))
    return torch.autograd.grad(loss / inputs["mask"].sum(), leaves)


def _error(answer: tuple[torch.Tensor, ...], inputs: Inputs) -> float:
    """The larger error of the two gradients, relative to the gradient's largest element."""
    tensors = {name: x for name, x in inputs.items() if name != "kept"}
    exact = {name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}
    truth = masked_softmax({**exact, "kept": inputs["kept"]})
    pairs = zip(answer, truth, strict=True)
    return max(float((found - x).abs().max() / x.abs().max()) for found, x in pairs)


def test_kept_tokens(benchmark, case, provider):
    pedantic(benchmark, case, provider)

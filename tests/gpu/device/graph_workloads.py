"""Calls under CUDA graphs and in private pools of memory, as the first calls of a process.

    python -m tests.gpu.device.graph_workloads triton pool policy_loss

A kernel that keeps memory between calls, such as a counter, may have it from a pool that is freed
or reissued; a process in which such memory exists already would not show that.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

import fastrl
from fastrl import Objective

#: relative to the largest element: float32 adds up many terms, in an order of its own
TOLERANCE = 2e-5


class Call(NamedTuple):
    """A call with new inputs each time, and a function that torch.compile takes."""

    make: Callable[[str], dict[str, Tensor]]
    run: Callable[[dict[str, Tensor], str], Tensor]  # (inputs, backend) -> what has a gradient
    leaf: str  # the input whose gradient is checked, or "" for an output without a gradient


def _tokens(device: str, B: int = 16, T: int = 700) -> dict[str, Tensor]:
    logprobs = -3 * torch.rand(B, T) - 0.01
    steps = torch.tensor([-0.5, -0.1, 0.1, 0.4])[torch.randint(4, (B, T))]
    made = {
        "logprobs": logprobs,
        "old_logprobs": logprobs - steps,  # no ratio near a clip
        "ref_logprobs": logprobs + 0.2 * torch.randn(B, T),
        "advantages": torch.randn(B),
        "mask": torch.rand(B, T) < 0.8,
    }
    return {name: x.to(device) for name, x in made.items()}


def _logits(device: str) -> dict[str, Tensor]:
    made = _tokens(device, 4, 33)
    logprobs = made.pop("logprobs")
    logits = torch.randn(4, 33, 1001, device=device)
    ids = torch.randint(1001, (4, 33), device=device)
    # the chosen logit that has the log-probability for which the others were drawn
    others = logits.scatter(-1, ids[..., None], -torch.inf).logsumexp(-1)
    odds = logprobs - (-logprobs.expm1()).log()
    logits.scatter_(-1, ids[..., None], (others + odds)[..., None])
    return {**made, "logits": logits, "token_ids": ids}


def _policy_loss(objective: Objective) -> Callable[[dict[str, Tensor], str], Tensor]:
    def run(inputs, backend):
        return fastrl.policy_loss(**inputs, objective=objective, backend=backend).loss

    return run


def _logits_policy_loss(objective: Objective) -> Callable[[dict[str, Tensor], str], Tensor]:
    def run(inputs, backend):
        return fastrl.logits_policy_loss(**inputs, objective=objective, backend=backend).loss

    return run


def _group_advantages(inputs, backend):
    return fastrl.group_advantages(
        **inputs, group_size=8, scale="batch", backend=backend
    ).advantages


def _gae(inputs, backend):
    return fastrl.gae(**inputs, gamma=0.99, lam=0.95, backend=backend).advantages


KL = {"kl_coef": 0.05}
SEQUENCE = Objective(level="sequence", clip_low=0.05, clip_high=0.05, **KL)
CALLS = {
    "policy_loss": Call(_tokens, _policy_loss(Objective(**KL)), "logprobs"),
    "policy_loss by sequence": Call(_tokens, _policy_loss(SEQUENCE), "logprobs"),
    "logits_policy_loss": Call(_logits, _logits_policy_loss(Objective(**KL)), "logits"),
    "logits_policy_loss by sequence": Call(_logits, _logits_policy_loss(SEQUENCE), "logits"),
    "group_advantages by batch": Call(
        lambda device: {"rewards": torch.rand(20_000, device=device)}, _group_advantages, ""
    ),
    "gae": Call(
        lambda device: {
            name: torch.randn(8, 6000, device=device) for name in ("rewards", "values")
        },
        _gae,
        "",
    ),
}


def outcome(
    call: Call, inputs: dict[str, Tensor], backend: str, run: Callable | None = None
) -> list[Tensor]:
    """Return the result of a call, and the gradient of its leaf."""
    given = {name: x.detach() for name, x in inputs.items()}
    if call.leaf:
        given[call.leaf].requires_grad_()
    found = (run or call.run)(given, backend)
    if not call.leaf:
        return [found.clone()]
    (gradient,) = torch.autograd.grad(found, given[call.leaf])
    return [found.detach().clone(), gradient.clone()]


def assert_right(name: str, inputs: dict[str, Tensor], found: list[Tensor]) -> None:
    """Compare with the reference in float64."""
    exact = {n: x.double() if x.is_floating_point() else x for n, x in inputs.items()}
    for one, wanted in zip(found, outcome(CALLS[name], exact, "reference"), strict=True):
        size = max(float(wanted.abs().max()), 1e-3)
        error = float((one.double() - wanted).abs().max())
        assert error <= TOLERANCE * size, f"{name}: {error / size:.3g} of the largest element"


def first_in_a_pool(device: str, backend: str, names: Iterable[str]) -> None:
    """Make each call in a pool of its own, free the pool and fill its memory, call again."""
    for name in names:
        call = CALLS[name]
        inputs = call.make(device)
        pool = torch.cuda.MemPool() if device == "cuda" else None
        within = torch.cuda.use_mem_pool(pool) if pool else contextlib.nullcontext()
        with within:
            found = outcome(call, inputs, backend)
        assert_right(name, inputs, found)
        wanted = [x.cpu() for x in found]
        del found, pool
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        filled = [torch.full((2**k,), 7, dtype=torch.int32, device=device) for k in range(16)]
        for _ in range(3):
            again = [x.cpu() for x in outcome(call, inputs, backend)]
            assert all(torch.equal(a, b) for a, b in zip(again, wanted, strict=True)), name
        assert all(bool((x == 7).all()) for x in filled), f"{name} wrote into freed memory"


def first_compiled(device: str, backend: str, names: Iterable[str]) -> None:
    """Make each call compiled, on GPUs with CUDA graphs, on several inputs; then eagerly."""
    options = {"mode": "reduce-overhead"} if device == "cuda" else {"backend": "aot_eager"}
    for name in names:
        call = CALLS[name]
        compiled = torch.compile(call.run, fullgraph=True, **options)
        for _ in range(5):  # eagerly, recorded, replayed
            inputs = call.make(device)
            torch.compiler.cudagraph_mark_step_begin()
            assert_right(name, inputs, outcome(call, inputs, backend, compiled))
        inputs = call.make(device)
        assert_right(name, inputs, outcome(call, inputs, backend))


WAYS = {"pool": first_in_a_pool, "compiled": first_compiled}

if __name__ == "__main__":
    torch.manual_seed(0)
    backend_name, way, *chosen = sys.argv[1:]
    WAYS[way]("cpu" if backend_name == "cpu" else "cuda", backend_name, chosen or CALLS)

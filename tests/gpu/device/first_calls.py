"""Calls as the first ones of a process: in private pools of memory, and compiled.

    python -m tests.gpu.device.first_calls triton pool gae

A kernel that keeps memory between calls, such as a counter, may have it from a pool that is freed
or reissued; a process in which such memory exists already would not show that.
"""

from __future__ import annotations

import contextlib
import sys

import torch

from tests.calls.case import Case
from tests.gpu.device.workloads import LOSS, assert_right, assert_right_compiled, of_case

LOGITS = {**LOSS, "sequences": 4, "tokens": 33, "vocabulary": 1001, "spread": 3.0}
TOKENS = {**LOSS, "sequences": 16, "tokens": 700, "entropy": True}
CASES = {
    "policy_loss": Case("policy_loss", **TOKENS),
    "policy_loss by sequence": Case("policy_loss", **TOKENS, objective="gspo"),
    "logits_policy_loss": Case("logits_policy_loss", **LOGITS),
    "logits_policy_loss by sequence": Case("logits_policy_loss", **LOGITS, objective="gspo"),
    "group_advantages": Case(
        "group_advantages", sequences=2500, tokens=8, parameters={"scale": "batch"}
    ),
    "gae": Case("gae", sequences=8, tokens=6000, mask="ragged"),
}


def in_a_pool(case: Case, backend: str, device: str) -> None:
    """Make a call in a pool of its own, free the pool and fill its memory, call again."""
    work = of_case(case, device)
    pool = torch.cuda.MemPool() if device == "cuda" else None
    with torch.cuda.use_mem_pool(pool) if pool else contextlib.nullcontext():
        found = work.run(backend)
    wanted = [x.cpu() for x in found]
    del found, pool
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    filled = [torch.full((2**k,), 7, dtype=torch.int32, device=device) for k in range(16)]
    for _ in range(3):
        assert all(torch.equal(a.cpu(), b) for a, b in zip(work.run(backend), wanted, strict=True))
    assert all(bool((x == 7).all()) for x in filled), "it wrote into freed memory"
    assert_right(case, backend, device)


def compiled(case: Case, backend: str, device: str) -> None:
    """Make a call compiled, on GPUs with CUDA graphs; then eagerly."""
    options = {"mode": "reduce-overhead"} if device == "cuda" else {"backend": "aot_eager"}
    assert_right_compiled(case, backend, device, {"fullgraph": True, **options})
    assert_right(case, backend, device)


WAYS = {"pool": in_a_pool, "compiled": compiled}

if __name__ == "__main__":
    backend, way, *names = sys.argv[1:]
    for name in names or CASES:
        WAYS[way](CASES[name], backend, "cpu" if backend == "cpu" else "cuda")

"""Calls as the first ones of a process: in private pools of memory, and compiled.

    python -m tests.gpu.device.first_calls triton pool gae

A kernel that keeps memory between calls, such as a counter, may have it from a pool that is freed
or reissued; a process in which such memory exists already would not show that.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

import torch

from tests.gpu.device.workloads import (
    Workload,
    assert_near,
    gae,
    group_advantages,
    logits_policy_loss,
    policy_loss,
)

BY_TOKEN = "grpo, KL and entropy"
LOGITS = (4, 33, 1001, torch.float32)
#: Each makes the same call on new inputs.
CALLS: dict[str, Callable[[], Workload]] = {
    "policy_loss": lambda: policy_loss(BY_TOKEN, 16, 700),
    "policy_loss by sequence": lambda: policy_loss("sequence", 16, 700),
    "logits_policy_loss": lambda: logits_policy_loss(BY_TOKEN, *LOGITS),
    "logits_policy_loss by sequence": lambda: logits_policy_loss("sequence", *LOGITS),
    "group_advantages": lambda: group_advantages("batch", 2500, 8),
    "gae": lambda: gae(None, 8, 6000),
}


def in_a_pool(name: str, device: str, backend: str) -> None:
    """Make a call in a pool of its own, free the pool and fill its memory, call again."""
    work = CALLS[name]().on(device)
    pool = torch.cuda.MemPool() if device == "cuda" else None
    with torch.cuda.use_mem_pool(pool) if pool else contextlib.nullcontext():
        found = work.run(backend)
    assert_near(work, found, exact(work))
    wanted = [x.cpu() for x in found]
    del found, pool
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    filled = [torch.full((2**k,), 7, dtype=torch.int32, device=device) for k in range(16)]
    for _ in range(3):
        assert all(torch.equal(a.cpu(), b) for a, b in zip(work.run(backend), wanted, strict=True))
    assert all(bool((x == 7).all()) for x in filled), "it wrote into freed memory"


def compiled(name: str, device: str, backend: str) -> None:
    """Make a call compiled, on GPUs with CUDA graphs, on several inputs; then eagerly."""
    options = {"mode": "reduce-overhead"} if device == "cuda" else {"backend": "aot_eager"}
    call = torch.compile(CALLS[name]().call, fullgraph=True, **options)
    for how in (*[call] * 5, None):  # eagerly, recorded, replayed; not compiled
        work = CALLS[name]().on(device)
        torch.compiler.cudagraph_mark_step_begin()
        assert_near(work, work.run(backend, how), exact(work))


def exact(work: Workload) -> tuple[torch.Tensor, ...]:
    return work.double().run("reference")


WAYS = {"pool": in_a_pool, "compiled": compiled}

if __name__ == "__main__":
    torch.manual_seed(0)
    backend, way, *names = sys.argv[1:]
    for name in names or CALLS:
        WAYS[way](name, "cpu" if backend == "cpu" else "cuda", backend)

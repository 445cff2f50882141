"""Host time of a call of a small operator on the Triton backend, without a GPU.

    python bench/launch_cost.py

Everything that a call does on the host really runs (checks, `torch.library`, the launcher, Triton's
binding of arguments) except the last step: a stub replaces the driver, so no kernel is launched on
a GPU, which would add some microseconds. Tensors are on the CPU, and outputs are never written.
Needs Triton 3.6 or newer.
"""

from __future__ import annotations

import statistics
import time
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget

import fastrl
from fastrl.library import operators

CALLS, ROUNDS = 200, 15


class Stub:
    """A driver that launches nothing."""

    class launcher_cls:  # noqa: N801 (Triton's name)
        def __init__(self, src, metadata):
            self.launches = 0

        def __call__(self, *arguments):
            self.launches += 1

    utils = SimpleNamespace(
        load_binary=lambda *_: (1, 1, 0, 0, 1024),
        get_device_properties=lambda _: {"max_shared_mem": 232448},
    )

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, _):
        return 0


def microseconds(call) -> str:
    for _ in range(20):
        call()
    rounds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        rounds.append((time.perf_counter() - start) / CALLS * 1e6)
    return f"{statistics.median(rounds):.0f} ({min(rounds):.0f}-{max(rounds):.0f})"


def main() -> None:
    triton.runtime.driver.set_active(Stub())
    fastrl.backend._DEVICES["triton"] = ("cuda", "cpu")
    fastrl.backend.unavailable = lambda name: None
    x, mask = torch.randn(16, 256), torch.ones(16, 256, dtype=torch.bool)
    rewards = torch.randn(64)
    inf = float("inf")
    coefficients = [0.2, 0.2, inf, inf, 1.0, 1.0, 0.0, inf, inf, inf, 0.0]
    op = operators("triton")
    rows = {
        "gae": (
            lambda: fastrl.gae(x, x, mask, backend="triton"),
            lambda: op.gae_fwd(x, x, mask, None, None, None, None, 1.0, 0.95),
        ),
        "group_advantages": (
            lambda: fastrl.group_advantages(rewards, group_size=8, backend="triton"),
            lambda: op.group_advantages_fwd(rewards, None, 8, 0, 0, 1.0, 1e-4, 0),
        ),
        "policy_loss": (
            lambda: fastrl.policy_loss(x, x, mask, old_logprobs=x, backend="triton"),
            lambda: op.policy_loss_fwd(
                x, x, mask, x, None, None, x, None, None, None, 0, 0, 2, 0, coefficients
            ),
        ),
    }
    empty = microseconds(lambda: torch.empty_like(x))
    print(f"torch {torch.__version__}, triton {triton.__version__}; torch.empty_like: {empty} us")
    print("| operator | public function, us | registered operator, us |\n| --- | ---: | ---: |")
    for name, calls in rows.items():
        print(f"| {name} | {' | '.join(microseconds(call) for call in calls)} |")


if __name__ == "__main__":
    main()

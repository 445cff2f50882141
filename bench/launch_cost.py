"""Host time of a call of a small operator: of the policy loss on the CPU, and of Triton's launches.

    python bench/launch_cost.py

First the public `policy_loss` with KL and its backward on 8 x 128 tokens, one thread, next to TRL's
formula in eager PyTorch (52 operators), interleaved; and what the parts of that time are.

Then the Triton backend without a GPU. Everything that a call does on the host really runs (checks,
`torch.library`, the launcher, Triton's binding of arguments) except the last step: a stub replaces
the driver, so no kernel is launched on a GPU, which would add some microseconds. Tensors are on the
CPU, and outputs are never written. Needs Triton 3.6 or newer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget

import fastrl
from fastrl import Objective
from fastrl.contract import (
    AGGREGATIONS,
    BASELINES,
    SCALES,
    SINGLETONS,
    AggregationArguments,
    LossArguments,
)
from fastrl.library import operators

CALLS, ROUNDS = 50, 60
Call = Callable[[], object]


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


def microseconds(calls: dict[str, Call]) -> dict[str, list[float]]:
    """Time the calls round after round, so that a slow minute affects all of them."""
    for call in calls.values():
        for _ in range(20):
            call()
    rounds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            rounds[name].append((time.perf_counter() - start) / CALLS * 1e6)
    return rounds


def written(rounds: list[float]) -> str:
    fifths = statistics.quantiles(rounds, n=5)
    return f"{statistics.median(rounds):.0f} ({fifths[0]:.0f}-{fifths[-1]:.0f})"


class Batch:
    """A padded batch as a GRPO step has it."""

    def __init__(self, sequences: int, tokens: int) -> None:
        size = (sequences, tokens)
        self.logprobs = (-4 * torch.rand(size)).requires_grad_()
        self.old = self.logprobs.detach() + 0.2 * torch.randn(size)
        self.ref = self.logprobs.detach() + 0.2 * torch.randn(size)
        self.advantages = torch.randn(sequences)
        self.mask = torch.arange(tokens) < torch.randint(1, tokens + 1, (sequences, 1))


def trl_loss(b: Batch) -> torch.Tensor:
    """GRPO's loss with the KL, as TRL writes it."""
    advantages = b.advantages[:, None]
    log_ratio = b.logprobs - b.old
    kl = torch.exp(b.ref - b.logprobs) - (b.ref - b.logprobs) - 1
    ratio = torch.exp(log_ratio)
    clipped = torch.clamp(ratio, 0.8, 1.2)
    loss = -torch.min(ratio * advantages, clipped * advantages) + 0.04 * kl
    return ((loss * b.mask).sum(-1) / b.mask.sum(-1).clamp(min=1.0)).mean()


class Passed(torch.autograd.Function):
    """A loss whose gradient is known, and nothing around it."""

    @staticmethod
    def forward(ctx, loss, grad, x):
        ctx.save_for_backward(grad)
        ctx.mark_dirty(loss)
        return loss

    @staticmethod
    def backward(ctx, _):
        return None, None, *ctx.saved_tensors


def policy_loss_on_the_cpu() -> None:
    torch.set_num_threads(1)
    b = Batch(8, 128)
    objective = Objective.preset("grpo", kl_coef=0.04)
    count = AggregationArguments(
        aggregation=AGGREGATIONS.index(objective.aggregation),
        normalizer=0.0,
        normalizer_tensor=None,
        length_norm=0.0,
        count_empty=False,
        group_size=0,
        group_ids=None,
    )
    run = operators("cpu")
    weights, _ = run.sequence_weights(b.mask, None, 0, None, *count)
    constants = LossArguments(b.advantages, weights, None, None, None, b.old, b.ref, None)
    detached, scalar = b.logprobs.detach(), torch.zeros(())

    def loss() -> torch.Tensor:
        return fastrl.policy_loss(
            b.logprobs,
            b.advantages,
            b.mask,
            old_logprobs=b.old,
            ref_logprobs=b.ref,
            objective=objective,
        ).loss

    def backward(forward: Callable[[], torch.Tensor]) -> None:
        b.logprobs.grad = None
        forward().backward()

    def passed() -> torch.Tensor:
        return Passed.apply(torch.empty_like(scalar), detached, b.logprobs)

    calls: dict[str, Call] = {
        "eager, forward and backward": lambda: backward(lambda: trl_loss(b)),
        "policy_loss, forward and backward": lambda: backward(loss),
        "policy_loss, forward": loss,
        "operator sequence_weights": lambda: run.sequence_weights(b.mask, None, 0, None, *count),
        "operator policy_loss_fwd": lambda: run.policy_loss_fwd(
            detached, None, b.mask, *constants, *objective.arguments.flat()
        ),
        "an autograd function that passes a gradient on": lambda: backward(passed),
    }
    rounds = microseconds(calls)
    eager, ours, _, *parts = rounds.values()
    ratio = statistics.median(x / y for x, y in zip(ours, eager, strict=True))
    checks = statistics.median(total - sum(of) for total, *of in zip(ours, *parts, strict=True))
    print(f"torch {torch.__version__}, 8 x 128 tokens, one thread, on the CPU\n")
    print("| call | us (20-80 %) |\n| --- | ---: |")
    for name, found in rounds.items():
        print(f"| {name} | {written(found)} |")
    print(f"| the rest: checks and bookkeeping in Python | {checks:.0f} |")
    print(f"\npolicy_loss takes {ratio:.2f} of eager PyTorch's time (target: at most 0.5)\n")


def launches_of_triton() -> None:
    triton.runtime.driver.set_active(Stub())
    fastrl.backend._DEVICES["triton"] = ("cuda", "cpu")
    fastrl.backend.unavailable = lambda name: None
    b = Batch(16, 256)
    x, mask = b.old, b.mask
    rewards = torch.randn(64)
    objective = Objective.preset("grpo").arguments.flat()
    op = operators("triton")
    constants = LossArguments(b.advantages, b.advantages, None, None, None, x, None, None)
    groups = (BASELINES.index("mean"), SCALES.index("group"), 1.0, 1e-4, SINGLETONS.index("zero"))
    rows = {
        "gae": (
            lambda: fastrl.gae(x, x, mask, backend="triton"),
            lambda: op.gae_fwd(x, x, mask, None, None, None, None, 1.0, 0.95),
        ),
        "group_advantages": (
            lambda: fastrl.group_advantages(rewards, group_size=8, backend="triton"),
            lambda: op.group_advantages_fwd(rewards, None, 8, *groups),
        ),
        "policy_loss": (
            lambda: fastrl.policy_loss(x, b.advantages, mask, old_logprobs=x, backend="triton"),
            lambda: op.policy_loss_fwd(x, None, mask, *constants, *objective),
        ),
    }
    calls = {f"{name} {i}": call for name, both in rows.items() for i, call in enumerate(both)}
    rounds = microseconds({"empty": lambda: torch.empty_like(x), **calls})
    print(f"triton {triton.__version__}; torch.empty_like: {written(rounds['empty'])} us\n")
    print("| operator | public function, us | registered operator, us |\n| --- | ---: | ---: |")
    for name in rows:
        print(f"| {name} | {written(rounds[f'{name} 0'])} | {written(rounds[f'{name} 1'])} |")


if __name__ == "__main__":
    policy_loss_on_the_cpu()
    launches_of_triton()

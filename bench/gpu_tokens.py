"""Ops on one number per token or answer, on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from bench_gae import masked_loop
from bench_group_advantages import group_loop
from bench_policy_loss import LEVELS as LEVELS
from bench_policy_loss import grpo_loss
from gpu_item import Item, backends, eager_forms, kernels
from gpu_peers import peer
from timing import Case, Inputs, Provider

import fastrl

FP32 = torch.float32


def gae_item(device, B, T) -> Item:
    def inputs(seed):
        generator = torch.Generator(device).manual_seed(seed)
        found = {
            name: torch.randn(B, T, device=device, generator=generator)
            for name in ("rewards", "values")
        }
        found["mask"] = torch.rand(B, T, device=device, generator=generator) < 0.9
        return found

    def ours(backend):
        return lambda inputs: fastrl.gae(**inputs, gamma=1.0, lam=0.95, backend=backend).advantages

    def error(answer, inputs):
        """Error of the last tokens of the first rows, which depend on nothing before them."""
        last = {name: x[:4, -4096:].cpu() for name, x in inputs.items()}
        last = {name: x.double() if x.is_floating_point() else x for name, x in last.items()}
        truth = masked_loop(**last)
        return float((answer[:4, -4096:].cpu() - truth).abs().max() / truth.abs().max())

    def providers() -> Iterator[Provider]:
        for backend in kernels(device):
            yield Provider(f"fastrl {backend}", f"fastrl {backend}", ours(backend))
        if T <= 4096:
            yield Provider("Python loop", "loop", lambda inputs: masked_loop(**inputs))
        yield peer("torchrl", "torchrl", _torchrl_gae)
        yield Provider(
            "copies", "floor", lambda inputs: [inputs[n].clone() for n in ("rewards", "values")]
        )

    return Item(
        lambda: Case(
            op="gae",
            work="GAE with a mask",
            shape=f"{B} x {T}",
            dtype=FP32,
            bytes_moved=17 * B * T,
            inputs=inputs,
            providers=list(providers()),
            error=error,
        ),
        small=True,
    )


def _torchrl_gae(inputs):
    from torchrl.objectives.value.functional import vec_generalized_advantage_estimate

    values, rewards = inputs["values"][..., None], inputs["rewards"][..., None]
    following = torch.nn.functional.pad(values[:, 1:], (0, 0, 0, 1))
    done = torch.zeros_like(rewards, dtype=torch.bool)  # knows no mask: the same work without it
    return vec_generalized_advantage_estimate(1.0, 0.95, values, following, rewards, done, done)[0][
        ..., 0
    ]


def groups_item(device, prompts, size, by_id) -> Item:
    def inputs(seed):
        generator = torch.Generator(device).manual_seed(seed)
        rewards = torch.rand(prompts * size, device=device, generator=generator)
        if not by_id:
            return {"rewards": rewards, "group_size": size}
        ids = torch.arange(prompts, device=device).repeat_interleave(size)
        order = torch.randperm(prompts * size, device=device, generator=generator)
        return {"rewards": rewards, "group_ids": ids[order]}

    def ours(backend):
        return lambda inputs: fastrl.group_advantages(**inputs, backend=backend).advantages

    def eager(inputs):
        groups = inputs["rewards"].view(-1, size)
        centred = groups - groups.mean(-1, keepdim=True)
        return (centred / (groups.std(-1, keepdim=True) + 1e-4)).flatten()

    def error(answer, inputs):
        exact = {n: x.cpu() if isinstance(x, torch.Tensor) else x for n, x in inputs.items()}
        exact["rewards"] = exact["rewards"].double()
        if "group_ids" not in exact:
            exact["group_ids"] = torch.arange(prompts).repeat_interleave(size)
        truth = group_loop(exact)
        return float((answer.cpu() - truth).abs().max() / truth.abs().max())

    return Item(
        lambda: Case(
            op="group_advantages",
            work="groups by id" if by_id else "consecutive groups",
            shape=f"{prompts} x {size}",
            dtype=FP32,
            bytes_moved=(25 if by_id else 17) * prompts * size,
            inputs=inputs,
            providers=[
                *(Provider(f"fastrl {b}", f"fastrl {b}", ours(b)) for b in backends(device)),
                *([] if by_id else [Provider("eager", "eager", eager)]),
            ],
            error=error,
        ),
        small=True,
    )


_COPIED = ("logprobs", "old_logprobs")


def tokens_item(device, B, T, level) -> Item:
    def eager(logprobs, old_logprobs, advantages, mask):
        return grpo_loss(logprobs, old_logprobs, None, advantages, mask, level=level, kl_coef=0.0)

    objective = fastrl.Objective(level=level, clip_low=0.2, clip_high=0.2, aggregation="token-mean")
    names = ("old_logprobs", "advantages", "mask")

    def inputs(seed):
        generator = torch.Generator(device).manual_seed(seed)

        def uniform():
            return torch.rand(B, T, device=device, generator=generator)

        logprobs = -4 * uniform()
        return {
            "logprobs": logprobs,
            "old_logprobs": logprobs + 0.4 * (uniform() - 0.5),
            "advantages": uniform()[:, :1] - 0.5,
            "mask": uniform() < 0.9,
        }

    def gradient(function):
        def run(inputs: Inputs) -> torch.Tensor:
            logprobs = inputs["logprobs"].detach().requires_grad_()
            loss = function(logprobs, *(inputs[name] for name in names))
            return torch.autograd.grad(loss, logprobs)[0]

        return run

    def ours(backend):
        return lambda logprobs, old, advantages, mask: (
            fastrl.policy_loss(
                logprobs,
                advantages[:, 0],
                mask,
                old_logprobs=old,
                objective=objective,
                backend=backend,
            ).loss
        )

    def error(answer, inputs):
        exact = {n: x.double() if x.is_floating_point() else x for n, x in inputs.items()}
        truth = gradient(eager)(exact)
        return float((answer - truth).abs().max() / truth.abs().max())

    return Item(
        lambda: Case(
            op="policy_loss",
            work=f"loss and gradient, {level} level",
            shape=f"{B} x {T}",
            dtype=FP32,
            bytes_moved=14 * B * T,  # the mask is counted first
            inputs=inputs,
            providers=[
                *(
                    Provider(f"fastrl {b}", f"fastrl {b}", gradient(ours(b)))
                    for b in backends(device)
                ),
                *(Provider(n, k, gradient(f)) for n, k, f in eager_forms(eager, device)),
                Provider("copies", "floor", lambda inputs: [inputs[n].clone() for n in _COPIED]),
            ],
            error=error,
        ),
        small=True,
    )

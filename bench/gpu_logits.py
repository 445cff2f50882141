"""Log-probability, entropy, loss and gradient from logits, on a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from bench_logits_policy_loss import _FromModel
from gpu_item import Item, backends, eager_forms, installed
from logits import STD, eager_logprobs
from timing import Case, Provider

import fastrl

CHECKED_ROWS = 64  # rows of logits that are compared with float64
OBJECTIVE = fastrl.Objective(clip_low=0.2, clip_high=0.2, aggregation="token-mean")


def logits_item(device, N, V, dtype, density, sliced, *, gradient) -> Item:
    def inputs(seed):
        generator = torch.Generator(device).manual_seed(seed)
        width = N + 1 if sliced else N
        logits = torch.empty(1, width, V, dtype=dtype, device=device)
        logits.normal_(0, STD, generator=generator)
        logits = logits[:, :-1] if sliced else logits
        ids = torch.randint(V, (1, N), device=device, generator=generator)
        raised = math.log(V) + STD**2 / 2
        raised = raised + 9.2 * torch.rand(1, N, 1, device=device, generator=generator) - 4.6
        logits.scatter_(-1, ids[..., None], raised.to(dtype))
        old = fastrl.token_logprobs(logits, ids).detach()
        noise = torch.randn(1, N, device=device, generator=generator)
        return {
            "logits": logits,
            "token_ids": ids,
            "advantages": torch.randn(1, N, device=device, generator=generator),
            "mask": torch.rand(1, N, device=device, generator=generator) < density,
            "old_logprobs": old + 0.1 * noise,
        }

    passes = 2 if gradient else 1
    held = f", {density:.0%} active" if density < 1 else ""
    view = ", sliced" if sliced else ""
    return Item(
        lambda: Case(
            op="logits_policy_loss" if gradient else "token_stats",
            work=("loss and gradient" if gradient else "log-probability and entropy") + held + view,
            shape=f"{N} x {V}",
            dtype=dtype,
            bytes_moved=int(passes * N * V * dtype.itemsize * density),
            inputs=inputs,
            providers=[*(_loss_of_logits(device) if gradient else _stats(device))],
            error=_gradient_error if gradient else _stats_error,
        ),
        small=False,
    )


def eager_stats(logits, token_ids, mask):
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(-1, token_ids[..., None]).squeeze(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return chosen * mask, entropy * mask


def _stats(device) -> Iterator[Provider]:
    def fastrl_stats(backend):
        def run(inputs):
            with torch.no_grad():
                return fastrl.token_stats(
                    inputs["logits"], inputs["token_ids"], mask=inputs["mask"], backend=backend
                )[:2]

        return run

    def of(function):
        def run(inputs):
            with torch.no_grad():
                return function(*(inputs[name] for name in ("logits", "token_ids", "mask")))

        return run

    for backend in backends(device):
        yield Provider(f"fastrl {backend}", f"fastrl {backend}", fastrl_stats(backend))
    for name, kind, function in eager_forms(eager_stats, device):
        yield Provider(name, kind, of(function))
    if installed("trl"):
        yield Provider("TRL fused", "peer", _trl_stats)
    yield Provider("read once (sum)", "floor", lambda inputs: inputs["logits"].sum(-1))


def _trl_stats(inputs):
    from trl.kernels.logprob_entropy import selective_log_softmax_and_entropy

    with torch.no_grad():
        return selective_log_softmax_and_entropy(
            inputs["logits"], inputs["token_ids"], 1.0, inputs["mask"]
        )


def eager_loss(logits, token_ids, advantages, old_logprobs, mask):
    logits = logits if logits.dtype == torch.float64 else logits.float()
    ratio = (eager_logprobs(logits, token_ids) - old_logprobs).exp()
    bounded = ratio.clamp(0.8, 1.2)
    return -(torch.minimum(ratio * advantages, bounded * advantages) * mask).sum() / mask.sum()


LOSS_INPUTS = ("token_ids", "advantages", "old_logprobs", "mask")


def _loss_of_logits(device) -> Iterator[Provider]:
    def gradient(function):
        def run(inputs):
            logits = inputs["logits"].detach().requires_grad_()
            loss = function(logits, *(inputs[name] for name in LOSS_INPUTS))
            return torch.autograd.grad(loss, logits)[0]

        return run

    def ours(backend):
        def loss(logits, ids, advantages, old, mask):
            return fastrl.logits_policy_loss(
                logits, ids, advantages, mask, old_logprobs=old, objective=OBJECTIVE,
                backend=backend,
            ).loss  # fmt: skip

        return loss

    for backend in backends(device):
        yield Provider(f"fastrl {backend}", f"fastrl {backend}", gradient(ours(backend)))
        if backend != "reference":
            yield Provider(
                f"fastrl {backend} in place",
                f"fastrl {backend} in place",
                _in_place(backend),
                lambda inputs: {**inputs, "logits": inputs["logits"].clone()},
            )
    for name, kind, function in eager_forms(eager_loss, device):
        yield Provider(name, kind, gradient(function))
    if installed("liger_kernel"):
        yield Provider("Liger GRPO in place", "peer", _liger, _liger_inputs)
    target = {}

    def copy(inputs):
        if "logits" not in target:
            target["logits"] = torch.empty_like(inputs["logits"])
        return target["logits"].copy_(inputs["logits"])

    yield Provider("copy", "floor", copy)


def _in_place(backend):
    def run(inputs):
        anchor = torch.zeros((), device=inputs["logits"].device, requires_grad=True)
        logits = _FromModel.apply(inputs["logits"], anchor)
        ids, advantages, old, mask = (inputs[name] for name in LOSS_INPUTS)
        fastrl.logits_policy_loss(
            logits, ids, advantages, mask, old_logprobs=old, objective=OBJECTIVE,
            backend=backend, inplace=True,
        ).loss.backward()  # fmt: skip
        return logits.detach()

    return run


def _liger_inputs(inputs):
    """Liger takes one more position and ignores its logits; it writes the gradient over them."""
    return {**inputs, "logits": torch.nn.functional.pad(inputs["logits"], (0, 0, 0, 1))}


def _liger(inputs):
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    logits = inputs["logits"].requires_grad_()
    losses = triton_grpo_loss(
        logits, inputs["old_logprobs"], None, inputs["token_ids"], inputs["advantages"][:, 0],
        inputs["mask"].int(), temperature=1.0, beta=0.0, eps_low=0.2, eps_high=0.2, inplace=True,
    )  # fmt: skip
    (losses[0] * inputs["mask"]).sum().backward()
    return logits.grad[:, :-1]


def _rows(inputs):
    """The first rows in float64."""
    cut = {name: x[:, :CHECKED_ROWS] for name, x in inputs.items()}
    return {name: x.double() if x.is_floating_point() else x for name, x in cut.items()}


def _stats_error(answer, inputs):
    exact = _rows(inputs)
    logprobs = exact["logits"].log_softmax(-1)
    chosen = logprobs.gather(-1, exact["token_ids"][..., None]).squeeze(-1)
    errors = []
    for found, truth in zip(answer, (chosen, -(logprobs.exp() * logprobs).sum(-1)), strict=True):
        wanted = torch.where(exact["mask"], truth, 0.0)
        found = torch.where(exact["mask"], found[:, :CHECKED_ROWS], 0.0).double()
        errors.append(float(((found - wanted).abs() / wanted.abs().clamp(min=1)).max()))
    return max(errors)


def _gradient_error(answer, inputs):
    exact = _rows(inputs)
    logits = exact["logits"].requires_grad_()
    loss = eager_loss(logits, *(exact[name] for name in LOSS_INPUTS)) * exact["mask"].sum()
    (truth,) = torch.autograd.grad(loss / inputs["mask"].sum(), logits)
    return float((answer[:, :CHECKED_ROWS] - truth).abs().max() / truth.abs().max())

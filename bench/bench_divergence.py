"""Distillation: the divergence from a teacher and the gradients of the student's head and states.

Beside it, the GRPO loss with a teacher: against the one without and the teacher's GEMM.
"""

from __future__ import annotations

import importlib.util
import math

import torch
from bench_linear import Gradients, fastrl_provider, linear_inputs
from shapes import LINEAR, Linear
from timing import Case, Inputs, Provider, pedantic

import fastrl
from fastrl import Objective, Teacher

#: beta -> what the divergence is called
KINDS = {0.0: "forward KL", 1.0: "reverse KL", 0.5: "Jensen-Shannon"}


def cases(selection: str) -> list[Case]:
    dtypes = (torch.float32, torch.bfloat16)
    shapes = [(shape, dtype) for shape in LINEAR[selection] for dtype in dtypes]
    alone = [_alone(*shape, beta) for shape in shapes for beta in KINDS]
    return alone + [_beside(*shape) for shape in shapes]


def _alone(shape: Linear, dtype: torch.dtype, beta: float) -> Case:
    return _case(
        f"divergence, {KINDS[beta]}",
        "loss and gradients of the student",
        shape,
        dtype,
        [
            Provider("fastrl cpu", "fastrl cpu", lambda inputs: _distilled(inputs, beta)),
            Provider("eager", "eager", lambda inputs: _eager(inputs, beta)),
            Provider("four bare GEMMs", "floor", _bare_gemms),
            *([_trl(beta)] if importlib.util.find_spec("trl") else []),
        ],
        beta,
    )


def _beside(shape: Linear, dtype: torch.dtype) -> Case:
    def and_gemm(inputs: Inputs) -> Gradients:
        _teachers_gemm(inputs)
        return without.run(inputs)

    def with_teacher(inputs: Inputs) -> Gradients:
        return _loss(inputs, Objective(teacher_coef=1.0), Teacher.from_hidden(*_teacher(inputs)))

    without = fastrl_provider("cpu")
    return _case(
        "linear_policy_loss, a teacher",
        "loss and gradients of both terms",
        shape,
        dtype,
        [
            Provider("fastrl cpu", "fastrl cpu", with_teacher),
            Provider("without, and the teacher's GEMM", "same rows", and_gemm),
        ],
        None,
    )


def _case(
    op: str,
    work: str,
    shape: Linear,
    dtype: torch.dtype,
    providers: list[Provider],
    beta: float | None,
) -> Case:
    rows = shape.sequences * shape.tokens
    return Case(
        op=op,
        work=work,
        shape=f"{rows} x {shape.hidden} x {shape.vocab}",
        dtype=dtype,
        bytes_moved=3 * (rows + shape.vocab) * shape.hidden * dtype.itemsize,
        inputs=lambda seed: teacher_inputs(shape, dtype, seed),
        providers=providers,
        error=lambda answer, inputs: math.nan if beta is None else _error(answer, inputs, beta),
    )


def teacher_inputs(shape: Linear, dtype: torch.dtype, seed: int) -> Inputs:
    """A student, and a teacher whose head and hidden states are some way from the student's."""
    inputs = linear_inputs(shape, dtype, seed)
    generator = torch.Generator().manual_seed(seed + 1000)

    def moved(x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(x.shape, generator=generator)
        return (x.float() + 0.3 * x.float().std() * noise).to(dtype)

    return inputs | {f"teacher_{name}": moved(inputs[name]) for name in ("hidden", "weight")}


def _teacher(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    return inputs["teacher_hidden"], inputs["teacher_weight"]


def _leaves(inputs: Inputs) -> Gradients:
    return tuple(inputs[name].detach().requires_grad_() for name in ("hidden", "weight"))


def _distilled(inputs: Inputs, beta: float) -> Gradients:
    teacher = Teacher.from_hidden(*_teacher(inputs), beta=beta)
    objective = Objective(teacher_coef=1.0, aggregation="token-mean")
    leaves = _leaves(inputs)
    result = fastrl.linear_policy_loss(
        *leaves, inputs["token_ids"], None, inputs["mask"], teacher=teacher, objective=objective
    )
    return torch.autograd.grad(result.loss, leaves)


def _loss(inputs: Inputs, objective: Objective, teacher: Teacher | None) -> Gradients:
    leaves = _leaves(inputs)
    result = fastrl.linear_policy_loss(
        *leaves,
        inputs["token_ids"],
        inputs["advantages"][:, 0],
        inputs["mask"],
        old_logprobs=inputs["old_logprobs"],
        teacher=teacher,
        objective=objective,
    )
    return torch.autograd.grad(result.loss, leaves)


def _eager(inputs: Inputs, beta: float) -> Gradients:
    leaves = _leaves(inputs)
    log_q, log_p = (
        _logits(hidden, weight).log_softmax(-1) for hidden, weight in (leaves, _teacher(inputs))
    )

    def kl(log_a: torch.Tensor, log_b: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.kl_div(log_b, log_a, reduction="none", log_target=True).sum(-1)

    if beta in (0, 1):
        divergence = kl(log_q, log_p) if beta else kl(log_p, log_q)
    else:
        mixture = torch.logaddexp(log_q + math.log1p(-beta), log_p + math.log(beta))
        divergence = beta * kl(log_p, mixture) + (1 - beta) * kl(log_q, mixture)
    loss = (divergence * inputs["mask"]).sum() / inputs["mask"].sum()
    return torch.autograd.grad(loss, leaves)


def _logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    logits = hidden @ weight.T
    return logits if logits.dtype == torch.float64 else logits.float()


def _teachers_gemm(inputs: Inputs) -> torch.Tensor:
    hidden, weight = _teacher(inputs)
    return hidden.flatten(0, 1).float() @ weight.float().T


def _bare_gemms(inputs: Inputs) -> Gradients:
    """Only the GEMMs, in float32: logits of both, gradients of the student's states and head."""
    hidden, weight = (inputs[name].float() for name in ("hidden", "weight"))
    hidden = hidden.flatten(0, 1)
    _teachers_gemm(inputs)
    logits = hidden @ weight.T
    return logits @ weight, logits.T @ hidden


def _trl(beta: float) -> Provider:
    def run(inputs: Inputs) -> Gradients:
        from trl.trainer.distillation_trainer import _chunked_divergence_loss

        leaves, (states, head) = _leaves(inputs), _teacher(inputs)
        loss, *_ = _chunked_divergence_loss(
            leaves[0], states, leaves[1], head, inputs["mask"], beta
        )
        return torch.autograd.grad(loss, leaves)

    return Provider("TRL chunked", "peer", run)


def _error(answer: Gradients, inputs: Inputs, beta: float) -> float:
    """The larger error of the two gradients, relative to the gradient's largest element."""
    exact = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    pairs = zip(answer, _eager(exact, beta), strict=True)
    return max(float((found - truth).abs().max() / truth.abs().max()) for found, truth in pairs)


def test_divergence(benchmark, case, provider):
    pedantic(benchmark, case, provider)

"""Distillation: the divergence from a teacher, alone and beside the policy loss."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import fastrl
from fastrl.backend import Backend
from fastrl.bench.case import Case, Inputs, Size
from fastrl.bench.cases.linear import linear_case, loss
from fastrl.bench.cases.logits import logits_case
from fastrl.bench.error import ROLLOUT, Work, clipped, logprobs_of
from fastrl.bench.inputs import STD, Source, linear_inputs, logits_inputs
from fastrl.bench.peers import Participants, divergence_peers

BETAS = {"": 1.0, "reverse KL": 1.0, "forward KL": 0.0, "Jensen-Shannon": 0.5}
OBJECTIVE = fastrl.Objective(
    clip_low=0.2, clip_high=0.2, teacher_coef=1.0, aggregation="token-mean"
)


def token_divergence(size: Size, step: str, who: Participants) -> Case:
    """The mean divergence from a teacher's logits."""
    beta = BETAS[size.variant]

    def ours(inputs: Inputs, backend: Backend) -> Tensor:
        teacher = fastrl.Teacher.from_logits(inputs["teacher_logits"], beta=beta)
        return fastrl.token_divergence(inputs["logits"], teacher, backend=backend).mean()

    return logits_case(size, step, who, who.fastrl(ours), _work(beta), _teacher_logits)


def linear_divergence(size: Size, step: str, who: Participants) -> Case:
    """The mean divergence from hidden states and heads, and the same as a loss in one pass."""
    beta = BETAS[size.variant]

    def ours(inputs: Inputs, backend: Backend) -> Tensor:
        divergence = fastrl.linear_divergence(
            inputs["hidden"], inputs["weight"], _teacher(inputs, beta), backend=backend
        )
        return divergence.mean()

    def one_pass(inputs: Inputs, backend: Backend) -> Tensor:
        return fastrl.linear_policy_loss(
            inputs["hidden"], inputs["weight"], inputs["token_ids"], None, inputs["mask"],
            teacher=_teacher(inputs, beta), objective=OBJECTIVE, backend=backend,
        ).loss  # fmt: skip

    providers = who.fastrl(ours)
    providers += [
        one._replace(name=f"{one.name} linear_policy_loss") for one in who.fastrl(one_pass)
    ]
    providers += divergence_peers(who, beta)
    return linear_case(size, step, who, providers, _work(beta), _teacher_hidden)


def loss_with_teacher(size: Size, step: str, who: Participants) -> Case:
    """The clipped loss and the reverse KL divergence from a teacher."""

    def ours(inputs: Inputs, backend: Backend) -> Tensor:
        teacher = _teacher(inputs, 1.0)
        return loss(inputs, teacher=teacher, objective=OBJECTIVE, backend=backend)

    def values(logits: Tensor, tokens: Inputs) -> tuple[Tensor, ...]:
        policy = clipped(logprobs_of(logits, tokens["token_ids"]), tokens)
        return (policy + _divergence(logits, tokens["teacher_logits"], 1.0),)

    work = Work(values, (*ROLLOUT, "teacher_logits"), mean=True)
    return linear_case(size, step, who, who.fastrl(ours), work, _teacher_hidden)


def _work(beta: float) -> Work:
    def values(logits: Tensor, tokens: Inputs) -> tuple[Tensor, ...]:
        return (_divergence(logits, tokens["teacher_logits"], beta),)

    return Work(values, ("mask", "teacher_logits"), mean=True)


def _divergence(logits: Tensor, teacher_logits: Tensor, beta: float) -> Tensor:
    log_q, log_p = logits.log_softmax(-1), teacher_logits.to(logits.dtype).log_softmax(-1)

    def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
        return torch.nn.functional.kl_div(log_b, log_a, reduction="none", log_target=True).sum(-1)

    if beta in (0.0, 1.0):
        return kl(log_q, log_p) if beta else kl(log_p, log_q)
    mixture = torch.logaddexp(log_q + math.log1p(-beta), log_p + math.log(beta))
    return beta * kl(log_p, mixture) + (1 - beta) * kl(log_q, mixture)


def _teacher(inputs: Inputs, beta: float) -> fastrl.Teacher:
    return fastrl.Teacher.from_hidden(inputs["teacher_hidden"], inputs["teacher_weight"], beta=beta)


def _teacher_logits(size: Size, device: torch.device, seed: int) -> Inputs:
    inputs = logits_inputs(size, device, seed)
    return inputs | {"teacher_logits": _moved(inputs["logits"], STD, Source(device, seed + 1000))}


def _teacher_hidden(size: Size, device: torch.device, seed: int) -> Inputs:
    inputs = linear_inputs(size, device, seed)
    source = Source(device, seed + 1000)
    scales = {"hidden": 1.0, "weight": STD / inputs["weight"].shape[1] ** 0.5}
    moved = {name: _moved(inputs[name], scale, source) for name, scale in scales.items()}
    return inputs | {f"teacher_{name}": x for name, x in moved.items()}


def _moved(x: Tensor, scale: float, source: Source) -> Tensor:
    return (x.float() + 0.3 * scale * source.normal(*x.shape)).to(x.dtype)

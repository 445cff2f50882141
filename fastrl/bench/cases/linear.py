"""Log-probabilities and the policy loss from hidden states and the LM head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fastrl
from fastrl.backend import Backend
from fastrl.bench.case import BACKWARD, BOTH, FORWARD, Case, Inputs, Provider, Size
from fastrl.bench.cases.logits import OBJECTIVE
from fastrl.bench.error import LOGPROBS, LOSS, Error, Work
from fastrl.bench.inputs import AUTOCAST, FROZEN, MASKED, linear_inputs
from fastrl.bench.models import MODELS
from fastrl.bench.peers import Participants, liger_linear_grpo, linear_peers


def linear_token_logprobs(size: Size, step: str, who: Participants) -> Case:
    """The log-probability of one token per row; forward without a graph, as samples are scored."""

    def ours(inputs: Inputs, backend: Backend) -> Tensor:
        names = ("hidden", "weight", "token_ids")
        return fastrl.linear_token_logprobs(*(inputs[name] for name in names), backend=backend)

    return linear_case(size, step, who, [*who.fastrl(ours), *linear_peers(who)], LOGPROBS)


def linear_policy_loss(size: Size, step: str, who: Participants) -> Case:
    """The clipped loss, whose gradients fastrl computes in the forward pass."""

    def ours(inputs: Inputs, backend: Backend) -> Tensor:
        return loss(inputs, backend=backend)

    peers = [*linear_peers(who, loss=True), *liger_linear_grpo(who)]
    return linear_case(size, step, who, [*who.fastrl(ours), *peers], LOSS)


def loss(inputs: Inputs, **options: Any) -> Tensor:
    """Return fastrl's loss."""
    names = ("hidden", "weight", "token_ids", "sequence_advantages", "mask")
    return fastrl.linear_policy_loss(
        *(inputs[name] for name in names),
        **{"old_logprobs": inputs["old_logprobs"], "objective": OBJECTIVE, **options},
    ).loss


def linear_case(
    size: Size,
    step: str,
    who: Participants,
    ours_and_peers: list[Provider],
    work: Work,
    inputs: Callable[[Size, torch.device, int], Inputs] = linear_inputs,
) -> Case:
    """Return a case with eager torch and the GEMMs alone."""
    teacher = "teacher_logits" in work.names
    hidden_size, vocabulary = MODELS[size.model]
    trained = size.variant != FROZEN
    leaves = ("hidden", "weight") if trained else ("hidden",)
    rows = size.rows // 2 if size.variant == MASKED else size.rows
    gemms = {FORWARD: 1, BACKWARD: len(leaves), BOTH: 1 + len(leaves)}[step]
    gemms += teacher and step != BACKWARD
    names = ("hidden", "weight", *(name for name in work.names if name != "teacher_logits"))
    names += ("teacher_hidden", "teacher_weight") if teacher else ()

    def eager(hidden: Tensor, weight: Tensor, *tokens: Tensor, upcast: bool) -> Any:
        if teacher:
            *others, states, head = tokens
            tokens = (*others, states @ head.T)
        return work.eager(hidden @ weight.T, *tokens, upcast=upcast)

    providers = [*ours_and_peers, *who.eager(eager, names, size.dtype)]
    if size.variant == AUTOCAST:
        providers = [one._replace(forward=_autocast(one.forward, who)) for one in providers]
    # CPUs without AMX multiply 16 bits more slowly than float32
    gemm_dtype = torch.float32 if who.device.type == "cpu" else size.dtype
    error = Error(work, step, trained=trained)
    return Case(
        size=size,
        step=step,
        shape={"rows": size.rows, "hidden": hidden_size, "vocabulary": vocabulary},
        inputs=lambda seed: inputs(size, who.device, seed),
        providers=[*providers, _gemms(trained, gemm_dtype, size.dtype)],
        error=error,
        output_error=error.of_output if step == BOTH else None,
        leaves=() if step == FORWARD and not work.mean else leaves,
        flops=2 * gemms * rows * hidden_size * vocabulary,
    )


def _gemms(trained: bool, dtype: torch.dtype, given: torch.dtype) -> Provider:
    """The GEMMs of as many rows as are active, in a dtype that they are converted to beforehand."""
    name = "bare GEMMs" if dtype == given else f"bare GEMMs in {str(dtype).removeprefix('torch.')}"

    def prepare(inputs: Inputs) -> Inputs:
        names = [name for name in inputs if name.endswith(("hidden", "weight"))]
        found = inputs | {name: inputs[name].to(dtype) for name in names}
        return found | {"rows": found["hidden"].flatten(0, 1)[: inputs["active"]]}

    def forward(inputs: Inputs) -> Tensor:
        if "teacher_hidden" in inputs:
            inputs["teacher_hidden"].flatten(0, 1) @ inputs["teacher_weight"].T
        weight: Tensor = inputs["weight"].detach()
        rows: Tensor = inputs["rows"]
        return rows @ weight.T

    def backward(logits: Tensor, inputs: Inputs) -> list[Tensor]:
        gradients = [logits @ inputs["weight"].detach()]
        return gradients + ([logits.T @ inputs["rows"]] if trained else [])

    return Provider(name, "floor", forward, backward, prepare)


def _autocast(forward: Callable[[Inputs], Any], who: Participants) -> Callable[[Inputs], Any]:
    def under_autocast(inputs: Inputs) -> Any:
        with torch.autocast(who.device.type, torch.bfloat16):
            return forward(inputs)

    return under_autocast

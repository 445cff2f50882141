"""The linear forms: hidden states and an LM head of a case, and what is expected of the call."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fastrl

from .arithmetic import of_results
from .bounded import Bounded, Doubts
from .case import Case
from .compare import Part
from .logits_data import as_held
from .oracle.head import LinearHead
from .oracle.rows import Rows
from .policy_call import (
    UPSTREAM,
    PolicyInputs,
    expected_parts,
    loss_parts,
    moved,
    scaled,
    upstream,
    upstream_factor,
)
from .rows_call import (
    DIFFERENTIABLE,
    LogitRows,
    backward,
    ids_tensor,
    part,
    rows_of,
    token_options,
    upstream_of,
)
from .tensors import MASKED_VALUES, flat_tensor, laid_out, mask_tensor

#: The gradient of the logits enters the GEMMs of two bfloat16 operands as the sum of two bfloat16
#: on the matrix tiles of a CPU, and rounded to bfloat16 on the tensor cores of a GPU.
ENTERING = {"cpu": 2.0**-16, "cuda": 2.0**-8}
#: The factor of a LoRA, and of hidden states so that logits have the spread of the case.
LORA_SCALE = 0.75


@dataclasses.dataclass
class HeadData:
    """Hidden states `[N, H]` and parameters, as their dtypes hold them."""

    hidden: np.ndarray
    parameters: dict[str, np.ndarray]
    dtypes: dict[str, str]


def head_of(case: Case, rows: LogitRows) -> HeadData:
    random = case.random("head")
    width, vocabulary = case.hidden, case.vocabulary
    weight_dtype = case.dtype if case.weight_dtype == "like" else case.weight_dtype
    hidden = random.standard_normal((rows.tokens.total, width)) * case.spread
    if case.has("nan-row"):
        hidden[random.random(len(hidden)) < 0.3] = np.nan
    if case.has("ties"):
        hidden = np.round(hidden)
    parameters = {"weight": random.standard_normal((vocabulary, width)) / width**0.5}
    if case.bias:
        bias = random.standard_normal(vocabulary)
        if case.has("inf-some"):
            bias[random.random(vocabulary) < 0.3] = -np.inf
        parameters["bias"] = bias
    if case.lora:
        parameters["lora_a"] = random.standard_normal((case.lora, width)) / width**0.5
        parameters["lora_b"] = random.standard_normal((vocabulary, case.lora)) / case.lora**0.5
    dtypes = {"hidden": case.dtype} | dict.fromkeys(parameters, weight_dtype)
    held = {name: as_held(values, weight_dtype) for name, values in parameters.items()}
    return HeadData(as_held(hidden, case.dtype), held, dtypes)


def tensors_of(case: Case, rows: LogitRows, head: HeadData, device: str) -> dict[str, Tensor]:
    """Return hidden states and parameters as leaves, those that are not frozen with gradient."""
    tokens = rows.tokens
    hidden = head.hidden
    if case.masked_values != "usual":
        filler = MASKED_VALUES[case.masked_values]
        hidden = np.where(tokens.valid[:, None], hidden, filler)
    shaped = flat_tensor(case, hidden, case.dtype).view(*tokens.shape, case.hidden)
    found = {"hidden": laid_out(shaped, case.logits_layout)}
    for name, values in head.parameters.items():
        layout = case.token_layout if name == "weight" else "contiguous"
        found[name] = laid_out(flat_tensor(case, values, head.dtypes[name]), layout)
    return {
        name: tensor.to(device).requires_grad_(case.mode == "grad" and name not in case.frozen)
        for name, tensor in found.items()
    }


def arguments_of(case: Case, rows: LogitRows, leaves: dict[str, Tensor]) -> dict[str, Any]:
    arguments: dict[str, Any] = dict(token_options(rows))
    if "bias" in leaves:
        arguments["bias"] = leaves["bias"]
    if "lora_a" in leaves:
        arguments["lora"] = (leaves["lora_a"], leaves["lora_b"], LORA_SCALE)
    if case.chunk_tokens is not None:
        arguments["chunk_tokens"] = case.chunk_tokens
    if not case.compact:
        arguments["compact"] = False
    return arguments


def oracle_of(case: Case, rows: LogitRows, head: HeadData, device: str) -> tuple[LinearHead, Rows]:
    active = rows.active
    arithmetic = of_results(case.dtype, head.dtypes["weight"])
    alike = case.dtype == head.dtypes["weight"] == "bfloat16"
    parameters = head.parameters
    lora = None
    if case.lora:
        lora = (parameters["lora_a"], parameters["lora_b"], LORA_SCALE)
    linear = LinearHead(
        head.hidden[active],
        parameters["weight"],
        parameters.get("bias"),
        lora,
        arithmetic,
        ENTERING[device.partition(":")[0]] if alike else 0.0,
    )
    with np.errstate(all="ignore"):
        x, error = linear.logits()
    return linear, Rows(x, rows.ids[active], rows.head, arithmetic, error)


def gradient_parts(
    case: Case, rows: LogitRows, head: HeadData, linear: LinearHead, dx: Bounded, idle: np.ndarray
) -> dict[str, Part]:
    """Return the expected gradients of what is not frozen."""
    # of a row that has no upstream gradient there is none, whatever the row holds: it is left out
    if not case.compact:
        idle = idle & np.isfinite(linear.hidden).all(1)
    dx = Bounded(
        np.where(idle[:, None], 0.0, dx.value),
        np.where(idle[:, None], 0.0, dx.error),
        dx.arithmetic,
    )
    with np.errstate(all="ignore"):
        found = linear.gradients(dx)
    found["hidden"] = rows.placed(found["hidden"])
    return {
        f"grad {name}": Part(value, head.dtypes[name])
        for name, value in found.items()
        if name not in case.frozen
    }


def _idle(*upstreams: Bounded) -> np.ndarray:
    """Say which rows certainly have no upstream gradient."""
    return np.logical_and.reduce([(g.value == 0) & (g.error == 0) for g in upstreams])


def examined_stats(case: Case, backend: str, device: str, doubts: Doubts) -> tuple[dict, dict]:
    """Examine `linear_token_logprobs` and `linear_token_stats`."""
    rows = rows_of(case)
    head = head_of(case, rows)
    leaves = tensors_of(case, rows, head, device)
    parameters = [leaves["hidden"], leaves["weight"], ids_tensor(rows).to(device)]
    arguments = moved({"mask": mask_tensor(case, rows.tokens)}, device)
    arguments |= arguments_of(case, rows, leaves)
    if case.function == "linear_token_stats":
        arguments["outputs"] = case.outputs
    with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
        result = getattr(fastrl, case.function)(*parameters, backend=backend, **arguments)
    parts = {"logprobs": result} if isinstance(result, Tensor) else result._asdict()
    got = {name: part(x) for name, x in parts.items() if x is not None}
    linear, oracle = oracle_of(case, rows, head, device)
    doubts.add("unsaid: a row without distribution", oracle.undefined)
    outputs = case.outputs if case.function == "linear_token_stats" else ("logprobs",)
    dtype = linear.arithmetic.name
    want = {
        name: Part(rows.placed(getattr(oracle, name)), "bool" if name == "is_top1" else dtype)
        for name in outputs
    }
    if any(leaf.requires_grad for leaf in leaves.values()):
        backward(rows, parts, device)
        got |= {f"grad {name}": part(x.grad) for name, x in leaves.items() if x.requires_grad}
        upstreams = []
        for name in DIFFERENTIABLE:
            values = upstream_of(rows, name) if name in outputs else None
            values = np.zeros(rows.tokens.total) if values is None else values
            upstreams.append(Bounded(values[rows.active], 0.0, linear.arithmetic))
        dx = oracle.gradient(*upstreams)
        idle = _idle(*upstreams)
        want |= gradient_parts(case, rows, head, linear, dx, idle)
    return got, want


def examined_loss(case: Case, backend: str, device: str, doubts: Doubts) -> tuple[dict, dict]:
    """Examine `linear_policy_loss`."""
    rows = rows_of(case)
    head, tokens, active = head_of(case, rows), rows.tokens, rows.active
    linear, oracle = oracle_of(case, rows, head, device)
    logprobs = np.zeros(tokens.total)
    logprobs[active] = oracle.logprobs.value
    inputs = PolicyInputs(case, tokens, active, logprobs)
    leaves = tensors_of(case, rows, head, device)
    arguments = moved(inputs.arguments(), device) | arguments_of(case, rows, leaves)
    if not case.metrics:
        arguments["metrics"] = False
    with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
        result = fastrl.linear_policy_loss(
            leaves["hidden"],
            leaves["weight"],
            ids_tensor(rows).to(device),
            inputs.advantages_tensor().to(device),
            mask_tensor(case, tokens).to(device),
            backend=backend,
            **arguments,
        )
    got = loss_parts(result)
    doubts.add("unsaid: a row without distribution", oracle.undefined)
    loss = inputs.expected(oracle.logprobs, oracle.entropy, linear.arithmetic, doubts)
    want = expected_parts(loss, linear.arithmetic)
    if not case.metrics:
        want = {"loss": want["loss"]}
    if any(leaf.requires_grad for leaf in leaves.values()):
        result.loss.backward(upstream(case, result.loss).to(device))
        got |= {f"grad {name}": part(x.grad) for name, x in leaves.items() if x.requires_grad}
        by = upstream_factor(case, linear.arithmetic)
        nothing = Bounded(np.zeros(int(active.sum())), 0.0, linear.arithmetic)
        slope = scaled(loss.slope, by, loss.slope.value == 0)
        entropy_slope = scaled(loss.entropy_slope, by, loss.entropy_slope.value == 0)
        dx = oracle.gradient(slope, entropy_slope, nothing)
        idle = _idle(slope, entropy_slope)
        parts = gradient_parts(case, rows, head, linear, dx, idle)
        waited_for = UPSTREAM[case.upstream]
        want |= {
            name: dataclasses.replace(part_, waited_for=waited_for) for name, part_ in parts.items()
        }
    return got, want

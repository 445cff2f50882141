"""Hidden states and an LM head of a case: as tensors, and for the oracle."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from torch import Tensor

from .arithmetic import of_results
from .case import Case
from .logits_data import as_held
from .oracle.head import LinearHead
from .oracle.rows import Rows
from .rows_data import LogitRows
from .tensors import MASKED_VALUES, flat_tensor, laid_out
from .trial import Trial

#: The gradient of the logits enters the GEMMs of two bfloat16 operands as the sum of two bfloat16
#: on the matrix tiles of a CPU, and rounded to bfloat16 on the tensor cores of a GPU.
ENTERING = {"cpu": 2.0**-16, "cuda": 2.0**-8}


@dataclasses.dataclass
class HeadData:
    """Hidden states `[N, H]` and parameters, rounded to their dtypes."""

    hidden: np.ndarray
    parameters: dict[str, np.ndarray]
    dtypes: dict[str, str]


def head_of(case: Case, rows: LogitRows) -> HeadData:
    random = case.random("head")
    width, vocabulary = case.hidden, case.vocabulary
    weight_dtype = case.dtype if case.weight_dtype == "like" else case.weight_dtype
    lora_dtype = weight_dtype if case.lora_dtype == "like" else case.lora_dtype
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
    dtypes |= dict.fromkeys(("lora_a", "lora_b"), lora_dtype)
    held = {name: as_held(values, dtypes[name]) for name, values in parameters.items()}
    return HeadData(as_held(hidden, case.dtype), held, dtypes)


def tensors_of(case: Case, rows: LogitRows, head: HeadData) -> dict[str, Tensor]:
    """Return hidden states and parameters."""
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
    return found


def head_arguments(case: Case, leaves: dict[str, Tensor]) -> dict[str, Any]:
    """Return the optional arguments of the head, including optional parameters."""
    arguments: dict[str, Any] = {}
    if "bias" in leaves:
        arguments["bias"] = leaves["bias"]
    if "lora_a" in leaves:
        arguments["lora"] = (leaves["lora_a"], leaves["lora_b"], case.lora_scale)
    if case.chunk_tokens is not None:
        arguments["chunk_tokens"] = case.chunk_tokens
    if not case.compact:
        arguments["compact"] = False
    return arguments


def oracle_of(trial: Trial, rows: LogitRows, head: HeadData) -> tuple[LinearHead, Rows]:
    """Return the oracle of the head, and the oracle of the rows of logits that it makes."""
    case = trial.case
    active = rows.active
    arithmetic = of_results(case.dtype, head.dtypes["weight"])
    alike = case.dtype == head.dtypes["weight"] == "bfloat16"
    parameters = head.parameters
    lora = None
    if case.lora:
        lora = (parameters["lora_a"], parameters["lora_b"], float(case.lora_scale))
    linear = LinearHead(
        head.hidden[active],
        parameters["weight"],
        parameters.get("bias"),
        lora,
        arithmetic,
        ENTERING[trial.device.partition(":")[0]] if alike else 0.0,
    )
    x, error = linear.logits()
    return linear, Rows(x, rows.ids[active], rows.head(trial), arithmetic, error)

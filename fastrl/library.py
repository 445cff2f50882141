"""The registered operators: their `torch.library` schemas and fakes, shared by all backends.

Every compiled backend implements them in a separate namespace; `fastrl/ops/_rows/operators.py` has
those in Python, which loop over rows and call these. Groups of arguments come from the
named tuples in `fastrl/contract.py`. The public functions in `fastrl.ops` pass per-token tensors as
`[B, T]` and logits as `[B, T, V]` with any batch strides and vocabulary stride 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_type_hints

import torch
from torch import Tensor

from fastrl.contract import (
    AggregationArguments,
    Coefficients,
    LossArguments,
    ObjectiveArguments,
    RowArguments,
    RowStats,
    SavedStats,
    ScalingArguments,
)

_TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    int: "int",
    float: "float",
    bool: "bool",
    str: "str",
    int | None: "int?",
    torch.dtype | None: "ScalarType?",
    list[int]: "int[]",
    list[float]: "float[]",
    Coefficients: "float[]",
}


def declared(fields: type, prefix: str = "") -> str:
    """Return the fields of a named tuple, and of those nested in it, as arguments of a schema."""
    hints = {f"{prefix}{name}": hint for name, hint in get_type_hints(fields).items()}
    return ", ".join(
        f"{_TYPES[hint]} {name}" if hint in _TYPES else declared(hint, f"{name}_")
        for name, hint in hints.items()
    )


def define(qualified_name: str, schema: str) -> None:
    """Register an operator."""
    torch.library.define(qualified_name, schema, tags=(torch.Tag.pt2_compliant_tag,))


_ROWS = declared(RowArguments)
_LOSS = f"{declared(LossArguments)}, {declared(ObjectiveArguments)}"
_SAVED = declared(SavedStats)
# Rows of logits and those of a teacher.
_PAIR = f"Tensor teacher_logits, {_ROWS}, {declared(ScalingArguments, 'teacher_')}"
_DIVERGENCE_BACKWARD = (
    f"{_PAIR}, {_SAVED}, Tensor teacher_row_max, Tensor teacher_log_sum, float beta, "
    "Tensor slope_mean, Tensor grad_divergence"
)
# An in-place operator writes the gradient over the logits. With `narrow` the gradient of a row of
# float32 logits, which starts at a multiple of 16 bytes and has stride_t elements, is bfloat16 in
# the second half of the row's memory: elements stride_t to stride_t + V of bfloat16. GPUs only.
_SCHEMAS = {
    "token_stats_fwd": (
        f"(Tensor logits, {_ROWS}, bool with_entropy, bool with_sum_sq_probs) -> "
        f"({declared(RowStats)})"
    ),
    "token_stats_bwd": f"(Tensor logits, {_ROWS}, {_SAVED}) -> Tensor",
    "token_stats_bwd_": f"(Tensor(a!) logits, {_ROWS}, {_SAVED}, bool narrow) -> ()",
    # slope_mean: the sum of q times the derivative of the divergence by ln q, for the backward.
    # agrees: whether the same column is the largest in both rows.
    "divergence_fwd": (
        f"(Tensor logits, {_PAIR}, Tensor row_max, Tensor log_sum, Tensor teacher_row_max, "
        "Tensor teacher_log_sum, float beta) -> "
        "(Tensor divergence, Tensor slope_mean, Tensor agrees)"
    ),
    "divergence_bwd": f"(Tensor logits, {_DIVERGENCE_BACKWARD}) -> Tensor",
    "divergence_bwd_": f"(Tensor(a!) logits, {_DIVERGENCE_BACKWARD}, bool narrow) -> ()",
    # weights [S]: of an active token, per sequence. active: bool, the shape of the mask; empty if
    # it would equal the mask (mask is bool and token_ids is None).
    "sequence_weights": (
        "(Tensor mask, Tensor? token_ids, int ignore_index, Tensor? cu_seqlens, "
        f"{declared(AggregationArguments)}) -> (Tensor weights, Tensor active)"
    ),
    "logits_policy_loss_fwd": (
        f"(Tensor logits, {_ROWS}, {_LOSS}) -> "
        "(Tensor logprobs, Tensor entropy, Tensor grad_logits)"
    ),
    "logits_policy_loss_fwd_": (
        f"(Tensor(a!) logits, {_ROWS}, {_LOSS}, bool narrow) -> (Tensor logprobs, Tensor entropy)"
    ),
    # slope = dL/dlogprobs, entropy_slope = dL/dentropy (empty if entropy_coef is 0)
    "policy_loss_fwd": (
        f"(Tensor logprobs, Tensor? entropy, Tensor mask, {_LOSS}) -> "
        "(Tensor loss, Tensor slope, Tensor entropy_slope, Tensor metrics)"
    ),
    "gae_fwd": (
        "(Tensor rewards, Tensor values, Tensor? mask, Tensor? terminated, Tensor? truncated, "
        "Tensor? bootstrap_values, Tensor? cu_seqlens, float gamma, float lam) -> "
        "(Tensor advantages, Tensor returns)"
    ),
    "group_advantages_fwd": (
        "(Tensor rewards, Tensor? group_ids, int group_size, int baseline, int scale, "
        "float correction, float eps, int singleton) -> "
        "(Tensor advantages, Tensor mean, Tensor std, Tensor informative)"
    ),
    # gradient *= factor (one element), without memory traffic if the factor is 1.
    "scale_": "(Tensor(a!) gradient, Tensor factor) -> ()",
    # The ids [C, K] are those of rows of a matrix; one below 0 stands for no row.
    # out[c, k] += states[c] . matrix[ids[c, k]]
    "gathered_dots_": "(Tensor(a!) out, Tensor states, Tensor matrix, Tensor ids) -> ()",
    # out[c] += sum_k factors[c, k] matrix[ids[c, k]]
    "gathered_sums_": "(Tensor(a!) out, Tensor factors, Tensor matrix, Tensor ids) -> ()",
    # out[i] += the sum of factors[c, k] states[c] over ids[c, k] = i
    "scattered_sums_": "(Tensor(a!) out, Tensor factors, Tensor states, Tensor ids) -> ()",
    # The instruction set of the CPU kernels: avx512, avx2 or plain.
    "cpu_capability": "() -> str",
    # Whether the CPU multiplies bfloat16 matrices on AMX tiles, which mixed_matmul_ needs.
    "has_matrix_tiles": "() -> bool",
    # Request huge pages for a new CPU tensor; call it before the first write.
    "huge_pages_": "(Tensor(a!) tensor) -> ()",
    # out = a b, or out += a b, summed in float32. b is bfloat16; a is bfloat16, or float32 and
    # split into the sum of two bfloat16.
    "mixed_matmul_": "(Tensor(a!) out, Tensor a, Tensor b, bool accumulate) -> ()",
    # For tests: the formulas of csrc/objectives.h, elementwise in float64.
    "objective_eval": (
        "(Tensor logprobs, Tensor log_ratio, Tensor advantages, Tensor ref_minus_logprob, "
        f"{declared(ObjectiveArguments)}) -> "
        "(Tensor loss, Tensor slope, Tensor clip, Tensor kl, Tensor kl_slope)"
    ),
}

#: The namespace of each compiled backend. Operators in `_ONLY_ONCE` are registered only in the
#: first one.
NAMESPACES = {"cpu": "fastrl", "triton": "fastrl_triton", "cuda": "fastrl_cuda"}
_ONLY_ONCE = ("cpu_", "has_", "huge_", "mixed_", "objective_eval")
#: Operators that the CPU backend does not have.
ONLY_ON_GPUS = ("scale_",)
#: Operators that the CUDA backend takes from Triton on a GPU, and from the CPU backend elsewhere.
NOT_IN_CUDA = ("gathered_", "scattered_", "divergence_")


def operators(backend: str) -> Any:
    """Return the namespace that holds a compiled backend's operators."""
    return getattr(torch.ops, NAMESPACES[backend])


def called(operator: Callable[..., Any], *arguments: object) -> Any:
    """Call an operator that checks the values of tensors.

    Raises:
        ValueError: the operator found a wrong value; the message is its own.
    """
    if torch.compiler.is_compiling():
        return operator(*arguments)
    try:
        return operator(*arguments)
    except RuntimeError as error:
        _, marked, text = str(error).partition("ValueError: ")
        if not marked:
            raise
        raise ValueError(text) from None


def qualified_names(name: str) -> list[str]:
    """Return an operator's name in each namespace that has it."""
    lacking = "cpu" if name in ONLY_ON_GPUS else "cuda" if name.startswith(NOT_IN_CUDA) else None
    names = [f"{space}::{name}" for backend, space in NAMESPACES.items() if backend != lacking]
    return names[:1] if name.startswith(_ONLY_ONCE) else names


#: The names of all operators.
OPERATORS = tuple(_SCHEMAS)

for _name, _schema in _SCHEMAS.items():
    for _qualified_name in qualified_names(_name):
        define(_qualified_name, _schema)


def arithmetic_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype of logits, sums and gradients: float32, or float64 if an input is."""
    is_double = torch.float64 in (hidden.dtype, weight.dtype)
    return torch.float64 if is_double else torch.float32


def stored_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype of a gradient until the backward: not float16, where it might underflow."""
    return torch.float32 if parameter.dtype == torch.float16 else parameter.dtype

"""Budgets of the kernels that compare rows of logits with a teacher's, at a vocabulary of 151936.

They are bound by their instructions: two probabilities and a quotient of a pair of logits, and for
the Jensen-Shannon divergence a logarithm of the mixture.
"""

from __future__ import annotations

from budgets.target import Target
from fastrl.triton.vocabulary import divergence as d
from fastrl.triton.vocabulary.rows import Specialization

#: KIND -> name, instructions and special functions of a pair of logits, forward and backward
KINDS = {
    0: ("forward_kl", (58, 66), 3.2),
    1: ("reverse_kl", (58, 66), 3.2),
    2: ("jensen_shannon", (109, 116), 4.2),
}
_STATISTICS = ("row_max", "log_sum", "teacher_row_max", "teacher_log_sum")
_SAVED = ("entropy", "slope_mean", "grad_divergence")


def targets() -> list[Target]:
    """Return what is compiled ahead of time."""
    found = []
    for kind, (name, (forward, backward), mufu) in KINDS.items():
        found += [
            _target(f"{name}_fwd", kind, "bf16", None, forward, mufu),
            _target(f"{name}_bwd", kind, "bf16", "bf16", backward, mufu),
            # of a chunk: float32 logits, whose gradient is bfloat16 in the half of each row
            _target(f"{name}_bwd_narrow", kind, "fp32", "bf16", backward, mufu),
        ]
    return found


def _target(
    name: str, kind: int, dtype: str, grad: str | None, instructions: float, mufu: float
) -> Target:
    kernel = d.divergence_bwd_kernel if grad else d.divergence_fwd_kernel
    spec = Specialization(
        lanes=d.MOST_LANES,
        width=0,
        aligned=True,
        edges=False,
        together=False,
        softcap=False,
        entropy=False,
        squares=False,
    )
    types = {
        "logits": f"*{dtype}", "teacher_logits": f"*{dtype}", "token_ids": "*i64", "mask": "*i1",
        "ignore_index": "i64", "scale": "fp32", "squash": "fp32", "length": "i32",
        "stride_b": "i64", "stride_t": "i64", "vocabulary": "i32", "teacher_scale": "fp32",
        "teacher_squash": "fp32", "teacher_stride_b": "i64", "teacher_stride_t": "i64",
        "beta": "fp32", **dict.fromkeys(_STATISTICS, "*fp32"),
    }  # fmt: skip
    if grad:
        types |= {"grad": f"*{grad}", "grad_stride_b": "i64", "grad_stride_t": "i64"}
        types |= dict.fromkeys((*_SAVED, "grad_logprobs"), "*fp32")
    else:
        types |= {"divergence": "*fp32", "slope_mean": "*fp32", "agrees": "*i1"}
    size = 2 if dtype == "bf16" else 4
    return Target(
        f"divergence_{name}",
        kernel,
        types,
        {"SPEC": spec, "TEACHER": spec, "KIND": kind},
        divisible=("logits", "teacher_logits", "grad", "vocabulary"),
        num_warps=d.MOST_LANES // 32,
        amd_num_warps=d.MOST_LANES // 64,
        element_bytes=size,
        bytes_per_element=2 * size + (2 if grad else 0),
        instructions=instructions,
        mufu=mufu,
        options={"enable_fp_fusion": False},
        block=d.MOST_LANES * d.COLUMNS.value,
    )

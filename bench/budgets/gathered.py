"""Budgets of the products with the rows of an LM head that tokens have kept.

An element is one of a row of the head, or of a hidden state. What is read and written beside them
(ids, a vector for each row) is less than a tenth. Most instructions of scattered sums are in
branches that store at the end of an id: counted for each of its terms, they make it look bound
by their number.
"""

from __future__ import annotations

from typing import Any

from budgets.target import Target
from fastrl.triton.vocabulary import gathered as g

_STRIDES = {"count": "i32", "width": "i32", "stride_out": "i64"}


def _target(name: str, kernel: Any, size: int, types: dict[str, str], **costs: Any) -> Target:
    types = {"out": "*fp32", "ids": "*i32", **_STRIDES, **types}
    divisible = tuple(argument for argument in types if argument != "count")
    return Target(
        f"{name}_{'fp32' if size == 4 else 'bf16'}",
        kernel,
        {argument: types[argument] for argument in kernel.arg_names if argument in types},
        {"IDS": g.IDS, "WIDTH": g.WIDTH}
        if "IDS" in kernel.arg_names
        else {"WIDTH": g.SCATTERED_WIDTH},
        divisible,
        element_bytes=size,
        bytes_per_element=size,
        options={"enable_fp_fusion": True},
        **costs,
    )


def targets() -> list[Target]:
    """Return what is compiled ahead of time."""
    found = []
    for size, dtype in ((2, "*bf16"), (4, "*fp32")):
        matrix = {"matrix": dtype, "stride_matrix": "i64"}
        states = {"states": "*fp32", "stride_states": "i64"}
        factors = {"factors": "*fp32", "stride_factors": "i64"}
        found += [
            _target(
                "gathered_dots", g.gathered_dots_kernel, size, {**matrix, **states},
                num_warps=g.WARPS, instructions=3, mufu=0.1,
            ),
            _target(
                "gathered_sums", g.gathered_sums_kernel, size, {**matrix, **factors},
                num_warps=g.WARPS, instructions=4, mufu=0.1, narrow=99,
            ),
        ]  # fmt: skip
        terms = {"order": "*i64", "heads": "*fp32", "tails": "*fp32", "stops": "*i64"}
        terms |= {"total": "i32", "block": "i32", **factors}
        states = {"states": dtype, "stride_states": "i64"}
        found.append(
            _target(
                "scattered_sums", g.scattered_sums_kernel, size, {**terms, **states},
                num_warps=1, instructions=27 if size == 2 else 12, mufu=0.1, narrow=99,
                block=g.SCATTERED_WIDTH,
            )
        )  # fmt: skip
    return [*found, _target("edge_sums", g.edge_sums_kernel, 4, terms, num_warps=1)]

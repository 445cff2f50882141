"""Kernels over groups: what is compiled. The launch is what they cost, so there is no budget."""

from __future__ import annotations

from budgets.target import Target
from fastrl.contract import BASELINES, SCALES
from fastrl.triton.groups import group_advantages
from fastrl.triton.groups.group_advantages import ANY_ORDER, CONSECUTIVE, SORTED


def targets() -> list[Target]:
    """Return what is compiled ahead of time."""
    types = {
        **dict.fromkeys(("rewards", "advantages", "means", "stds"), "*fp32"),
        "informatives": "*i1",
        **dict.fromkeys(("count", "group_size"), "i32"),
        **dict.fromkeys(("correction", "eps"), "fp32"),
    }
    by_id = {**types, "group_ids": "*i64"}
    of_batch = {"batch_std": "*fp32"}
    variants = [
        ("group_advantages", types, CONSECUTIVE, "group"),
        ("group_advantages_batch", {**types, **of_batch}, CONSECUTIVE, "batch"),
        ("group_advantages_ids", by_id, ANY_ORDER, "group"),
        ("group_advantages_ids_batch", {**by_id, **of_batch}, ANY_ORDER, "batch"),
        ("group_advantages_sorted", {**by_id, "order": "*i64"}, SORTED, "group"),
    ]
    return [
        Target(
            name=name,
            kernel=group_advantages.group_advantages_kernel,
            types=given,
            constants={
                "BASELINE": BASELINES.index("mean"),
                "SCALE": SCALES.index(scale),
                "RAW": False,
                "MODE": mode.value,
                "ROWS": group_advantages.ROWS,
                "COLUMNS": group_advantages.COLUMNS,
            },
            divisible=(*(name for name, type_ in given.items() if type_[0] == "*"), "count"),
            num_warps=4,
            element_bytes=4,
            bytes_per_element=17,
            options={"enable_fp_fusion": False},
        )
        for name, given, mode, scale in variants
    ] + [
        Target(
            name=f"batch_std_{mode.value}",
            kernel=group_advantages.batch_std_kernel,
            types={
                **dict.fromkeys(("rewards", "batch_std"), "*fp32"),
                **dict.fromkeys(("count", "group_size"), "i32"),
                "correction": "fp32",
                **ids,
            },
            constants={"COLUMNS": group_advantages.BATCH_COLUMNS, "MODE": mode.value},
            divisible=("batch_std",),
            num_warps=group_advantages.BATCH_WARPS,
            element_bytes=4,
            bytes_per_element=16,
            options={"enable_fp_fusion": False},
            spills={"3.6": 7} if mode == CONSECUTIVE else None,  # on sm_90, sm_100
        )
        for mode, ids in ((CONSECUTIVE, {}), (ANY_ORDER, {"group_ids": "*i64"}))
    ]

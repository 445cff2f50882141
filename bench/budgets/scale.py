"""Budgets of the kernel that scales a gradient in place."""

from __future__ import annotations

from budgets.target import Target
from fastrl.triton.scale import BYTES_PER_THREAD, EDGE, WARPS, scale_kernel


def targets() -> list[Target]:
    """Return what is compiled ahead of time."""
    return [
        Target(
            f"scale_{dtype}",
            scale_kernel,
            {
                "gradient": f"*{dtype}", "factor": "*fp32", "segments": "i32", "length": "i64",
                "stride": "i64", "blocks": "i32",
            },
            {"BLOCK": BYTES_PER_THREAD // size * WARPS * 32, "EDGE": EDGE},
            divisible=(),
            num_warps=WARPS,
            element_bytes=size,
            bytes_per_element=2 * size,
            instructions=5,
            mufu=0.1,
            options={"enable_fp_fusion": False},
            # the other goes over what lies before and behind the aligned blocks
            loops=1,
        )
        for dtype, size in (("fp32", 4), ("bf16", 2), ("fp16", 2))
    ]  # fmt: skip

"""Budgets of the kernel of GAE."""

from __future__ import annotations

from budgets.target import Target
from fastrl.triton.gae import gae
from fastrl.triton.gae.gae import APPLY, MAPS, NEXT_VALUE, ONE_NUMBER, ONLY, UNMET

_PLAIN = ("rewards", "value_estimates", "mask")
_ENDS = (*_PLAIN, "terminated", "truncated", "bootstrap_values")
_TYPES = {"mask": "*i1", "terminated": "*i1", "truncated": "*i1", "cu_seqlens": "*i32"}


def targets() -> list[Target]:
    """Return what is compiled ahead of time."""
    # name, inputs, launch, state, bytes per token, instructions, and accesses
    # under 16 bytes: flags of a byte each, the map of the chunk, the search for a token's sequence
    variants = [
        ("gae", _PLAIN, ONLY, ONE_NUMBER, 17, 85, 4),
        ("gae_maps", _PLAIN, MAPS, ONE_NUMBER, 9, 70, 6),
        ("gae_apply", _PLAIN, APPLY, ONE_NUMBER, 17, 96, 6),
        ("gae_ends_apply", _ENDS, APPLY, UNMET, 23, 255, 17),
        ("gae_packed_apply", (*_ENDS, "cu_seqlens"), APPLY, NEXT_VALUE, 23, 260, 65),
    ]
    return [
        Target(
            name=name,
            kernel=gae.gae_kernel,
            types={
                "inputs": gae.Inputs._make(
                    _TYPES.get(field, "*fp32") if field in inputs else None
                    for field in gae.Inputs._fields
                ),
                "out": gae.Outputs("*fp32", "*fp32"),
                **({} if phase is ONLY else {"maps": "*fp32"}),
                **dict.fromkeys(("tokens", "length", "sequences", "span"), "i32"),
                **dict.fromkeys(("gamma", "lam"), "fp32"),
            },
            constants={
                "SPEC": gae.Specialization(
                    state.value, phase.value, True, gae.block_of(state.value)
                ),
            },
            divisible=("inputs", "out", "maps"),
            num_warps=4,
            element_bytes=4,
            bytes_per_element=moved,
            instructions=instructions,
            block=gae.block_of(state.value),
            loops=0,
            narrow=narrow,
            options={"enable_fp_fusion": True},
            spills={"3.9": 2} if "cu_seqlens" in inputs else None,  # on sm_80
        )
        for name, inputs, phase, state, moved, instructions, narrow in variants
    ]

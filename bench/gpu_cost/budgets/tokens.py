"""Budgets of the kernels over tokens and groups, and of the one that scales a gradient in place."""

from __future__ import annotations

from typing import Any

from budgets.target import Target, fields
from fastrl.contract import (
    AGGREGATIONS,
    BASELINES,
    KL_GRADIENTS,
    LEVELS,
    SCALES,
    Coefficients,
    LossArguments,
)
from fastrl.triton import scale
from fastrl.triton.gae import gae
from fastrl.triton.groups import group_advantages
from fastrl.triton.groups.group_advantages import ANY_ORDER, CONSECUTIVE, SORTED
from fastrl.triton.loss_constants import BySequence
from fastrl.triton.objectives import KL_ESTIMATORS, SURROGATES, THROUGH_RATIO
from fastrl.triton.tokens import policy_loss, sequence_weights

COEFFICIENTS = Coefficients._make(["fp32"] * len(Coefficients._fields))
_PLAIN = ("advantages", "weights", "old_logprobs")
_FULL = (*_PLAIN, "kl_weights", "entropy_weights", "ref_logprobs")


def targets() -> list[Target]:
    """Return what is compiled ahead of time."""
    groups = _group_advantages()
    return [*_gae(), *groups, *_scale(), *_policy_losses(), *_sequence_weights()]


def by_sequence(given: tuple[str, ...], *, per_sequence: bool) -> BySequence:
    """Return which constants of a loss have one value per sequence, of these arguments."""
    return BySequence._make(per_sequence and name in given for name in BySequence._fields)


def _policy_losses() -> list[Target]:
    # narrow: flags are a byte each; a constant per sequence is loaded for every token
    return [
        _policy_loss(
            "policy_loss", _PLAIN, bytes_per_element=21, instructions=120, loops=1, narrow=1
        ),
        _policy_loss(
            "policy_loss_full", _FULL, surrogate="sapo", kl_gradient="bias-corrected", entropy=True,
            bytes_per_element=41, instructions=215, loops=1, narrow=1,
        ),
        _policy_loss(
            "policy_loss_per_sequence", _PLAIN, per_sequence=True,
            bytes_per_element=13, instructions=135, loops=1, narrow=9,
        ),
        # the whole code: the loop over blocks is no innermost loop, it has the search for sequences
        _policy_loss(
            "policy_loss_packed_per_sequence", (*_PLAIN, "cu_seqlens"), per_sequence=True,
            bytes_per_element=13, instructions=366, loops=0, narrow=40,
        ),
        _policy_loss(
            "policy_loss_sequence", _PLAIN, level="sequence",
            bytes_per_element=21, instructions=220, loops=3, narrow=1,
            spills={"3.6": 3},  # on sm_80
        ),
        _policy_loss(
            "policy_loss_packed", (*_FULL, "cu_seqlens"), per_sequence=True,
            surrogate="gmpo", level="sequence", entropy=True,
            bytes_per_element=25, instructions=320, loops=3, narrow=40,
            spills={"3.6": 3, "3.7": 15},  # on sm_100
        ),
    ]  # fmt: skip


def _policy_loss(
    name: str, given: tuple[str, ...], *, per_sequence: bool = False, surrogate: str = "ppo_clip",
    level: str = "token", kl_gradient: str = "exact", entropy: bool = False, **costs: Any,
) -> Target:  # fmt: skip
    pointers = ("logprobs", "mask", "loss", "c", "out", "partial_sums", "finished")
    return Target(
        name,
        policy_loss.policy_loss_kernel,
        {
            "loss": fields(LossArguments, *given),
            "c": COEFFICIENTS,
            "out": policy_loss.Outputs("*fp32", "*fp32", "*fp32" if entropy else None, "*fp32"),
            **({} if entropy else {"entropy": None}),
        },
        {
            "SURROGATE": SURROGATES[surrogate],
            "KL_ESTIMATOR": KL_ESTIMATORS["k3"],
            "KL_GRADIENT": KL_GRADIENTS.index(kl_gradient),
            "LEVEL": LEVELS.index(level),
            "KL_BY_TOKEN": True,
            "THROUGH_RATIO": surrogate in THROUGH_RATIO,
            "BY_SEQUENCE": by_sequence(given, per_sequence=per_sequence),
            "BLOCK": policy_loss.BLOCK,
            "ALIGNED": level == "token" or "cu_seqlens" not in given,
        },
        divisible=(*pointers, "entropy") if entropy else pointers,
        enable_fp_fusion=True,
        num_warps=policy_loss.NUM_WARPS,
        block=policy_loss.BLOCK,
        **costs,
    )


def _sequence_weights() -> list[Target]:
    absent = dict.fromkeys(("token_ids", "cu_seqlens", "normalizer_tensor"))
    return [
        Target(
            name=name,
            kernel=sequence_weights.sequence_weights_kernel,
            types=types,
            constants={
                "AGGREGATION": AGGREGATIONS.index(aggregation),
                "COUNT_EMPTY": False,
                "BLOCK": sequence_weights.BLOCK,
                "GROUPS": sequence_weights.COUNTS,
                "COLUMNS": 1,
            },
            divisible=("active", "counts", "finished", "weights"),
            num_warps=sequence_weights.NUM_WARPS,
            element_bytes=1,
            bytes_per_element=2,  # of kilobytes in all: the launch is what it costs
        )
        for name, types, aggregation in (
            ("sequence_weights", absent, "token-mean"),
            ("sequence_weights_packed", {}, "prompt-mean"),
        )
    ]


def _gae() -> list[Target]:
    plain = ("rewards", "value_estimates", "mask")
    ends = (*plain, "terminated", "truncated", "bootstrap_values")
    # name, inputs, launch, state, bytes per token, instructions, and accesses
    # under 16 bytes: flags of a byte each, the map of the chunk, the search for a token's sequence
    variants = [
        ("gae", plain, gae.ONLY, gae.ONE_NUMBER, 17, 85, 4),
        ("gae_maps", plain, gae.MAPS, gae.ONE_NUMBER, 9, 70, 6),
        ("gae_apply", plain, gae.APPLY, gae.ONE_NUMBER, 17, 96, 6),
        ("gae_ends_apply", ends, gae.APPLY, gae.UNMET, 23, 255, 17),
        ("gae_packed_apply", (*ends, "cu_seqlens"), gae.APPLY, gae.NEXT_VALUE, 23, 260, 65),
    ]
    return [
        Target(
            name=name,
            kernel=gae.gae_kernel,
            types={
                "inputs": fields(gae.Inputs, *inputs),
                "out": gae.Outputs("*fp32", "*fp32"),
                **({"maps": None} if phase is gae.ONLY else {}),
            },
            constants={
                "SPEC": gae.Specialization(
                    state.value, phase.value, True, gae.block_of(state.value)
                ),
            },
            divisible=("inputs", "out", "maps"),
            enable_fp_fusion=True,
            bytes_per_element=moved,
            instructions=instructions,
            spills={"3.9": 2} if "cu_seqlens" in inputs else {},  # on sm_80
            block=gae.block_of(state.value),
            loops=0,
            narrow=narrow,
        )
        for name, inputs, phase, state, moved, instructions, narrow in variants
    ]


def _group_advantages() -> list[Target]:
    """Return kernels without a budget: the launch is what they cost."""
    tensors = ("rewards", "advantages", "means", "stds", "informatives")
    # end of the name, order of the groups, what scales, further tensors
    variants = [
        ("", CONSECUTIVE, "group", ()),
        ("_batch", CONSECUTIVE, "batch", ("batch_std",)),
        ("_ids", ANY_ORDER, "group", ("group_ids",)),
        ("_ids_batch", ANY_ORDER, "batch", ("group_ids", "batch_std")),
        ("_sorted", SORTED, "group", ("group_ids", "order")),
    ]
    return [
        Target(
            name=f"group_advantages{suffix}",
            kernel=group_advantages.group_advantages_kernel,
            types={name: None for name in ("group_ids", "order", "batch_std") if name not in given},
            constants={
                "BASELINE": BASELINES.index("mean"),
                "SCALE": SCALES.index(by),
                "RAW": False,
                "MODE": mode.value,
                "ROWS": group_advantages.ROWS,
                "COLUMNS": group_advantages.COLUMNS,
            },
            divisible=(*tensors, *given, "count"),
            bytes_per_element=17,
        )
        for suffix, mode, by, given in variants
    ] + [
        Target(
            name=f"batch_std_{mode.value}",
            kernel=group_advantages.batch_std_kernel,
            types=types,
            constants={"COLUMNS": group_advantages.BATCH_COLUMNS, "MODE": mode.value},
            divisible=("batch_std",),
            num_warps=group_advantages.BATCH_WARPS,
            bytes_per_element=16,
            spills=spills,
        )
        for mode, types, spills in (
            (CONSECUTIVE, {"group_ids": None}, {"3.6": 7}),  # on sm_90, sm_100
            (ANY_ORDER, {}, {}),
        )
    ]


def _scale() -> list[Target]:
    return [
        Target(
            f"scale_{dtype}",
            scale.scale_kernel,
            {"gradient": f"*{dtype}", "length": "i64"},
            {"BLOCK": scale.BYTES_PER_THREAD // size * scale.WARPS * 32, "EDGE": scale.EDGE},
            num_warps=scale.WARPS,
            element_bytes=size,
            bytes_per_element=2 * size,
            instructions=5,
            mufu=0.1,
            loops=1,  # the other goes over what lies before and behind the aligned blocks
        )
        for dtype, size in (("fp32", 4), ("bf16", 2), ("fp16", 2))
    ]

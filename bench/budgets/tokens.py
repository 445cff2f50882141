"""Budgets of the kernels over tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

from budgets.losses import COEFFICIENTS, PER_SEQUENCE, PER_TOKEN, loss_types
from budgets.target import Target
from fastrl.contract import AGGREGATIONS, KL_GRADIENTS, LEVELS, LossArguments
from fastrl.triton.loss_constants import BySequence
from fastrl.triton.objectives import KL_ESTIMATORS, SURROGATES, THROUGH_RATIO
from fastrl.triton.tokens import policy_loss, sequence_weights

_PLAIN = ("advantages", "weights", "old_logprobs")
_FULL = (*_PLAIN, "kl_weights", "entropy_weights", "ref_logprobs")


class Loss(NamedTuple):
    """What a compilation of the policy loss is for, and what it may cost."""

    name: str
    loss: LossArguments
    by_sequence: BySequence
    bytes_per_token: float
    instructions: float
    loops: int  # that stream
    narrow: int  # flags are a byte each; a constant per sequence is loaded for every token
    surrogate: str = "ppo_clip"
    level: str = "token"
    kl_gradient: str = "exact"
    entropy: bool = False


LOSSES = (
    Loss("policy_loss", loss_types(*_PLAIN), PER_TOKEN, 21, 120, 1, 1),
    Loss(
        "policy_loss_full", loss_types(*_FULL), PER_TOKEN, 41, 215, 1, 1,
        surrogate="sapo", kl_gradient="bias-corrected", entropy=True,
    ),
    Loss("policy_loss_per_sequence", loss_types(*_PLAIN), PER_SEQUENCE, 13, 135, 1, 9),
    # the whole code: the loop over blocks is no innermost loop, it has the search for sequences
    Loss(
        "policy_loss_packed_per_sequence", loss_types(*_PLAIN, "cu_seqlens"), PER_SEQUENCE,
        13, 366, 0, 40,
    ),
    Loss(
        "policy_loss_sequence", loss_types(*_PLAIN), PER_TOKEN, 21, 220, 3, 1, level="sequence",
    ),
    Loss(
        "policy_loss_packed", loss_types(*_FULL, "cu_seqlens"), PER_SEQUENCE, 25, 320, 3, 40,
        surrogate="gmpo", level="sequence", entropy=True,
    ),
)  # fmt: skip

_SPILLS = {
    "policy_loss_sequence": {"3.6": 3},  # on sm_80
    "policy_loss_packed": {"3.6": 3, "3.7": 15},  # on sm_100
}


def targets() -> list[Target]:
    """Return what is compiled ahead of time."""
    return [*map(_policy_loss, LOSSES), *_sequence_weights()]


def _policy_loss(of: Loss) -> Target:
    types: dict[str, Any] = {
        "logprobs": "*fp32",
        "mask": "*i1",
        "loss": of.loss,
        "c": COEFFICIENTS,
        "out": policy_loss.Outputs("*fp32", "*fp32", "*fp32" if of.entropy else None, "*fp32"),
        "partial_sums": "*fp32",
        "finished": "*i32",
        **dict.fromkeys(("length", "sequences", "tokens", "span"), "i32"),
    }
    if of.entropy:
        types["entropy"] = "*fp32"
    given = zip(BySequence._fields, of.by_sequence, strict=True)
    pointers = (name for name, type_ in types.items() if not str(type_).startswith("i"))
    return Target(
        name=of.name,
        kernel=policy_loss.policy_loss_kernel,
        types=types,
        constants={
            "SURROGATE": SURROGATES[of.surrogate],
            "KL_ESTIMATOR": KL_ESTIMATORS["k3"],
            "KL_GRADIENT": KL_GRADIENTS.index(of.kl_gradient),
            "LEVEL": LEVELS.index(of.level),
            "THROUGH_RATIO": of.surrogate in THROUGH_RATIO,
            "BY_SEQUENCE": BySequence(
                **{name: yes and getattr(of.loss, name) is not None for name, yes in given}
            ),
            "BLOCK": policy_loss.BLOCK,
            "ALIGNED": of.level == "token" or of.loss.cu_seqlens is None,
        },
        divisible=tuple(pointers),
        num_warps=policy_loss.NUM_WARPS,
        element_bytes=4,
        bytes_per_element=of.bytes_per_token,
        instructions=of.instructions,
        block=policy_loss.BLOCK,
        loops=of.loops,
        narrow=of.narrow,
        options={"enable_fp_fusion": True},
        spills=_SPILLS.get(of.name),
    )


def _sequence_weights() -> list[Target]:
    types = {
        **dict.fromkeys(("mask", "active"), "*i1"),
        **dict.fromkeys(("counts", "finished"), "*i32"),
        **dict.fromkeys(("length", "groups", "group_size", "splits"), "i32"),
        **dict.fromkeys(("normalizer", "length_norm"), "fp32"),
        "ignore_index": "i64",
        "weights": "*fp32",
    }
    packed = {**types, "token_ids": "*i64", "cu_seqlens": "*i32", "normalizer_tensor": "*fp32"}
    variants = [
        ("sequence_weights", types, "token-mean"),
        ("sequence_weights_packed", packed, "prompt-mean"),
    ]
    return [
        Target(
            name=name,
            kernel=sequence_weights.sequence_weights_kernel,
            types=given,
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
            options={"enable_fp_fusion": False},
        )
        for name, given, aggregation in variants
    ]

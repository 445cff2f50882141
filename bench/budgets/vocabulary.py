"""Budgets of the kernels over logits, at a vocabulary of 151936."""

from __future__ import annotations

from typing import Any, NamedTuple

from budgets.losses import COEFFICIENTS, PER_SEQUENCE, PER_TOKEN, loss_types
from budgets.target import Target
from fastrl.contract import FLAGS, KL_GRADIENTS, RowStats, SavedStats
from fastrl.triton.objectives import KL_ESTIMATORS, SURROGATES
from fastrl.triton.vocabulary import logits_policy_loss, token_stats
from fastrl.triton.vocabulary.rows import COLUMNS_PER_LANE, MOST_LANES, Specialization

_BITS = {"bf16": 16, "fp16": 16, "fp32": 32}


class Rows(NamedTuple):
    """What else than a model's plain bf16 logits is compiled ahead of time."""

    dtype: str
    softcap: bool = False
    per_row: bool = False
    grad: str | None = None  # of the gradient, where it is another
    aligned: bool = True  # rows at multiples of 16 bytes
    edges: bool = False  # rows that end elsewhere
    together: bool = True  # the gradient's rows begin like those of the logits


#: What rows that are not aligned may cost, of what aligned ones take: 8.4, 7 and 15.4 instructions
#: per logit forward, backward and in one pass. They read words of 4 bytes, five for 16.
UNALIGNED = 1.3
WORDS = 20

#: By the end of the target's name.
ROWS = {
    "": Rows("bf16"),
    "_fp32": Rows("fp32"),
    "_fp16_per_row": Rows("fp16", per_row=True),
    "_softcap_per_row": Rows("bf16", softcap=True, per_row=True),
    "_padded": Rows("bf16", edges=True),
    "_unaligned": Rows("bf16", aligned=False, edges=True),
    "_unaligned_fp16": Rows("fp16", aligned=False, edges=True),
    "_unaligned_apart": Rows("bf16", aligned=False, edges=True, together=False),
}
#: What the one-pass kernel spills on sm_80, in no loop: end of its name -> Triton -> spills.
_ONE_PASS_SPILLS = {"_narrow": {"3.6": 2, "3.7": 2}}
#: float32 logits of a chunk, whose gradient is bfloat16 in the second half of each row.
NARROW = Rows("fp32", grad="bf16")


def targets() -> list[Target]:
    """Return what is compiled ahead of time."""
    return [*_token_stats(), *_logits_policy_loss()]


def _token_stats() -> list[Target]:
    forward, backward = token_stats.token_stats_fwd_kernel, token_stats.token_stats_bwd_kernel
    out = RowStats._make("*i1" if name in FLAGS else "*fp32" for name in RowStats._fields)
    saved = dict.fromkeys(SavedStats._fields, "*fp32")
    only_logprobs = {n: t for n, t in saved.items() if n not in ("grad_entropy", "grad_logsumexp")}
    found = [
        _target(
            "token_logprobs_fwd", forward, ROWS[""], {"out": out}, entropy=False,
            bytes_per_element=2, instructions=9, mufu=1.2,
        ),
        _target(
            "token_logprobs_bwd", backward, ROWS[""], only_logprobs, entropy=False,
            bytes_per_element=4, instructions=7, mufu=1.2,
        ),
        _target(
            "token_stats_bwd_narrow", backward, NARROW, saved,
            bytes_per_element=6, instructions=7, mufu=1.2,
        ),
    ]  # fmt: skip
    for suffix, rows in ROWS.items():
        size, capped = _BITS[rows.dtype] // 8, rows.softcap
        found += [
            _target(
                f"token_stats_fwd{suffix}", forward, rows, {"out": out},
                bytes_per_element=size,
                instructions=18 if capped else 9 if rows.aligned else UNALIGNED * 8.5,
                mufu=3.4 if capped else 1.2,
            ),
            _target(
                f"token_stats_bwd{suffix}", backward, rows, saved,
                bytes_per_element=2 * size,
                instructions=18.5 if capped else UNALIGNED * 7 if not rows.aligned
                else 8 if rows.dtype == "fp16" else 7,
                mufu=3.4 if capped else 1.2,
            ),
        ]  # fmt: skip
    return found


def _logits_policy_loss() -> list[Target]:
    per_token = ("advantages", "weights", "old_logprobs", "ref_logprobs")
    every = (*per_token, "kl_weights", "entropy_weights", "policy_weights", "cu_seqlens")
    # name, rows, arguments of the loss, constants per sequence, terms of KL and entropy
    variants = [
        ("_plain", ROWS[""], per_token, PER_TOKEN, False),
        *((suffix, rows, per_token, PER_TOKEN, True) for suffix, rows in ROWS.items()),
        ("_per_sequence", ROWS[""], per_token, PER_SEQUENCE, True),
        ("_packed", ROWS[""], every, PER_SEQUENCE, True),
        ("_narrow", NARROW, per_token, PER_TOKEN, True),
    ]
    found = []
    for suffix, rows, names, by_sequence, regularized in variants:
        loss = loss_types(*names)
        given = zip(by_sequence._fields, by_sequence, strict=True)
        target = _target(
            f"logits_policy_loss{suffix}",
            logits_policy_loss.logits_policy_loss_kernel,
            rows,
            {
                "loss": loss,
                "c": COEFFICIENTS,
                "sequences": "i32",
                **dict.fromkeys(("logprobs", "entropies"), "*fp32"),
            },
            bytes_per_element=(_BITS[rows.dtype] + _BITS[rows.grad or rows.dtype]) // 8,
            instructions=36 if rows.softcap else 16.5 if rows.aligned else UNALIGNED * 15.4,
            mufu=6.4 if rows.softcap else 2.2,
            spills=_ONE_PASS_SPILLS.get(suffix),
            # the search for the sequence of a row does not stream
            loops=3 if "cu_seqlens" in names else None,
            constants={
                "SURROGATE": SURROGATES["ppo_clip"],
                "KL_ESTIMATOR": KL_ESTIMATORS["k3"] if regularized else None,
                "KL_GRADIENT": KL_GRADIENTS.index("exact"),
                "BY_SEQUENCE": by_sequence._replace(
                    **{name: answer and name in names for name, answer in given}
                ),
            },
        )
        width = 128 // _BITS[rows.grad or rows.dtype]
        spec = target.constants["SPEC"]._replace(entropy=regularized, width=width)
        found.append(target._replace(constants=target.constants | {"GRADIENT_SPEC": spec}))
    return found


def _target(
    name: str, kernel: Any, of: Rows, types: dict[str, Any], *, entropy: bool = True,
    constants: dict[str, Any] | None = None, **others: Any,
) -> Target:  # fmt: skip
    """Return a target with the types of `row_arguments` and the constants of `launch_options`."""
    narrow_spec = kernel is token_stats.token_stats_bwd_kernel and of.grad
    width = 128 // _BITS[of.grad if narrow_spec else of.dtype]
    spec = Specialization(
        lanes=MOST_LANES,
        width=width,
        aligned=of.aligned,
        edges=of.edges,
        together=of.together,
        softcap=of.softcap,
        entropy=entropy,
        squares=False,
    )
    rows = {
        "logits": f"*{of.dtype}", "token_ids": "*i64", "mask": "*i1", "ignore_index": "i64",
        "scale": "fp32", "squash": "fp32", "length": "i32", "stride_b": "i64", "stride_t": "i64",
        "vocabulary": "i32",
    }  # fmt: skip
    if of.per_row:
        rows["temperatures"] = "*fp32"
    if "grad" in kernel.arg_names:
        rows |= {"grad": f"*{of.grad or of.dtype}", "grad_stride_b": "i64", "grad_stride_t": "i64"}
        rows["splits"] = "i32"
    return Target(
        name,
        kernel,
        rows | types,
        {"SPEC": spec, **(constants or {})},
        divisible=("logits", "grad", *(() if of.edges else ("vocabulary",))) if of.aligned else (),
        num_warps=MOST_LANES // 32,
        block=None if of.aligned else MOST_LANES * COLUMNS_PER_LANE.value,
        amd_num_warps=MOST_LANES // 64,
        element_bytes=_BITS[of.dtype] // 8,
        options={"enable_fp_fusion": False},
        narrow=0 if of.aligned else WORDS,
        narrowest=4,
        **others,
    )

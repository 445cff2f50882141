"""Budgets of the kernels over logits, at a vocabulary of 151936, and over rows of an LM head."""

from __future__ import annotations

from typing import Any, NamedTuple

from budgets.target import Target, fields
from budgets.tokens import COEFFICIENTS, by_sequence
from fastrl.contract import KL_GRADIENTS, LossArguments, RowStats
from fastrl.triton.objectives import KL_ESTIMATORS, SURROGATES
from fastrl.triton.vocabulary import divergence, gathered, logits_policy_loss, token_stats
from fastrl.triton.vocabulary.rows import COLUMNS_PER_LANE, MOST_LANES, Specialization

_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


class Rows(NamedTuple):
    """What else than a model's plain bf16 logits is compiled ahead of time."""

    dtype: str
    softcap: bool = False
    per_row: bool = False
    grad: str | None = None  # of the gradient, where it is another
    aligned: bool = True  # rows at multiples of 16 bytes
    edges: bool = False  # rows that end elsewhere
    together: bool = True  # the gradient's rows begin like those of the logits

    def specialization(self, dtype: str | None = None, *, entropy: bool = True) -> Specialization:
        """Return the constants of `launch_options`, for logits or a gradient of a dtype."""
        return Specialization(
            lanes=MOST_LANES,
            width=16 // _BYTES[dtype or self.dtype],
            aligned=self.aligned,
            edges=self.edges,
            together=self.together,
            softcap=self.softcap,
            entropy=entropy,
            squares=False,
        )


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
#: float32 logits of a chunk, whose gradient is bfloat16 in the second half of each row.
NARROW = Rows("fp32", grad="bf16")
#: Statistics that have no slope where only log-probabilities have one.
_OF_LOGPROBS = dict.fromkeys(("grad_entropy", "grad_logsumexp"))


def targets() -> list[Target]:
    """Return what is compiled ahead of time."""
    return [*_divergence(), *_gathered(), *_token_stats(), *_logits_policy_loss()]


def _rows(
    name: str, kernel: Any, of: Rows, spec: Specialization, types: dict[str, Any] | None = None,
    constants: dict[str, Any] | None = None, **costs: Any,
) -> Target:  # fmt: skip
    """Return a target with the types of `row_arguments`."""
    grad = of.grad or of.dtype
    rows = {"logits": of.dtype, "teacher_logits": of.dtype, "grad": grad}
    rows = {name: dtype for name, dtype in rows.items() if name in kernel.arg_names}
    absent = {"teacher_temperatures", "partial_sums", "of_tokens"} & {*kernel.arg_names}
    absent |= set() if of.per_row else {"temperatures"}
    return Target(
        name,
        kernel,
        {name: f"*{dtype}" for name, dtype in rows.items()} | dict.fromkeys(absent) | (types or {}),
        {"SPEC": spec, **(constants or {})},
        divisible=(*rows, *(() if of.edges else ("vocabulary",))) if of.aligned else (),
        num_warps=spec.lanes // 32,
        amd_num_warps=spec.lanes // 64,
        element_bytes=_BYTES[of.dtype],
        bytes_per_element=sum(_BYTES[dtype] for dtype in rows.values()),
        narrow=0 if of.aligned else WORDS,
        narrowest=4,
        **({} if of.aligned else {"block": MOST_LANES * COLUMNS_PER_LANE.value}),
        **costs,
    )


def _token_stats() -> list[Target]:
    forward, backward = token_stats.token_stats_fwd_kernel, token_stats.token_stats_bwd_kernel
    out = {"out": fields(RowStats, *RowStats._fields)}
    plain, narrow = ROWS[""], NARROW.specialization(NARROW.grad)
    short = plain.specialization(entropy=False)
    found = [
        _rows("token_logprobs_fwd", forward, plain, short, out, instructions=9.2, mufu=1.2),
        _rows("token_logprobs_bwd", backward, plain, short, _OF_LOGPROBS, instructions=7, mufu=1.2),
        _rows("token_stats_bwd_narrow", backward, NARROW, narrow, instructions=7, mufu=1.2),
    ]
    for suffix, rows in ROWS.items():
        capped, spec = rows.softcap, rows.specialization()
        found += [
            _rows(
                f"token_stats_fwd{suffix}", forward, rows, spec, out,
                instructions=18 if capped else 9.2 if rows.aligned else UNALIGNED * 8.7,
                mufu=3.4 if capped else 1.2,
            ),
            _rows(
                f"token_stats_bwd{suffix}", backward, rows, spec,
                instructions=18.5 if capped else UNALIGNED * 7 if not rows.aligned
                else 8 if rows.dtype == "fp16" else 7,
                mufu=3.4 if capped else 1.2,
            ),
        ]  # fmt: skip
    return found


def _logits_policy_loss() -> list[Target]:
    per_token = ("advantages", "weights", "old_logprobs", "ref_logprobs")
    every = (*per_token, "kl_weights", "entropy_weights", "policy_weights", "cu_seqlens")
    # end of the name, rows, arguments of the loss, constants per sequence, terms of KL and entropy
    variants = [
        ("_plain", ROWS[""], per_token, False, False),
        *((suffix, rows, per_token, False, True) for suffix, rows in ROWS.items()),
        ("_per_sequence", ROWS[""], per_token, True, True),
        ("_packed", ROWS[""], every, True, True),
        ("_narrow", NARROW, per_token, False, True),
    ]
    return [
        _rows(
            f"logits_policy_loss{suffix}",
            logits_policy_loss.logits_policy_loss_kernel,
            rows,
            rows.specialization(),
            {"loss": fields(LossArguments, *given), "c": COEFFICIENTS},
            {
                "SURROGATE": SURROGATES["ppo_clip"],
                "KL_ESTIMATOR": KL_ESTIMATORS["k3"] if regularized else None,
                "KL_GRADIENT": KL_GRADIENTS.index("exact"),
                "BY_SEQUENCE": by_sequence(given, per_sequence=per_sequence),
                "GRADIENT_SPEC": rows.specialization(rows.grad, entropy=regularized),
            },
            instructions=36 if rows.softcap else 16.5 if rows.aligned else UNALIGNED * 15.4,
            mufu=6.4 if rows.softcap else 2.2,
            spills={"3.6": 2, "3.7": 2} if rows is NARROW else {},  # on sm_80
            # the search for the sequence of a row does not stream
            loops=3 if "cu_seqlens" in given else None,
        )
        for suffix, rows, given, per_sequence, regularized in variants
    ]


def _divergence() -> list[Target]:
    """Return the kernels that compare rows of logits with a teacher's.

    They are bound by their instructions: two probabilities and a quotient of a pair of logits, and
    for the Jensen-Shannon divergence a logarithm of the mixture.
    """
    forward, backward = divergence.divergence_fwd_kernel, divergence.divergence_bwd_kernel
    # kind, name, instructions and special functions of a pair of logits, forward and backward
    variants = [
        (0, "forward_kl", 58, 66, 3.2),
        (1, "reverse_kl", 58, 66, 3.2),
        (2, "jensen_shannon", 109, 116, 4.2),
    ]
    found = []
    for kind, name, *instructions, mufu in variants:
        for suffix, kernel, rows, types, most in (
            ("fwd", forward, ROWS[""], {}, instructions[0]),
            ("bwd", backward, ROWS[""], _OF_LOGPROBS, instructions[1]),
            ("bwd_narrow", backward, NARROW, _OF_LOGPROBS, instructions[1]),
        ):
            spec = rows.specialization(entropy=False)
            spec = spec._replace(lanes=divergence.MOST_LANES, width=0, together=False)
            found.append(
                _rows(
                    f"divergence_{name}_{suffix}", kernel, rows, spec, types,
                    {"TEACHER": spec, "KIND": kind}, instructions=most, mufu=mufu,
                    block=divergence.MOST_LANES * divergence.COLUMNS.value,
                )
            )  # fmt: skip
    return found


def _gathered() -> list[Target]:
    """Return the products with the rows of an LM head that tokens have kept.

    An element is one of a row of the head, or of a hidden state. What is read and written beside
    them (ids, a vector for each row) is less than a tenth. Most instructions of scattered sums are
    in branches that store at the end of an id: counted for each of its terms, they make it look
    bound by their number.
    """
    found = []
    for dtype, terms in (("bf16", 27), ("fp32", 12)):
        found += [
            _of_head("gathered_dots", "matrix", dtype, instructions=3, mufu=0.1),
            _of_head("gathered_sums", "matrix", dtype, instructions=4, mufu=0.1, narrow=99),
            _of_head(
                "scattered_sums", "states", dtype, num_warps=1, instructions=terms, mufu=0.1,
                narrow=99, block=gathered.SCATTERED_WIDTH,
            ),
        ]  # fmt: skip
    return [*found, _of_head("edge_sums", "out", "fp32", num_warps=1)]


def _of_head(
    name: str, streamed: str, dtype: str, num_warps: int = gathered.WARPS, **costs: Any
) -> Target:
    kernel = getattr(gathered, f"{name}_kernel")
    constants = {"WIDTH": gathered.SCATTERED_WIDTH}
    if "IDS" in kernel.arg_names:
        constants = {"IDS": gathered.IDS, "WIDTH": gathered.WIDTH}
    return Target(
        f"{name}_{dtype}",
        kernel,
        {streamed: f"*{dtype}"},
        constants,
        divisible=tuple({*kernel.arg_names} - {*constants, "count"}),
        enable_fp_fusion=True,
        num_warps=num_warps,
        element_bytes=_BYTES[dtype],
        bytes_per_element=_BYTES[dtype],
        **costs,
    )

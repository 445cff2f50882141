"""The bytes that kernels move per element, against those that times are predicted from.

Not here are kernels without a prediction (groups, weights of sequences), and scattered sums, whose
states caches hold.
"""

import contextlib
import functools
import runpy
import sys
from collections import Counter

import pytest
import torch

import fastrl
from fastrl.contract import LEVELS, LossArguments
from fastrl.library import operators
from tests.gpu.rows import loss_of, make_rows, objective_of, rows_of, saved, token_stats
from tests.ops.inputs import cu_seqlens
from tests.ptx.cuda_operators import ROOT, device
from tests.ptx.machine import machine

pytestmark = [pytest.mark.kernels_alone, pytest.mark.slow]  # a CPU counts no sectors
V, T = 16_384, 4
#: as in production; the fixture `backend` has smaller blocks
BLOCK = 2048
#: Of the matrix of gathered products: rows per state, and columns.
K, H = 512, 1024
#: Predictions leave out what a row or a column has once. Gathered sums in bf16 have the most of it:
#: for each row an id and a factor of 4 bytes, for each column a float32 sum, read and written.
#: A hundredth more is for sectors that rows share.
TOLERANCE = 1.01 * (8 / H + 8 / K) / 2
ROWS = {}


def row(backend, target, run, *given, **options):
    """A target of the table, or two that run one after the other, and what runs it."""
    ROWS[f"{backend} {target}"] = backend, target.split(), functools.partial(run, *given, **options)


@functools.cache
def bench_targets():
    folder = ROOT / "bench" / "gpu_cost"
    sys.path.insert(0, str(folder))
    try:
        return runpy.run_path(str(folder / "targets.py"))
    finally:
        sys.path.pop(0)


def predicted(of, target):
    """Return bytes per element and a part of the kernel's name."""
    targets = bench_targets()
    for one in targets["CUDA"] if of == "cuda" else ():
        if one.name == target:
            return one.bytes_per_element, target
    for one in targets["triton_targets"]():
        if one.name == target:
            kernel = one.kernel.__name__
            return one.bytes_per_element, kernel.split("_")[0] if of == "cuda" else kernel
    raise KeyError(target)


# --- rows of logits


def of_rows(
    what,
    backend,
    dtype=torch.bfloat16,
    start=0,
    per_row=False,
    packed=None,
    clusters=True,
    **options,
):
    """The last three columns are left out, or the rows begin anywhere: `start` None, or 1."""
    _, logits, token_ids, _ = make_rows(V if start == 0 else V - 3, dtype, 0 if start == 0 else 3)
    mask = torch.ones(1, T, dtype=torch.bool)
    if start:
        memory = torch.zeros(logits.numel() + start, dtype=dtype)[start:]
        logits = memory.view(logits.shape).copy_(logits)
    logits.nan_to_num_()
    if per_row:
        options["temperatures"] = torch.ones(1, T)
    rows, space = rows_of(token_ids, mask, **options), operators(backend)
    loss, objective = loss_of(logits, token_ids, mask)
    narrow = what.endswith("narrow")
    before = contextlib.nullcontext() if clusters else device(8, 40)
    if what == "plain":
        objective = objective_of()
    if packed is not None:
        loss = loss._replace(advantages=torch.randn(len(packed) or 1))
        loss = loss._replace(cu_seqlens=cu_seqlens(packed) if packed else None)
    kept, grads = saved(token_stats("cpu", logits.float(), rows)), list(torch.randn(3, 1, T))
    if what == "token_logprobs":
        space.token_stats_fwd(logits, *rows, False, False)
    elif what == "token_stats":
        space.token_stats_fwd(logits, *rows, True, False)
    elif what == "of_logprobs":
        space.token_stats_bwd_(logits, *rows, *kept, grads[0], None, None, False)
    elif what == "backward apart":
        space.token_stats_bwd(logits, *rows, *kept, *grads)
    elif what.startswith("backward"):
        space.token_stats_bwd_(logits, *rows, *kept, *grads, narrow)
    elif what == "loss apart":
        space.logits_policy_loss_fwd(logits, *rows, *loss, *objective)
    else:
        with before:
            space.logits_policy_loss_fwd_(logits, *rows, *loss, *objective, narrow)
    return logits.numel()


SOFTCAP, FP16, FP32 = {"logit_softcap": 9.0}, {"dtype": torch.float16}, {"dtype": torch.float32}
VARIANTS = {
    "": {},
    "_fp32": FP32,
    "_fp16_per_row": {**FP16, "per_row": True},
    "_softcap_per_row": {**SOFTCAP, "per_row": True},
    "_padded": {"start": None},
    "_unaligned": {"start": 1},
    "_unaligned_fp16": {"start": 1, **FP16},
    "_unaligned_apart": {"start": 1},
}
for suffix, options in VARIANTS.items():
    apart = " apart" * (suffix == "_unaligned_apart")
    row("triton", f"token_stats_fwd{suffix}", of_rows, "token_stats", **options)
    row("triton", f"token_stats_bwd{suffix}", of_rows, f"backward{apart}", **options)
    row("triton", f"logits_policy_loss{suffix}", of_rows, f"loss{apart}", **options)
row("triton", "token_logprobs_fwd", of_rows, "token_logprobs")
row("triton", "token_logprobs_bwd", of_rows, "of_logprobs")
row("triton", "token_stats_bwd_narrow", of_rows, "backward narrow", **FP32)
row("triton", "logits_policy_loss_plain", of_rows, "plain")
row("triton", "logits_policy_loss_per_sequence", of_rows, "loss", packed=())
row("triton", "logits_policy_loss_packed", of_rows, "loss", packed=(3, 1))
row("triton", "logits_policy_loss_narrow", of_rows, "loss narrow", **FP32)
HALF, NARROW = "INS0_8BFloat16ELb", "ELi256ENS0_8BFloat16E"
for aligned, capped in ((1, 0), (1, 1), (0, 0), (0, 1)):
    options = {**(SOFTCAP if capped else {}), "start": 0 if aligned else 1}
    row("cuda", f"one_pass_cluster_kernel{HALF}{aligned}ELb{capped}EL", of_rows, "loss", **options)
for aligned in (1, 0):
    start = {"start": 0 if aligned else 1}
    row("cuda", f"token_stats_kernel{HALF}{aligned}ELb0EL", of_rows, "token_stats", **start)
    row("cuda", f"token_stats_backward_kernel{HALF}{aligned}ELb0EL", of_rows, "backward", **start)
    narrow, at = f"IfLb{aligned}ELb0{NARROW}", {**FP32, "start": 0 if aligned else None}
    row("cuda", f"one_pass_cluster_kernel{narrow}", of_rows, "loss narrow", **at)
row("cuda", f"token_stats_backward_kernelIfLb1ELb0{NARROW}", of_rows, "backward narrow", **FP32)
row(
    "cuda",
    f"one_pass_plain_kernelIfLb1ELb0{NARROW}",
    of_rows,
    "loss narrow",
    clusters=False,
    **FP32,
)


# --- rows of logits beside a teacher's


def of_divergence(beta, what, backend):
    dtype = torch.float32 if what == "narrow" else torch.bfloat16
    _, logits, token_ids, _ = make_rows(V, dtype)
    logits.nan_to_num_()
    rows = rows_of(token_ids, torch.ones(1, T, dtype=torch.bool))
    own, teacher = (saved(token_stats("cpu", logits.float(), rows)) for _ in range(2))
    space, pair = operators(backend), (logits, logits.clone(), *rows, None, 1.0, 1.0, 0.0)
    if what == "forward":
        space.divergence_fwd(*pair, *own[:2], *teacher[:2], beta)
    else:
        upstream = [torch.randn(1, T) for _ in range(3)]
        given = (*own, upstream[0], None, None, *teacher[:2], beta, *upstream[1:])
        space.divergence_bwd_(*pair, *given, what == "narrow")
    return logits.numel()


for beta, name in ((0.0, "forward_kl"), (1.0, "reverse_kl"), (0.5, "jensen_shannon")):
    row("triton", f"divergence_{name}_fwd", of_divergence, beta, "forward")
    row("triton", f"divergence_{name}_bwd", of_divergence, beta, "backward")
    row("triton", f"divergence_{name}_bwd_narrow", of_divergence, beta, "narrow")


# --- tokens


def of_gae(B, T, backend, ends=False, packed=False):
    rewards, values, bootstrap = torch.randn(3, B, T)
    flags = {name: torch.rand(B, T) < 0.1 for name in ("terminated", "truncated")}
    more = {**flags, "bootstrap_values": bootstrap} if ends else {}
    given = {"rewards": rewards, "values": values, "mask": torch.ones(B, T, dtype=torch.bool)}
    given = {name: x[0] if packed else x for name, x in (given | more).items()}
    more = {"cu_seqlens": cu_seqlens([T // 4, T - T // 4])} if packed else {}
    fastrl.gae(**given, **more, backend=backend)
    return rewards.numel()


row("triton", "gae", of_gae, 1, 64)
row("triton", "gae_maps gae_apply", of_gae, 4, 8192)  # one after the other
row("triton", "gae_ends_apply", of_gae, 4, 8192, ends=True)
row("triton", "gae_packed_apply", of_gae, 1, 32_768, ends=True, packed=True)
row("cuda", "gae", of_gae, 64, 512)


def of_loss(backend, full=False, by_sequence=False, packed=False, level="token", **options):
    B, T = (1, 32_768) if packed else (16, 2048)
    mask = torch.ones(B, T, dtype=torch.bool)
    logprobs, entropy, old, ref, *constants = torch.randn(9, B, T)
    if by_sequence:
        constants = torch.randn(5, 2 if packed else B)
    loss = LossArguments(
        advantages=constants[0],
        weights=constants[1].abs(),
        kl_weights=constants[2].abs() if full else None,
        entropy_weights=constants[3].abs() if full else None,
        policy_weights=None,
        old_logprobs=old,
        ref_logprobs=ref if full else None,
        cu_seqlens=cu_seqlens([10_000, T - 10_000]) if packed else None,
    )
    coefficients = {"kl_coef": 0.1, "entropy_coef": 0.1} if full else {}
    objective = objective_of(**options, **coefficients)._replace(level=LEVELS.index(level))
    operators(backend).policy_loss_fwd(logprobs, entropy if full else None, mask, *loss, *objective)
    return mask.numel()


GMPO = {"surrogate": "gmpo", "level": "sequence"}
row("triton", "policy_loss", of_loss)
row(
    "triton", "policy_loss_full", of_loss, full=True, surrogate="sapo", kl_gradient="bias-corrected"
)
row("triton", "policy_loss_per_sequence", of_loss, by_sequence=True)
row("triton", "policy_loss_packed_per_sequence", of_loss, by_sequence=True, packed=True)
row("triton", "policy_loss_sequence", of_loss, level="sequence")
row("triton", "policy_loss_packed", of_loss, full=True, by_sequence=True, packed=True, **GMPO)


def of_scale(dtype, backend):
    x = torch.randn(200_000).to(dtype)
    operators(backend).scale_(x, torch.tensor(0.5))
    return x.numel()


for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16"), (torch.float16, "fp16")):
    row("triton", f"scale_{name}", of_scale, dtype)
    row("cuda", f"scale_{name}", of_scale, dtype)


# --- some rows of a matrix


def of_gathered(what, dtype, backend):
    C = 2
    ids, matrix = torch.arange(C * K, dtype=torch.int32).view(C, K), torch.randn(C * K, H).to(dtype)
    factors, states, space = torch.randn(C, K), torch.randn(C, H), operators(backend)
    if what == "dots":
        space.gathered_dots_(torch.zeros(C, K), states, matrix, ids)
    else:
        space.gathered_sums_(torch.zeros(C, H), factors, matrix, ids)
    return C * K * H


for what in ("dots", "sums"):
    row("triton", f"gathered_{what}_bf16", of_gathered, what, torch.bfloat16)
    row("triton", f"gathered_{what}_fp32", of_gathered, what, torch.float32)


@pytest.mark.parametrize(
    ("backend", "name"), [(of, name) for name, (of, *_) in ROWS.items()], indirect=["backend"]
)
def test_predicted_bytes_are_moved(backend, monkeypatch, name):
    of, targets, run = ROWS[name]
    if of == "triton":
        monkeypatch.setattr("fastrl.triton.gae.gae.BLOCK", BLOCK)
    machine().counts.clear()
    elements = run(backend)
    every = [found for found, _ in machine().counts]
    for target, (kernel, counts) in zip(targets, [*machine().counts][-len(targets) :], strict=True):
        prediction, part = predicted(of, target)
        assert part in kernel
        assert len(every) <= 2  # GAE's maps and what applies them; all others are alone
        assert all(part in one for one in every)
        sectors = counts.different_sectors_read + counts.different_sectors_written
        moved = 32 * sectors / elements
        assert moved == pytest.approx(prediction, rel=TOLERANCE)


@pytest.mark.parametrize("backend", ["triton", "cuda"], indirect=True)
def test_instructions_are_counted_by_kind(backend):
    """An exponential of each logit, and some where sums of lanes, warps and splits are joined."""
    machine().counts.clear()
    elements = of_rows("token_stats", backend)
    kinds = sum((Counter(counts.by_kind) for _, counts in machine().counts), Counter())
    exponentials = 32 * sum(n for kind, n in kinds.items() if kind.startswith("ex2"))
    assert elements <= exponentials <= 2 * elements

"""The bytes that kernels move per element, against those that bench/budgets predicts times from."""

import functools
import runpy
import sys

import pytest
import torch

import fastrl
from fastrl.library import operators
from tests.gpu.rows import loss_of, make_rows, rows_of, saved, token_stats
from tests.ptx.cuda_operators import ROOT
from tests.ptx.machine import Counts, machine

pytestmark = [pytest.mark.kernels_alone, pytest.mark.slow]  # a CPU counts no sectors
V, T = 16_384, 4
#: of a row's own inputs and results, and of sectors that two rows share
TOLERANCE = 0.02


@functools.cache
def predicted():
    """Return bytes per element by name of a Triton target, or by a CUDA kernel."""
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        targets = runpy.run_path(str(ROOT / "bench" / "targets.py"))
    finally:
        sys.path.pop(0)
    of_triton = {one.name: one.bytes_per_element for one in targets["triton_targets"]()}
    return of_triton | {one.kernel: one.bytes_per_element for one in targets["CUDA"]}


def moved():
    """Return the bytes of all different sectors since the last call."""
    counts = machine().counts
    machine().counts = Counts()
    return 32 * (counts.different_sectors_read + counts.different_sectors_written)


def of_rows(what, dtype=torch.bfloat16, beside=0, **options):
    """Return how rows are run, and their elements; `beside` makes them begin anywhere."""

    def run(backend):
        _, logits, token_ids, _ = make_rows(V - beside, dtype, beside)
        logits, mask = torch.nan_to_num(logits), torch.ones(1, T, dtype=torch.bool)
        if beside:
            buffer = torch.zeros(logits.numel() + 1, dtype=dtype)[1:]
            logits = buffer.view(logits.shape).copy_(logits)
        rows, grads = rows_of(token_ids, mask, **options), [torch.randn(1, T) for _ in range(3)]
        narrow = what.endswith("narrow")
        space, kept = operators(backend), saved(token_stats("cpu", logits.float(), rows))
        loss = loss_of(logits, token_ids, mask)
        moved()
        if what == "token_stats":
            space.token_stats_fwd(logits, *rows, True, False)
        elif what.startswith("backward"):
            space.token_stats_bwd_(logits, *rows, *kept, *grads, narrow)
        else:
            space.logits_policy_loss_fwd_(logits, *rows, *loss[0], *loss[1], narrow)
        return logits.numel()

    return run


def of_scale(backend):
    x = torch.randn(200_000).bfloat16()
    moved()
    operators(backend).scale_(x, torch.tensor(0.5))
    return x.numel()


def of_gae(backend):
    rewards, values = torch.randn(2, 64, 512)
    mask = torch.ones(64, 512, dtype=torch.bool)
    moved()
    fastrl.gae(rewards, values, mask=mask, backend=backend)
    return rewards.numel()


LOSS, STATS, BACKWARD = (of_rows(what) for what in ("loss", "token_stats", "backward"))
LOSS_APART, STATS_APART, BACKWARD_APART = (
    of_rows(what, beside=3) for what in ("loss", "token_stats", "backward")
)
LOSS_NARROW, BACKWARD_NARROW = (
    of_rows(f"{what} narrow", torch.float32) for what in ("loss", "backward")
)
SOFTCAP, HALF = {"logit_softcap": 9.0}, "INS0_8BFloat16ELb"
ROWS = [
    ("cuda", f"one_pass_cluster_kernel{HALF}1ELb0EL", LOSS),
    ("cuda", f"one_pass_cluster_kernel{HALF}1ELb1EL", of_rows("loss", **SOFTCAP)),
    ("cuda", f"one_pass_cluster_kernel{HALF}0ELb0EL", LOSS_APART),
    ("cuda", "one_pass_cluster_kernelIfLb1ELb0ELi256ENS0_8BFloat16E", LOSS_NARROW),
    ("cuda", f"token_stats_kernel{HALF}1ELb0EL", STATS),
    ("cuda", f"token_stats_kernel{HALF}0ELb0EL", STATS_APART),
    ("cuda", f"token_stats_backward_kernel{HALF}1ELb0EL", BACKWARD),
    ("cuda", f"token_stats_backward_kernel{HALF}0ELb0EL", BACKWARD_APART),
    ("cuda", "token_stats_backward_kernelIfLb1ELb0ELi256ENS0_8BFloat16E", BACKWARD_NARROW),
    ("triton", "token_stats_fwd", STATS),
    ("triton", "token_stats_fwd_fp32", of_rows("token_stats", torch.float32)),
    ("triton", "token_stats_fwd_unaligned", STATS_APART),
    ("triton", "token_stats_bwd", BACKWARD),
    ("triton", "token_stats_bwd_fp32", of_rows("backward", torch.float32)),
    ("triton", "token_stats_bwd_unaligned", BACKWARD_APART),
    ("triton", "token_stats_bwd_narrow", BACKWARD_NARROW),
    ("triton", "logits_policy_loss", LOSS),
    ("triton", "logits_policy_loss_fp32", of_rows("loss", torch.float32)),
    ("triton", "logits_policy_loss_unaligned", LOSS_APART),
    ("triton", "logits_policy_loss_narrow", LOSS_NARROW),
    *((backend, "scale_bf16", of_scale) for backend in ("triton", "cuda")),
    ("triton", "gae_maps gae_apply", of_gae),  # long sequences: two kernels, one after the other
    ("cuda", "gae", of_gae),
]


@pytest.mark.parametrize(("of", "kernels", "run"), ROWS, ids=[" ".join(row[:2]) for row in ROWS])
def test_predicted_bytes_are_moved(backend, of, kernels, run):
    if of != backend:
        pytest.skip("a kernel of another backend")
    elements = run(backend)
    expected = sum(predicted()[kernel] for kernel in kernels.split())
    assert moved() / elements == pytest.approx(expected, rel=TOLERANCE)

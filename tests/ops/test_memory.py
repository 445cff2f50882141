"""Peak memory beyond inputs and gradients: a few percent from logits, one chunk from hidden."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastrl import native

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc"),
    pytest.mark.skipif(native.missing is not None, reason=str(native.missing)),
]
MEGA = 2**20
PRELUDE = """
import ctypes, json, sys, torch, fastrl
from pathlib import Path

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

def reset_peak():
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")
"""
FROM_LOGITS = """
def step(rows, vocabulary, dtype, entropy_coef, layout):
    objective = fastrl.Objective.preset("grpo", kl_coef=0.1, entropy_coef=entropy_coef)
    wide = torch.randn(rows // 8 + 1, 8, vocabulary, dtype=getattr(torch, dtype))
    logits = wide[:-1] if layout == "slice" else wide[:-1].clone()
    del wide
    logits.requires_grad_()
    per_token = torch.full(logits.shape[:2], -5.0)
    token_ids = torch.randint(vocabulary, per_token.shape)
    before = reset_peak()
    loss = fastrl.logits_policy_loss(
        logits, token_ids, per_token[:, 0], torch.ones_like(per_token),
        old_logprobs=per_token, ref_logprobs=per_token, objective=objective, backend="cpu",
    ).loss
    loss.backward()
    return status("VmHWM") - before - logits.grad.nbytes
"""
FROM_HIDDEN = """
def step(rows, vocabulary, dtype, width, objective):
    hidden, weight = (
        torch.randn(size, width, dtype=getattr(torch, dtype), requires_grad=True)
        for size in (rows, vocabulary)
    )
    per_token = torch.full((rows,), -5.0)
    token_ids = torch.randint(vocabulary, (rows,))
    before = reset_peak()
    fastrl.linear_policy_loss(
        hidden, weight, token_ids, per_token, torch.ones_like(per_token), old_logprobs=per_token,
        objective=objective, backend="cpu", cu_seqlens=torch.tensor([0, rows // 2, rows]),
    ).loss.backward()
    return status("VmHWM") - before
"""
PARTIAL_SUMS = """
def step(rows, columns, terms):
    a, b = torch.ones(rows, terms), torch.ones(terms, columns, dtype=torch.bfloat16)
    out = torch.zeros(rows, columns)
    before = reset_peak()
    torch.ops.fastrl.mixed_matmul_(out, a, b, False)
    assert bool((out == terms).all())
    return status("VmHWM") - before
"""


def measured(step, *cases):
    """The bytes that each case of a step takes in a separate process, after a small one."""
    code = f"{PRELUDE}{step}\nfor case in json.loads(sys.argv[1]):\n    print(step(*case))"
    small = [16, 64, *cases[0][2:]]
    # Every buffer from 1 MiB up is mapped alone and returned when freed: otherwise malloc raises
    # that limit as it runs, and the peak depends on which thread's arena a buffer falls into.
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps([small, *cases])],
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(MEGA)},
        capture_output=True,
        text=True,
        check=False,
    )
    if "clear_refs" in done.stderr:
        pytest.skip("this system does not let a process reset its high-water mark")
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.splitlines()[1:]]


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_from_logits_beyond_logits_and_gradient_at_most_two_percent(dtype, size):
    vocabulary = 65536
    rows = 2**27 // vocabulary // size
    hows = [*itertools.product((0.0, 0.01), ("contiguous", "slice"))]
    beyond = measured(FROM_LOGITS, *([rows, vocabulary, dtype, *how] for how in hows))
    most = 0.02 * rows * vocabulary * size
    assert max(beyond) <= most, dict(zip(hows, beyond, strict=True))


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_from_hidden_the_peak_is_flat_in_the_number_of_rows(dtype, size):
    width, vocabulary, few, many = 16, 32768, 1024, 5120
    cases = itertools.product((few, many), (vocabulary,), (dtype,), (width,), ("grpo", "gspo"))
    taken = measured(FROM_HIDDEN, *cases)
    explained = (many - few) * (width * size + 64)  # the gradient of hidden, per-token tensors
    parameters = vocabulary * width * (4 + size)  # summed in float32, returned in its dtype
    for short, long in zip(taken[:2], taken[2:], strict=True):
        assert long - short <= explained + 64 * MEGA, taken
        assert short <= 256 * MEGA + parameters + few * width * 8, taken


@pytest.mark.skipif(not native.has_matrix_tiles(), reason="no AMX tiles here")
def test_a_product_with_long_sums_takes_at_most_32_mega_of_partial_sums():
    (taken,) = measured(PARTIAL_SUMS, [1536, 5000, 16384])
    assert taken <= 40 * MEGA

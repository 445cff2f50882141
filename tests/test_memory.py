"""Peak memory of the loss from logits, measured in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fastrl import native

STATUS = Path("/proc/self/status")
pytestmark = [
    pytest.mark.skipif(not STATUS.exists(), reason="needs Linux's /proc"),
    pytest.mark.skipif(native.missing is not None, reason=str(native.missing)),
]

MEASURE = """
import ctypes, json, sys, torch, fastrl
from pathlib import Path

rows, vocabulary, dtype, entropy_coef, layout = json.loads(sys.argv[1])
dtype = getattr(torch, dtype)
objective = fastrl.Objective.preset("grpo", kl_coef=0.1, entropy_coef=entropy_coef)

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

def step(rows, vocabulary):
    wide = torch.randn(rows // 8 + 1, 8, vocabulary, dtype=dtype)
    logits = wide[:-1] if layout == "slice" else wide[:-1].clone()
    del wide
    logits.requires_grad_()
    per_token = torch.full(logits.shape[:2], -5.0)
    token_ids = torch.randint(vocabulary, per_token.shape)
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    loss = fastrl.logits_policy_loss(
        logits, token_ids, per_token[:, 0], torch.ones_like(per_token),
        old_logprobs=per_token, ref_logprobs=per_token, objective=objective, backend="cpu",
    ).loss
    loss.backward()
    return status("VmHWM") - before - logits.grad.nbytes, logits.nbytes

step(16, 64)
print(json.dumps(step(rows, vocabulary)))
"""


def peak(*case):
    """Bytes beyond logits and gradient, and bytes of the logits."""
    command = [sys.executable, "-c", MEASURE, json.dumps(case)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "clear_refs" in done.stderr:
        pytest.skip("this system does not let a process reset its high-water mark")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("entropy_coef", [0.0, 0.01])
@pytest.mark.parametrize("layout", ["contiguous", "slice"])
def test_beyond_logits_and_gradient_at_most_two_percent(dtype, entropy_coef, layout):
    rows = 512 if dtype == "float32" else 1024
    beyond, logits = peak(rows, 65536, dtype, entropy_coef, layout)
    assert beyond <= 0.02 * logits, f"{beyond} bytes beside {logits} bytes of logits"

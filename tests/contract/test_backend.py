"""The choice of backend: a named one is used or refused, `auto` picks the fastest that can."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fastrl
from fastrl import native
from fastrl.backend import resolve

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def restored_default():
    before = fastrl.get_backend()
    fastrl.set_backend("auto")
    yield
    fastrl.set_backend(before)


def test_auto_uses_the_kernels_if_they_can_do_the_call():
    fastest = "reference" if native.missing else "cpu"
    assert resolve("auto", CPU, torch.bfloat16) == fastest
    assert resolve("auto", CPU, torch.float64) == "reference"
    assert resolve("auto", torch.device("meta"), torch.float32) == "reference"


def test_the_default_can_be_set():
    fastrl.set_backend("reference")
    assert fastrl.get_backend() == "reference"
    assert resolve("auto", CPU, torch.float32) == "reference"


REASONS = {
    "triton": "(no GPU that torch can use|triton is not installed)",
    "cuda": "(built without CUDA|extension is not built|no GPU that torch can use)",
}


@pytest.mark.parametrize("name", REASONS)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_backend_that_is_not_usable_here_is_refused_with_the_reason(name):
    with pytest.raises(ValueError, match=f"backend '{name}' cannot .* {REASONS[name]}"):
        fastrl.token_logprobs(torch.zeros(1, 2), torch.tensor([0]), backend=name)
    with pytest.raises(ValueError, match=REASONS[name]):
        fastrl.set_backend(name)


def test_an_unknown_backend_names_the_valid_ones():
    with pytest.raises(ValueError, match=r"backend must be one of auto, reference.*got 'gpu'"):
        fastrl.gae(torch.zeros(1, 2), torch.zeros(1, 2), backend="gpu")


def test_float64_is_refused_by_the_kernels(compiled):
    with pytest.raises(ValueError, match=r"takes float32, bfloat16 and float16, not float64"):
        fastrl.token_logprobs(torch.zeros(1, 2).double(), torch.tensor([0]), backend="cpu")


def forms_of_the_policy_loss(**options):
    """The same call from log-probabilities, logits and hidden states."""
    ids, ones = torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2)
    rest = (torch.zeros(1), ones)
    return [
        lambda: fastrl.policy_loss(ones, *rest, **options),
        lambda: fastrl.logits_policy_loss(torch.zeros(1, 2, 3), ids, *rest, **options),
        lambda: fastrl.linear_policy_loss(
            ones[..., None], torch.zeros(3, 1), ids, *rest, **options
        ),
    ]


def negated(new, old, ref, a):
    return -new * a


@pytest.mark.parametrize("form", range(3))
def test_a_python_objective_is_refused_by_the_kernels(compiled, form):
    """In all three forms: a named backend does the call, or says why it cannot."""
    message = "backend 'cpu' cannot do this call: the objective is a Python function"
    with pytest.raises(ValueError, match=message):
        forms_of_the_policy_loss(objective=negated, backend="cpu")[form]()
    fastrl.set_backend("cpu")
    try:
        with pytest.raises(ValueError, match=message):
            forms_of_the_policy_loss(objective=negated)[form]()
    finally:
        fastrl.set_backend("auto")
    for backend in ("auto", "reference"):
        forms_of_the_policy_loss(objective=negated, backend=backend)[form]()


def fresh(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


def test_the_environment_chooses_the_default():
    done = fresh("import fastrl; print(fastrl.get_backend())", FASTRL_BACKEND="reference")
    assert done.stdout.strip() == "reference"


def test_a_wrong_environment_variable_is_an_error():
    done = fresh("import fastrl", FASTRL_BACKEND="fast")
    assert done.returncode != 0
    assert "FASTRL_BACKEND must be one of auto, reference, cpu, triton, cuda" in done.stderr


def test_python_m_fastrl_names_every_backend():
    done = subprocess.run(
        [sys.executable, "-m", "fastrl"], capture_output=True, text=True, check=True
    )
    for name in ("reference", "cpu", "triton", "cuda"):
        assert name in done.stdout
    if not torch.cuda.is_available():
        assert re.search(f"cuda +not usable: .*{REASONS['cuda']}", done.stdout)


@pytest.mark.parametrize("capability", ["avx512", "avx2", "plain"])
def test_every_vector_width_gives_the_right_answer(compiled, capability):
    """One process per width: agreement with the reference, forward and backward."""
    code = """
import torch, fastrl
torch.manual_seed(0)
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for vocabulary in (1, 7, 129, 5000, 32001):
        for softcap in (None, 20.0):
            x = (torch.randn(5, vocabulary) * 4).to(dtype)
            ids = torch.randint(vocabulary, (5,))
            out = []
            for backend in ("cpu", "reference"):
                leaf = x.clone().requires_grad_()
                s = fastrl.token_stats(leaf, ids, outputs=fastrl.TokenStats._fields,
                                       logit_softcap=softcap, backend=backend)
                (s.logprobs + 0.3 * s.entropy).sum().backward()
                out.append((*s, leaf.grad))
            for a, b in zip(*out):
                rough = a.dtype in (torch.bfloat16, torch.float16)
                rtol = 2e-2 if rough else 2e-5
                close = torch.allclose(a.float(), b.float(), rtol=rtol, atol=2e-5)
                assert close, (dtype, vocabulary, softcap)
print("agreed")
"""
    done = fresh(code, FASTRL_CPU_CAPABILITY=capability)
    if done.returncode and f"{capability}" in done.stderr and "not" in done.stderr:
        listing = Path("/proc/cpuinfo")
        cpuinfo = listing.read_text() if listing.exists() else ""
        flag = {"avx512": "avx512f", "avx2": "avx2"}.get(capability, "")
        if flag and flag not in cpuinfo:
            pytest.skip(f"this processor has no {capability}")
    assert done.stdout.strip() == "agreed", done.stderr


@pytest.mark.parametrize(
    "call",
    [
        lambda **o: fastrl.kl_divergence(torch.zeros(1, 2), torch.zeros(1, 2), **o),
        lambda **o: fastrl.value_loss(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), **o),
        lambda **o: fastrl.token_weights(torch.ones(1, 2), aggregation="token-mean", **o),
        lambda **o: fastrl.masked_mean(torch.zeros(1, 2), torch.ones(1, 2), **o),
        lambda **o: fastrl.whiten(torch.zeros(1, 2), torch.ones(1, 2), **o),
    ],
)
def test_plain_torch_functions_refuse_a_kernel_backend(call):
    call(backend="auto")
    call(backend="reference")
    with pytest.raises(ValueError, match=r"backend 'cpu' cannot do this call: .* plain torch"):
        call(backend="cpu")


def test_an_extension_that_lacks_an_operator_is_out_of_date(compiled, monkeypatch):
    assert native._out_of_date() is None
    torch.library.define("fastrl::of_tomorrow", "() -> ()")
    monkeypatch.setattr(native.library, "OPERATORS", ("of_tomorrow",))
    assert "older than fastrl (it lacks of_tomorrow); build it again" in native._out_of_date()

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

ROOT = Path(__file__).parents[2]
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


def test_the_default_is_refused_like_a_named_backend(compiled):
    fastrl.set_backend("cpu")
    ones = torch.ones(1, 2)
    with pytest.raises(ValueError, match=r"backend 'cpu' cannot .* the objective is a Python func"):
        fastrl.policy_loss(ones, ones, ones, objective=lambda new, old, ref, a: -new * a)


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


@pytest.mark.parametrize("capability", ["avx2", "plain"])
def test_other_vector_widths_give_the_right_answer(compiled, capability):
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else "avx2"
    if capability == "avx2" and "avx2" not in flags:
        pytest.skip("this processor has no avx2")
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "--cases", "300", "--backend", "cpu"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "FASTRL_CPU_CAPABILITY": capability},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


def test_an_extension_that_lacks_an_operator_is_out_of_date(compiled, monkeypatch):
    assert native._out_of_date() is None
    torch.library.define("fastrl::of_tomorrow", "() -> ()")
    monkeypatch.setattr(native.library, "OPERATORS", ("of_tomorrow",))
    assert "older than fastrl (it lacks of_tomorrow); build it again" in native._out_of_date()

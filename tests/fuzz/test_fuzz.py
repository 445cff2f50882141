"""A fixed number of cases of the fuzzer: nothing differs from the oracle or is out of bounds."""

import pytest
import torch

from tests.conftest import TESTED
from tests.contract import sanitized

from .run import MOST_IN_DOUBT, Run, perform

SEED = 20260923
AT_ONCE = 500
CASES = {"reference": 1000, "cpu": 2500, "triton": 2000, "cuda": 2000}
PARTS = [(name, first) for name in TESTED for first in range(0, CASES[name], AT_ONCE)]


@pytest.mark.kernels
@pytest.mark.parametrize(("backend", "first"), PARTS, indirect=["backend"])
def test_nothing_is_unexplained(backend, first):
    cases = min(AT_ONCE, CASES[backend] - first)
    run = Run(cases, seed=SEED, first=first, backend=backend)
    report = perform(run)
    assert not report.failures, str(report)
    # of the 50 choices of options that these are on triton, a few make a large share
    assert report.share_in_doubt < MOST_IN_DOUBT * (1.25 if backend == "triton" else 1)


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["plain", "avx2", "avx512"])
def test_no_access_beyond_a_tensor(capability):
    """On the CPU backend built under AddressSanitizer and UBSan."""
    if capability == "avx512" and "AVX512" not in torch.backends.cpu.get_cpu_capability():
        pytest.skip("this machine has no AVX-512")
    sanitized.run(cases=300, FASTRL_CPU_CAPABILITY=capability)

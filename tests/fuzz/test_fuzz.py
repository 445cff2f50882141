"""A fixed number of cases of the fuzzer, without differences from the oracle."""

import pytest

from fastrl.triton.runtime.registration import INTERPRETED
from tests.conftest import TESTED

from .run import MOST_IN_DOUBT, Run, perform

pytestmark = pytest.mark.kernels

SEED = 20260923
AT_ONCE = 500
CASES = {"reference": 1000, "cpu": 2500, "triton": 150, "cuda": 300}
PARTS = [(name, first) for name in TESTED for first in range(0, CASES[name], AT_ONCE)]


@pytest.mark.parametrize(("backend", "first"), PARTS, indirect=["backend"])
def test_nothing_is_unexplained(backend, first):
    cases = min(AT_ONCE, CASES[backend] - first)
    run = Run(cases, seed=SEED, first=first, backend=backend, interpreted=INTERPRETED)
    report = perform(run)
    assert not report.failures, str(report)
    assert report.share_in_doubt < MOST_IN_DOUBT

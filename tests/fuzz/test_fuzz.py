"""A fixed number of cases of the fuzzer, without differences from the oracle."""

import pytest

from fastrl.triton.runtime.registration import INTERPRETED

from .run import MOST_IN_DOUBT, Run, perform

pytestmark = pytest.mark.kernels

SEED = 20260923
AT_ONCE = 500
CASES = {"triton": 150} if INTERPRETED else {"reference": 500, "cpu": 2000}
PARTS = [(name, first) for name, cases in CASES.items() for first in range(0, cases, AT_ONCE)]


@pytest.mark.parametrize(("backend", "first"), PARTS, indirect=["backend"])
def test_nothing_is_unexplained(backend, first):
    cases = min(AT_ONCE, CASES[backend] - first)
    run = Run(cases, seed=SEED, first=first, backend=backend, interpreted=INTERPRETED)
    report = perform(run)
    assert not report.failures, str(report)
    assert report.share_in_doubt < MOST_IN_DOUBT

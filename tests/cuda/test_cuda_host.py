"""The host machine that runs CUDA kernels on a CPU: it works, and its sanitizer sees a race."""

import re

import pytest

from tests.support.cuda_host import assert_program_passes, run_program


@pytest.mark.parametrize(("sanitizer", "warp"), [(None, 8), ("address", 32), ("thread", 8)])
def test_cluster_with_bulk_copies(sanitizer, warp):
    assert_program_passes("primitives", sanitizer, warp=warp)


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        (1, "ThreadSanitizer: data race"),
        (2, "ThreadSanitizer: data race"),
        (3, "ThreadSanitizer: data race|a barrier is armed twice in a phase"),
        (4, "a barrier is armed twice in a phase"),
        (5, "a store to a block that has exited"),
    ],
)
def test_a_fault_is_seen(fault, seen):
    """The faults are those of tests/cuda/primitives.cpp."""
    done = run_program("primitives", "thread", str(fault))
    assert done.returncode != 0
    assert re.search(seen, done.stderr)

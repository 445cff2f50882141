"""The host machine that runs CUDA kernels on a CPU: it works, and its sanitizer sees a race."""

import pytest

from tests.support.cuda_host import assert_program_passes, run_program


@pytest.mark.parametrize(("sanitizer", "warp"), [(None, 8), ("address", 32), ("thread", 8)])
def test_cluster_with_bulk_copies(sanitizer, warp):
    assert_program_passes("primitives", sanitizer, warp=warp)


def test_a_race_is_seen():
    done = run_program("primitives", "thread", "racy")
    assert done.returncode != 0
    assert "ThreadSanitizer: data race" in done.stderr

"""The CUDA vocabulary kernels under the sanitizers: no race, no access beyond a buffer."""

import pytest

from tests.support.cuda_host import assert_program_passes


@pytest.mark.parametrize(("sanitizer", "warp"), [("address", 32), ("thread", 8)])
def test_vocabulary_kernels(sanitizer, warp):
    assert_program_passes("rows", sanitizer, warp=warp)

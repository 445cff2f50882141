"""Group advantages on the host build of the CUDA kernels: the operator's own tests, sanitizers."""

import pytest
from cuda_host import assert_program_passes
from cuda_on_host import backend, registered  # noqa: F401
from test_group_advantages import *  # noqa: F403

del test_many_groups  # noqa: F821  a thread of the system per CUDA thread: too many for so many blocks


@pytest.mark.parametrize(("sanitizer", "warp"), [("address", 32), ("thread", 8)])
def test_under_sanitizers(sanitizer, warp):
    assert_program_passes("group_advantages", sanitizer, warp=warp)

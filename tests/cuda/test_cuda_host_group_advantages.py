"""Group advantages on the host build of the CUDA kernels: the operator's own tests, sanitizers."""

import pytest

from tests.ops.test_group_advantages import *  # noqa: F403
from tests.support.cuda_host import assert_program_passes
from tests.support.cuda_on_host import backend, registered  # noqa: F401

# the host machine needs a system thread per CUDA thread: too many for so many blocks
del test_many_groups  # noqa: F821


@pytest.mark.parametrize(("sanitizer", "warp"), [("address", 32), ("thread", 8)])
def test_under_sanitizers(sanitizer, warp):
    assert_program_passes("group_advantages", sanitizer, warp=warp)

"""The upstream factor of a loss on the CUDA kernels in their host build."""

import pytest

from tests.support.cuda_on_host import backend, registered  # noqa: F401
from tests.triton.test_triton_upstream import *  # noqa: F403

pytestmark = pytest.mark.usefixtures("on_gpu")

"""The operators' own tests of the linear forms, on the CUDA kernels in their host build.

Where the GEMMs round nothing, a GPU's path is held to the same budgets as all others.
"""

from tests.ops.test_linear import *  # noqa: F403
from tests.support.cuda_on_host import backend, registered  # noqa: F401

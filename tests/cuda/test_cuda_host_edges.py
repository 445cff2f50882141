"""Bounds and excluded tokens on the host build of the CUDA kernels."""

from tests.ops.test_bounds import *  # noqa: F403
from tests.ops.test_edges import (
    test_a_broken_advantage_breaks_loss_and_gradient,  # noqa: F401
    test_a_broken_reference_breaks_loss_and_gradient,  # noqa: F401
    test_a_broken_token_on_policy_breaks_loss_and_gradient,  # noqa: F401
)
from tests.ops.test_excluded_tokens import *  # noqa: F403
from tests.ops.test_extreme_ratios import (
    test_the_slope_of_the_bias_corrected_k3_is_the_distance,  # noqa: F401
)
from tests.support.cuda_on_host import backend, registered  # noqa: F401

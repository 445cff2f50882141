"""The operators' own tests of what takes logits, on the CUDA kernels in their host build."""

from tests.ops.test_edges import *  # noqa: F403
from tests.ops.test_inplace import *  # noqa: F403
from tests.ops.test_logits_policy_loss import *  # noqa: F403
from tests.ops.test_token_stats import *  # noqa: F403
from tests.support.cuda_on_host import backend, registered  # noqa: F401

"""The operators' own tests of what takes logits, on the CUDA kernels in their host build."""

from tests.ops.test_edges import *  # noqa: F403
from tests.ops.test_inplace import *  # noqa: F403
from tests.ops.test_logits_policy_loss import *  # noqa: F403
from tests.ops.test_token_stats import *  # noqa: F403
from tests.support.cuda_on_host import backend, registered  # noqa: F401

# On a GPU nobody looks at the values of ids and normalizers: there is nothing to raise.
del test_an_id_outside_the_vocabulary_raises  # noqa: F821
del test_a_count_of_zero_is_a_fine_normalizer_of_nothing  # noqa: F821

"""The policy loss on the host build of the CUDA kernels: the operator's own tests, many blocks."""

import pytest
import torch

from fastrl.contract import KL_GRADIENTS, LEVELS, SURROGATES
from tests.ops.test_objective_options import *  # noqa: F403
from tests.ops.test_policy_loss import *  # noqa: F403
from tests.ops.test_policy_loss_masks import *  # noqa: F403
from tests.support.cuda_host import assert_program_passes
from tests.support.cuda_on_host import backend, policy_loss_fwd, registered  # noqa: F401

inf = float("inf")
COEFFICIENTS = [0.2, 0.2, 3.0, inf, 1.0, 1.05, 0.1, 10.0, 20.0, inf, 0.01]


@pytest.mark.parametrize(("sanitizer", "warp"), [("address", 32), ("thread", 8)])
def test_under_sanitizers(sanitizer, warp):
    assert_program_passes("policy_loss", sanitizer, warp=warp)


@pytest.mark.parametrize("offset", [0, 1])  # on and off the boundaries of vectors
@pytest.mark.parametrize("level", range(len(LEVELS)))
def test_many_blocks_add_up_to_what_one_does(level, offset):
    def tokens(bools=False):
        flat = torch.randn(5 * 37 + offset)[offset:].view(5, 37)
        return flat > -0.5 if bools else flat

    logprobs, advantages, weights, kl_weights, entropy_weights = (tokens() for _ in range(5))
    mask, old, ref, entropy = tokens(bools=True), tokens(), tokens(), tokens()
    inputs = (logprobs, advantages, mask, weights, kl_weights, entropy_weights, old, ref, entropy)
    for ratio in range(len(SURROGATES)):
        options = (None, level, ratio, 2, level % len(KL_GRADIENTS), COEFFICIENTS)
        one = policy_loss_fwd(*inputs, *options, fewest=1000)
        many = policy_loss_fwd(*inputs, *options, fewest=32 if level == 0 and ratio != 3 else 2)
        wide = policy_loss_fwd(*inputs, *options, fewest=2, ranks=4)  # a cluster per two sequences
        for whole, parts, spread in zip(one, many, wide, strict=True):
            torch.testing.assert_close(parts, whole, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(spread, whole, rtol=1e-5, atol=1e-6)
        assert torch.equal(one[1], many[1])

"""The policy loss on the host build of the CUDA kernels: the operator's own tests, many blocks."""

import pytest
import torch

from fastrl import reference
from fastrl.contract import KL_GRADIENTS, LEVELS, SURROGATES, LossArguments, Metrics
from tests.ops.test_objective_options import *  # noqa: F403
from tests.ops.test_policy_loss import *  # noqa: F403
from tests.ops.test_policy_loss_masks import *  # noqa: F403
from tests.support.cuda_host import assert_program_passes
from tests.support.cuda_on_host import backend, policy_loss_fwd, registered  # noqa: F401
from tests.support.cuda_vocabulary import objective_of

SCALARS = {
    "dual_clip": 3.0,
    "kl_coef": 0.1,
    "kl_clamp": 10.0,
    "log_ratio_low": 20.0,
    "entropy_coef": 0.01,
}


@pytest.mark.parametrize(("sanitizer", "warp"), [("address", 32), ("thread", 8)])
def test_under_sanitizers(sanitizer, warp):
    assert_program_passes("policy_loss", sanitizer, warp=warp)


def tokens(shape, offset=0):
    """Random numbers that begin `offset` elements into a vector."""
    count = torch.Size(shape).numel()
    return torch.randn(count + offset)[offset:].view(shape)


def constants(shape, sequences, layout, offset=0):
    """The constants of a loss: per token, per sequence, or some of each."""
    by_sequence = {"token": "", "sequence": "awkep", "mixed": "wp"}[layout]

    def constant(letter):
        return torch.randn(sequences) if letter in by_sequence else tokens(shape, offset)

    return [constant(letter) for letter in "awkep"]


@pytest.mark.parametrize("offset", [0, 1])  # on and off the boundaries of vectors
@pytest.mark.parametrize("layout", ["token", "mixed"])
@pytest.mark.parametrize(("level", "kl_gradient"), list(zip(LEVELS, KL_GRADIENTS, strict=True)))
def test_many_blocks_add_up_to_what_one_does(level, kl_gradient, layout, offset):
    shape = (5, 37)
    logprobs, entropy, old, ref = (tokens(shape, offset) for _ in range(4))
    mask = (tokens(shape, offset) > -0.5).flatten()
    mask = torch.cat([mask[:1].expand(offset), mask])[offset:].view(shape)
    loss = LossArguments(*constants(shape, 5, layout, offset), old, ref, None)
    for surrogate in SURROGATES:
        objective = objective_of(surrogate, level, kl_gradient=kl_gradient, **SCALARS)
        inputs = (logprobs, entropy, mask, *loss, *objective)
        by_token = level == "token" and surrogate != "gmpo"
        one = policy_loss_fwd(*inputs, per_block=1000)
        many = policy_loss_fwd(*inputs, per_block=32 if by_token else 2)
        wide = policy_loss_fwd(*inputs, per_block=2, ranks=4)  # a cluster per two sequences
        for whole, parts, spread in zip(one, many, wide, strict=True):
            torch.testing.assert_close(parts, whole, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(spread, whole, rtol=1e-5, atol=1e-6)
        assert torch.equal(one[1], many[1])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("layout", ["sequence", "mixed"])
@pytest.mark.parametrize("level", LEVELS)
def test_constants_per_sequence(level, layout, packed):
    shape, count, bounds = (6, 31), 6, None
    if packed:  # empty sequences at the ends and within, and one that begins in every quad
        ends = (0, 0, 1, 2, 3, 7, 7, 7, 40, 101, 186, 186)
        shape, count = (1, 186), len(ends)
        bounds = torch.tensor([0, *ends], dtype=torch.int32)
    logprobs, old, ref = (tokens(shape) for _ in range(3))
    entropy, mask = tokens(shape).abs(), tokens(shape) > -1
    loss = LossArguments(*constants(shape, count, layout), old, ref, bounds)
    for surrogate in ("ppo_clip", "gmpo", "reinforce"):
        objective = objective_of(surrogate, level, **SCALARS)
        actual = policy_loss_fwd(logprobs, entropy, mask, *loss, *objective, per_block=12)
        if surrogate == "gmpo":
            objective = objective_of(surrogate, "sequence", **SCALARS)
        expected = reference.policy_loss(logprobs, entropy, mask, loss, objective)
        for got, want in zip(actual, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_without_entropy_there_is_no_slope_of_it():
    shape = (2, 9)
    loss = LossArguments(*constants(shape, 2, "mixed"), None, None, None)
    mask = torch.ones(shape, dtype=torch.bool)
    _, slope, entropy_slope, metrics = policy_loss_fwd(
        tokens(shape), None, mask, *loss, *objective_of()
    )
    assert slope.shape == shape
    assert entropy_slope.shape == (0,)
    assert Metrics._make(metrics).active_tokens == mask.sum()

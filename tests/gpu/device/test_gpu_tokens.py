"""Policy loss, GAE and group advantages on a GPU: many groups, many sequences, many tokens."""

import pytest
import torch

import fastrl
from fastrl.contract import LossArguments, Metrics
from fastrl.library import operators
from tests.gpu.device.workloads import policy_loss

CUDA = "cuda"
TOKENS = 2**31 + 4096


@pytest.mark.parametrize(("count", "size"), [(20000, 8), (6000, 3000)])
@pytest.mark.parametrize("scale", ["group", "batch"])
def test_large_groups_and_many(kernels, count, size, scale):
    order = torch.randperm(count, device=CUDA)
    rewards, ids = torch.randn(count, device=CUDA), order // size * 2**33
    found = fastrl.group_advantages(rewards, group_ids=ids, scale=scale, backend=kernels)
    exact = fastrl.group_advantages(
        rewards.double(), group_ids=ids, scale=scale, backend="reference"
    )
    for part, wanted in zip(found, exact, strict=True):
        torch.testing.assert_close(part.double(), wanted.double(), rtol=2e-6, atol=1e-7)


def test_more_sequences_than_a_grid_axis_has_blocks(kernels):
    work = policy_loss("sequence", 70000, 2).on(CUDA)
    found, exact = work.run(kernels)[-1], work.double().run("reference")[-1]
    torch.testing.assert_close(found.double(), exact, rtol=1e-3, atol=1e-9)


def test_gae_beyond_32_bit_offsets(kernels, memory):
    memory(5 * 4 * TOKENS)
    T = 4096
    rewards = torch.zeros(TOKENS // T, T, device=CUDA)
    values = torch.zeros_like(rewards)
    rewards[:, -1] = torch.arange(len(rewards), device=CUDA) % 1000
    advantages, _ = operators(kernels).gae_fwd(
        rewards, values, None, None, None, None, None, 1.0, 1.0
    )
    assert torch.equal(advantages[:, 0], rewards[:, -1])
    assert torch.equal(advantages[:, T // 2], rewards[:, -1])


def test_policy_loss_beyond_32_bit_offsets(kernels, memory):
    memory(7 * 4 * TOKENS)
    logprobs = torch.full((1, TOKENS), -1.0, device=CUDA)
    advantages = torch.full_like(logprobs, 2.0)
    mask = torch.ones_like(logprobs, dtype=torch.bool)
    weights = torch.full_like(logprobs, 2.0**-31)
    weights[0, -1] = 1.0
    absent = LossArguments._make(None for _ in LossArguments._fields)
    arguments = absent._replace(advantages=advantages, weights=weights)
    loss, slope, _, metrics = operators(kernels).policy_loss_fwd(
        logprobs, None, mask, *arguments, *fastrl.Objective().arguments
    )
    assert slope[0, -1].item() == -2.0
    assert (slope[0, -4096:-1] == -(2.0**-30)).all()
    assert loss.item() == pytest.approx(-4.0, rel=1e-5)
    assert Metrics._make(metrics).active_tokens.item() == pytest.approx(TOKENS, rel=1e-6)

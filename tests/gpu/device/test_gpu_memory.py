"""More than 2^31 elements on a GPU."""

import pytest
import torch

import fastrl
from fastrl.contract import LossArguments, Metrics
from fastrl.library import operators

CUDA = "cuda"
TOKENS = 2**31 + 4096


def test_rows_of_logits_beyond_32_bit_offsets(kernels, memory):
    rows, vocabulary, dtype = 16_400, 131_072, torch.bfloat16
    memory(5 * rows * vocabulary * dtype.itemsize)
    logits = torch.empty(1, rows, vocabulary, dtype=dtype, device=CUDA).normal_()
    assert logits.numel() > 2**31
    ids = torch.randint(vocabulary, (1, rows), device=CUDA)

    def results(logits, ids):
        leaf = logits.detach().requires_grad_()
        stats = fastrl.token_stats(leaf, ids, outputs=("logprobs", "entropy"), backend=kernels)
        total = (stats.logprobs + 0.3 * stats.entropy).sum()
        return stats.logprobs, stats.entropy, *torch.autograd.grad(total, leaf)

    found, alone = results(logits, ids), results(logits[:, -8:].clone(), ids[:, -8:])
    assert all(torch.equal(one[:, -8:], last) for one, last in zip(found, alone, strict=True))


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

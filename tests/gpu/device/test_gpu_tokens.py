"""Policy loss, GAE and group advantages on a GPU: long, packed, large, of many lengths."""

import random

import pytest
import torch

import fastrl
from fastrl.contract import LossArguments, Metrics
from fastrl.library import operators

CUDA = "cuda"


def policy_inputs(B, T, density=0.8):
    logprobs = -3 * torch.rand(B, T, device=CUDA) - 0.01
    return {
        "logprobs": logprobs,
        "advantages": torch.randn(B, device=CUDA),
        "mask": torch.rand(B, T, device=CUDA) < density,
        "old_logprobs": logprobs + 0.2 * torch.randn(B, T, device=CUDA),
        "ref_logprobs": logprobs + 0.2 * torch.randn(B, T, device=CUDA),
    }


def gae_inputs(B, T, ends=False, bootstrap=None):
    inputs = {name: torch.randn(B, T, device=CUDA) for name in ("rewards", "values")}
    inputs["mask"] = torch.rand(B, T, device=CUDA) < 0.9
    if ends:
        inputs["terminated"] = torch.rand(B, T, device=CUDA) < 0.01
        inputs["truncated"] = torch.rand(B, T, device=CUDA) < 0.01
    if bootstrap:
        shape = (B,) if bootstrap == "sequence" else (B, T)
        inputs["bootstrap_values"] = torch.randn(shape, device=CUDA)
    return inputs


def double(inputs):
    return {n: x.double() if x.is_floating_point() else x for n, x in inputs.items()}


def policy_loss(inputs, backend, **options):
    logprobs = inputs["logprobs"].detach().requires_grad_()
    rest = {name: x for name, x in inputs.items() if name != "logprobs"}
    result = fastrl.policy_loss(logprobs, **rest, **options, backend=backend)
    (gradient,) = torch.autograd.grad(result.loss, logprobs)
    return result.loss.detach(), gradient, torch.stack(list(result.metrics.values()))


@pytest.mark.parametrize("bootstrap", [None, "sequence", "token"])
@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("shape", [(300, 7), (33, 1000), (3, 10007), (2, 32768)], ids=str)
def test_gae_is_exact(kernels, shape, ends, bootstrap):
    inputs = gae_inputs(*shape, ends=ends, bootstrap=bootstrap)
    found = fastrl.gae(**inputs, gamma=0.99, lam=0.95, backend=kernels)
    on_cpu = {name: x.cpu() for name, x in inputs.items()}
    exact = fastrl.gae(**double(on_cpu), gamma=0.99, lam=0.95, backend="reference")
    for part, wanted in zip(found, exact, strict=True):
        torch.testing.assert_close(part.cpu().double(), wanted, rtol=0, atol=2e-5)


def test_packed_gae_is_that_of_each_sequence(kernels):
    lengths = [3, 0, 5000, 1, 0, 700, 64, 2048, 4, 0]
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    flat = {name: x[0] for name, x in gae_inputs(1, sum(lengths), ends=True).items()}
    after = torch.randn(len(lengths), device=CUDA)
    found = fastrl.gae(
        **flat, bootstrap_values=after, gamma=0.9, cu_seqlens=bounds.to(CUDA), backend=kernels
    )
    for s, (begin, end) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        one = {name: x[None, begin:end].cpu() for name, x in flat.items()}
        exact = fastrl.gae(**double(one), bootstrap_values=after[s : s + 1].cpu(), gamma=0.9)
        for part, wanted in zip(found, exact, strict=True):
            torch.testing.assert_close(part[begin:end].cpu(), wanted[0].float(), rtol=0, atol=2e-5)


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


def test_fifty_lengths_compile_nothing_new(compilations, asked):
    if "triton" not in asked or fastrl.backend.unavailable("triton"):
        pytest.skip("needs the backend triton")

    def everything(T):
        inputs = policy_inputs(4, T)
        for objective in ("grpo", "gspo"):
            policy_loss(inputs, "triton", objective=objective)
        fastrl.gae(**gae_inputs(4, T), gamma=random.random(), backend="triton")
        rewards = torch.randn(8 * T, device=CUDA)
        fastrl.group_advantages(rewards, group_size=8, eps=random.random(), backend="triton")

    for T in (48, 49, 1500, 1504, 4000, 4001):  # short and long, multiples of 16 and others
        everything(T)
    assert compilations
    compilations.clear()
    lengths = random.Random(0).sample(range(2, 5000), 50)
    for T in lengths:
        everything(T)
    assert compilations == []


TOKENS = 2**31 + 4096


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


def test_more_sequences_than_a_grid_axis_has_blocks(kernels):
    inputs = policy_inputs(70000, 2)
    found = policy_loss(inputs, kernels, objective="gspo")
    exact = policy_loss(double(inputs), "reference", objective="gspo")
    torch.testing.assert_close(found[1].double(), exact[1], rtol=1e-3, atol=1e-9)

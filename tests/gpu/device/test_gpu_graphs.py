"""Calls as the first ones of a process, and factors of the loss."""

import subprocess
import sys

import pytest
import torch

from tests.gpu.device.first_calls import CALLS, WAYS
from tests.gpu.device.limit import ROOT
from tests.gpu.device.linear_workloads import PRECISIONS, linear_work, policy_loss

CUDA = "cuda"


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("way", WAYS)
def test_the_first_call_of_a_process(kernels, way, name):
    command = [sys.executable, "-m", "tests.gpu.device.first_calls", kernels, way, name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def gradients(name, backend, factors):
    """The gradient of a loss times each factor, by `backward`."""
    if name == "linear":
        linear = linear_work(PRECISIONS["bf16"], (2, 20, 64, 1001), compact=False).on(CUDA)
    else:
        work = CALLS[name]().on(CUDA)
    found = []
    for factor in factors:
        if name == "linear":
            leaves = linear.leaves()
            loss, leaf = policy_loss(linear, leaves, backend).loss, leaves["weight"]
        else:
            leaf = work.inputs[work.leaves[0]].detach().requires_grad_()
            loss = work.call({**work.inputs, work.leaves[0]: leaf}, backend)[0]
        (factor * loss).backward()
        found.append(leaf.grad)
    return found


@pytest.mark.parametrize("name", ["linear", *(name for name in CALLS if "loss" in name)])
def test_a_factor_of_the_loss_scales_the_gradient(kernels, name):
    plain, *scaled = gradients(name, kernels, (1.0, 0.5, -2.0, 0.0))
    for factor, gradient in zip((0.5, -2.0, 0.0), scaled, strict=True):
        assert torch.equal(gradient, factor * plain)


def test_a_factor_of_the_loss_with_the_graph_kept(kernels):
    work = CALLS["logits_policy_loss"]().on(CUDA)
    leaf = work.inputs["logits"].detach().requires_grad_()
    loss = work.call({**work.inputs, "logits": leaf}, kernels)[0]
    first, second = (
        torch.autograd.grad(loss, leaf, torch.full_like(loss, factor), retain_graph=keep)[0]
        for factor, keep in ((0.5, True), (1.0, False))
    )
    assert torch.equal(second, 2 * first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_of_a_loss_from_logits_of_16_bits(kernels, dtype):
    """A factor is applied in float32, or to the rounded gradient: at most one more rounding."""
    work = CALLS["logits_policy_loss"]().on(CUDA)
    work.inputs["logits"] = work.inputs["logits"].to(dtype)
    plain = work.run(kernels)[-1].double()
    rounding = torch.finfo(dtype)
    for factor in (0.5, 3.0):
        scaled = work._replace(factor=factor).run(kernels)[-1].double() / factor
        assert ((scaled - plain).abs() <= rounding.eps * plain.abs() + rounding.tiny).all()

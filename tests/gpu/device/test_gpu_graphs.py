"""CUDA graphs, private pools of memory, streams side by side, and factors of the loss."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fastrl
from tests.gpu.device.graph_workloads import CALLS, WAYS, outcome
from tests.gpu.device.linear_workloads import PRECISIONS, linear_work
from tests.gpu.device.linear_workloads import policy_loss as linear_policy_loss

CUDA = "cuda"
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("way", WAYS)
def test_the_first_call_of_a_process(kernels, way, name):
    command = [sys.executable, "-m", "tests.gpu.device.graph_workloads", kernels, way, name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("name", CALLS)
def test_graphs_replayed_side_by_side(kernels, name, captured):
    """Two captures of a call on other inputs, replayed at the same time: neither changes a bit."""
    call, graphs = CALLS[name], []
    for _ in range(2):
        inputs = call.make(CUDA)
        wanted = outcome(call, inputs, kernels)
        answer, replay = captured(lambda inputs=inputs: outcome(call, inputs, kernels))
        graphs.append((inputs, wanted, answer, replay))
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(10):
        for _, _, answer, _ in graphs:
            for x in answer:
                x.zero_()
        torch.cuda.synchronize()
        for _ in range(20):
            for stream, (_, _, _, replay) in zip(streams, graphs, strict=True):
                with torch.cuda.stream(stream):
                    replay()
        torch.cuda.synchronize()
        for _, wanted, answer, _ in graphs:
            assert all(torch.equal(a, b) for a, b in zip(answer, wanted, strict=True))


def losses(backend):
    """Functions that return a new loss and its leaf."""

    def of(name):
        call, inputs = CALLS[name], CALLS[name].make(CUDA)

        def make():
            leaf = inputs[call.leaf].detach().requires_grad_()
            return call.run({**inputs, call.leaf: leaf}, backend), leaf

        return make

    work = linear_work(PRECISIONS["bf16"], (2, 20, 64, 1001), compact=False).on(CUDA)

    def linear():
        leaves = work.leaves()
        return linear_policy_loss(work, leaves, backend).loss, leaves["weight"]

    return {**{name: of(name) for name, call in CALLS.items() if call.leaf}, "linear": linear}


NAMES = [*(name for name, call in CALLS.items() if call.leaf), "linear"]


@pytest.mark.parametrize("name", NAMES)
def test_a_backward_does_not_wait_for_the_gpu(kernels, name, request):
    make = losses(kernels)[name]
    for factor in (None, 0.5):
        loss, _ = make()
        (loss if factor is None else factor * loss).backward()
    request.getfixturevalue("no_sync")
    for factor in (None, 0.5):
        loss, leaf = make()
        (loss if factor is None else factor * loss).backward()
        assert leaf.grad is not None


@pytest.mark.parametrize("name", NAMES)
def test_a_factor_of_the_loss_scales_the_gradient(kernels, name):
    make = losses(kernels)[name]
    grads = {}
    for factor in (1.0, 0.5, -2.0, 0.0):
        loss, leaf = make()
        (factor * loss).backward()
        grads[factor] = leaf.grad
    for factor, gradient in grads.items():
        assert torch.equal(gradient, factor * grads[1.0])


def test_a_factor_of_the_loss_with_the_graph_kept(kernels):
    loss, leaf = losses(kernels)["logits_policy_loss"]()
    first, second = (
        torch.autograd.grad(loss, leaf, torch.full_like(loss, factor), retain_graph=keep)[0]
        for factor, keep in ((0.5, True), (1.0, False))
    )
    assert torch.equal(second, 2 * first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_of_a_loss_from_logits_of_16_bits(kernels, dtype):
    """A factor is applied in float32, or to the rounded gradient: at most one more rounding."""
    call = CALLS["logits_policy_loss"]
    inputs = call.make(CUDA)
    inputs["logits"] = inputs["logits"].to(dtype)
    grads = []
    for factor in (1.0, 0.5, 3.0):
        leaf = inputs["logits"].detach().requires_grad_()
        (factor * call.run({**inputs, "logits": leaf}, kernels)).backward()
        grads.append(leaf.grad.double() / factor)
    rounding = torch.finfo(dtype)
    allowed = rounding.eps * grads[0].abs() + rounding.tiny
    for one in grads[1:]:
        assert ((one - grads[0]).abs() <= allowed).all()


def test_the_package_is_the_one_of_this_checkout():
    """Processes started above must not test another installation."""
    assert Path(fastrl.__file__).parents[1] == ROOT

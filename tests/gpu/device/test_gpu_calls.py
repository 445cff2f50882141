"""The calls of workloads.py on a GPU: exact, repeatable, without a sync, captured, on streams."""

from pathlib import Path

import pytest
import torch

import fastrl
from fastrl.backend import unavailable
from tests.gpu.device.conftest import GPU_BACKENDS
from tests.gpu.device.limit import ROOT
from tests.gpu.device.workloads import assert_equals_the_reference, of_logits, of_tokens, small

CUDA = "cuda"


@pytest.mark.parametrize("name", GPU_BACKENDS)
def test_the_backend_can_be_used(name):
    """One that cannot skips its tests."""
    assert unavailable(name) is None


def test_there_are_kernels_to_test():
    assert fastrl.backend.resolve("auto", torch.device(CUDA), torch.float32) != "reference"
    assert Path(fastrl.__file__).parents[1] == ROOT, "another installation is tested"


@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (33, 300), (2, 32768), (16, 20000)], ids=str)
def test_tokens_equal_the_reference_in_float64(kernels, shape):
    for work in of_tokens(*shape):
        assert_equals_the_reference(work, kernels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocabulary", [1, 129, 1001, 32000, 151936, 262208])
def test_logits_equal_the_reference_in_float64(kernels, vocabulary, dtype):
    for work in of_logits(2, 5, vocabulary, dtype):
        assert_equals_the_reference(work, kernels)


def test_nothing_waits_for_the_gpu(kernels, no_sync):
    works = [work.on(CUDA) for work in small()]
    for work in works:
        work.run(kernels)  # compilation may synchronize
    no_sync()
    for work in works:
        work.run(kernels)


def test_runs_are_bit_equal(kernels):
    for work in [*of_tokens(16, 5000), *of_logits(4, 200, 128256, torch.bfloat16)]:
        there = work.on(CUDA)
        first = there.run(kernels)
        for _ in range(5):
            assert all(map(torch.equal, there.run(kernels), first)), work.name


def test_a_captured_graph(kernels, captured):
    """Replayed on other inputs; eager calls between replays do not interfere."""
    for work in [*small(), *of_tokens(33, 3000)]:
        there = work.on(CUDA)
        answer, replay = captured(lambda there=there: there.run(kernels))
        for step in range(3):
            for name in ("old_logprobs", "rewards"):
                if name in there.inputs:
                    there.inputs[name].add_(0.01 * step)
            eager = there.run(kernels)
            replay()
            assert all(map(torch.equal, answer, eager)), work.name


def test_graphs_side_by_side_do_not_disturb_each_other(kernels, captured):
    """Kernels that count their blocks overlap, on other inputs: neither graph changes a bit."""
    for pair in zip(of_tokens(65, 4000), of_tokens(65, 4000), strict=True):
        works = [work.on(CUDA) for work in pair * 2]
        wanted = [work.run(kernels) for work in works]
        graphs = [captured(lambda work=work: work.run(kernels)) for work in works]
        streams = [torch.cuda.Stream() for _ in graphs]
        for answer, _ in graphs:
            for x in answer:
                x.zero_()
        torch.cuda.synchronize()
        for _ in range(20):
            for stream, (_, replay) in zip(streams, graphs, strict=True):
                with torch.cuda.stream(stream):
                    replay()
        torch.cuda.synchronize()
        for (answer, _), exact in zip(graphs, wanted, strict=True):
            assert all(map(torch.equal, answer, exact)), pair[0].name

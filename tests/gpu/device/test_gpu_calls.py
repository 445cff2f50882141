"""The calls of workloads.py on a GPU: exact, repeatable, without a sync, captured, on streams.

tests/gpu/test_gpu_workloads.py makes the same calls on the CPU.
"""

import pytest
import torch

from tests.gpu.device.workloads import assert_equals_the_reference, of_logits, of_tokens, small


def on_gpu(work):
    return {name: x.cuda() for name, x in work.inputs.items()}


@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (33, 300), (16, 20000)], ids=str)
def test_tokens_equal_the_reference_in_float64(kernels, shape):
    for work in of_tokens(*shape):
        assert_equals_the_reference(work, kernels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocabulary", [1, 129, 1001, 32000, 151936, 262208])
def test_logits_equal_the_reference_in_float64(kernels, vocabulary, dtype):
    for work in of_logits(2, 5, vocabulary, dtype):
        assert_equals_the_reference(work, kernels)


def test_nothing_waits_for_the_gpu(kernels):
    for work in small():
        inputs = on_gpu(work)
        work.run(inputs, kernels)  # compilation may synchronize
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            work.run(inputs, kernels)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_runs_are_bit_equal(kernels):
    for work in [*of_tokens(16, 5000), *of_logits(4, 200, 128256, torch.bfloat16)]:
        inputs = on_gpu(work)
        first = [x.clone() for x in work.run(inputs, kernels)]
        for _ in range(5):
            again = work.run(inputs, kernels)
            assert all(map(torch.equal, again, first)), work.name


def test_cuda_graphs(kernels, captured):
    """Captured once, replayed on other inputs; eager calls between replays do not interfere."""
    for work in [*small(), *of_tokens(33, 3000)]:
        inputs = on_gpu(work)
        answer, replay = captured(lambda work=work, inputs=inputs: work.run(inputs, kernels))
        for step in range(3):
            for name in ("old_logprobs", "rewards"):
                if name in inputs:
                    inputs[name].add_(0.01 * step)
            eager = work.run(inputs, kernels)
            replay()
            for one, other in zip(answer, eager, strict=True):
                assert torch.equal(one, other), work.name


def test_streams_do_not_disturb_each_other(kernels, captured):
    """Kernels that count their blocks run side by side: replayed, so that they overlap."""
    for work in of_tokens(65, 4000):
        inputs = on_gpu(work)
        wanted = work.run(inputs, kernels)
        graphs = [
            captured(lambda work=work, inputs=inputs: work.run(inputs, kernels)) for _ in range(4)
        ]
        streams = [torch.cuda.Stream() for _ in graphs]
        torch.cuda.synchronize()
        for _ in range(20):
            for stream, (_, replay) in zip(streams, graphs, strict=True):
                with torch.cuda.stream(stream):
                    replay()
        torch.cuda.synchronize()
        for answer, _ in graphs:
            for one, other in zip(answer, wanted, strict=True):
                assert torch.equal(one, other), work.name

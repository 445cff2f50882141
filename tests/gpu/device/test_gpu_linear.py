"""The linear forms on a GPU: budgets of linear_workloads.py, compiled, captured, without a sync."""

import pytest
import torch
import torch.distributed as dist

from tests.gpu.device.head_of_ranks import assert_parts_equal_whole, assert_sharded_equals_whole
from tests.gpu.device.linear_workloads import (
    FP32,
    HEADS,
    PRECISIONS,
    Precision,
    assert_policy_loss,
    assert_result,
    assert_token_stats,
    gradients,
    linear_work,
    policy_loss,
    run_compiled,
    token_stats,
)

CUDA = "cuda"
SHAPE = (4, 50, 128, 4096)
SHAPES = [(1, 1, 128, 4096), (2, 33, 64, 50257), (1, 300, 1000, 129)]


def work_of(precision="bf16", shape=SHAPE, **options):
    return linear_work(PRECISIONS[precision], shape, **options).on(CUDA)


@pytest.mark.parametrize(
    ("shape", "head"),
    [*((SHAPE, head) for head in HEADS), *((shape, "three chunks") for shape in SHAPES)],
    ids=str,
)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_loss_and_statistics_equal_float64(kernels, precision, shape, head):
    for compact in (True, False):
        work = work_of(precision, shape, compact=compact, **HEADS[head])
        assert_policy_loss(work, kernels)
        assert_token_stats(work, kernels)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_reference_backend(precision):
    work = work_of(precision, (2, 9, 64, 311), bias=True)
    # it converts operands to float32, with and without autocast
    as_given = work._replace(precision=Precision(FP32, FP32))
    widened = {name: x.float() for name, x in work.parameters.items()}
    assert_policy_loss(as_given._replace(parameters=widened), "reference")


def test_float32_products_follow_the_switch_of_torch(kernels):
    work = work_of("fp32", (1, 64, 1024, 4096))
    found = []
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "high"):
            torch.set_float32_matmul_precision(precision)
            found.append(token_stats(work, work.leaves(), kernels).logprobs)
    finally:
        torch.set_float32_matmul_precision(before)
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this GPU has no TF32")
    assert not torch.equal(*found)
    assert (found[0] - found[1]).abs().max() <= 0.05


def results(work, backend):
    """Loss, statistics and their gradients."""
    leaves = work.leaves()
    result, stats = (call(work, leaves, backend) for call in (policy_loss, token_stats))
    of_loss = gradients(result.loss, leaves).values()
    of_stats = gradients(stats.logprobs.sum() + stats.entropy.sum(), leaves).values()
    return [result.loss, stats.logprobs, stats.entropy, *of_loss, *of_stats]


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32 under bf16"])
def test_values_in_masked_rows_change_no_bit(kernels, precision, compact):
    work = work_of(precision, compact=compact, chunks=3)
    outcomes = []
    for value in (torch.nan, 0.0, torch.inf):
        work.parameters["hidden"][~work.tokens["mask"]] = value
        outcomes.append(results(work, kernels))
    for other in outcomes[1:]:
        assert all(map(torch.equal, outcomes[0], other))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_two_runs_are_bit_equal(kernels, precision):
    work = work_of(precision, lora=True, bias=True, chunks=3)
    assert all(map(torch.equal, results(work, kernels), results(work, kernels)))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_nothing_waits_for_the_gpu(kernels, precision, no_sync):
    work = work_of(precision, compact=False, bias=True, chunks=3)
    results(work, kernels)  # compilation may synchronize
    no_sync()
    results(work, kernels)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32", "fp32 under bf16"])
def test_a_graph_captures_it(kernels, precision, captured):
    """Captured once, replayed on other hidden states, which are compared with float64."""
    work = work_of(precision, compact=False, chunks=3)
    leaves = work.leaves()

    def call():
        result = policy_loss(work, leaves, kernels)
        return result, gradients(result.loss, leaves)

    (result, grads), replay = captured(call)
    for _ in range(2):
        with torch.no_grad():
            leaves["hidden"].mul_(0.999)  # moves no ratio across a clip
        replay()
        torch.cuda.synchronize()
        moved = work._replace(parameters={name: x.detach() for name, x in leaves.items()})
        assert_result(moved, result, grads)


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("precision", ["bf16", "fp32 under bf16"])
def test_compiled(kernels, precision, mode, compact):
    """While a graph is captured all rows are processed, since nobody may wait for the GPU."""
    works = [work_of(precision, compact=compact, chunk_tokens=64) for _ in range(4)]
    torch._dynamo.reset()
    run_compiled(works, kernels, mode=mode)


@pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
def test_a_head_that_fsdp2_shards(kernels):
    collectives = "nccl" if dist.is_nccl_available() else "gloo"
    assert_sharded_equals_whole(CUDA, collectives, kernels)


@pytest.mark.skipif(not dist.is_gloo_available(), reason="torch without gloo")
def test_a_head_that_two_ranks_split(kernels):
    device = torch.empty(0, device=CUDA).device.type  # as the other processes know it
    assert_parts_equal_whole(device, kernels)

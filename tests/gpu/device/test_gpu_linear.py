"""The linear forms on a GPU: TF32, masked rows, compiled, sharded, split."""

import pytest
import torch
import torch.distributed as dist

from tests.gpu.device.head_of_ranks import assert_parts_equal_whole, assert_sharded_equals_whole
from tests.gpu.device.workloads import assert_right_compiled, of_case, of_hidden

CUDA = "cuda"


def test_float32_products_follow_the_switch_of_torch(kernels):
    _, case = of_hidden("fp32", sequences=1, tokens=64, hidden=1024)
    work, found = of_case(case, CUDA), []
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "high"):
            torch.set_float32_matmul_precision(precision)
            found.append(work.run(kernels)[0])
    finally:
        torch.set_float32_matmul_precision(before)
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this GPU has no TF32")
    assert not torch.equal(*found)
    assert (found[0] - found[1]).abs().max() <= 0.05


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32 under bf16"])
def test_values_in_masked_rows_change_no_bit(kernels, precision, compact):
    for case in of_hidden(precision, compact=compact):
        work = of_case(case, CUDA)
        outcomes = []
        for value in (torch.nan, 0.0, torch.inf):
            with torch.no_grad():
                work.given["hidden"][work.given["mask"] == 0] = value
            outcomes.append(work.run(kernels))
        for other in outcomes[1:]:
            assert all(map(torch.equal, outcomes[0], other)), case


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("precision", ["bf16", "fp32 under bf16"])
def test_compiled(kernels, precision, mode, compact):
    """While a graph is captured all rows are processed, since nobody may wait for the GPU."""
    case, _ = of_hidden(precision, compact=compact)
    assert_right_compiled(case, kernels, CUDA, {"mode": mode})


@pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
def test_a_head_that_fsdp2_shards(kernels):
    collectives = "nccl" if dist.is_nccl_available() else "gloo"
    assert_sharded_equals_whole(CUDA, collectives, kernels)


@pytest.mark.skipif(not dist.is_gloo_available(), reason="torch without gloo")
def test_a_head_that_two_ranks_split(kernels):
    device = torch.empty(0, device=CUDA).device.type  # as the other processes know it
    assert_parts_equal_whole(device, kernels)

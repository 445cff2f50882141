"""The calls that tests/gpu makes on a GPU, on the CPU backend: a test of those tests."""

import pytest
import torch
import torch.distributed

from tests.gpu.device.graph_workloads import CALLS, WAYS
from tests.gpu.device.linear_workloads import (
    HEADS,
    PRECISIONS,
    assert_policy_loss,
    assert_token_stats,
    linear_work,
    run_compiled,
)
from tests.gpu.device.sharded_head import assert_sharded_equals_whole
from tests.gpu.device.split_head import assert_parts_equal_whole
from tests.gpu.device.workloads import assert_equals_the_reference, of_logits, of_tokens

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled")]


@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (33, 300)], ids=str)
def test_tokens(shape):
    for work in of_tokens(*shape):
        assert_equals_the_reference(work, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocabulary", [1, 129, 1001])
def test_logits(vocabulary, dtype):
    for work in of_logits(2, 5, vocabulary, dtype):
        assert_equals_the_reference(work, "cpu")


@pytest.mark.parametrize("shape", [(1, 1, 64, 1000), (2, 33, 64, 1001)], ids=str)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_linear_forms(precision, head, shape):
    for compact in (True, False):
        work = linear_work(PRECISIONS[precision], shape, compact=compact, **HEADS[head])
        for backend in ("cpu", "reference"):
            assert_policy_loss(work, backend)
            assert_token_stats(work, backend)


@pytest.mark.parametrize("precision", ["bf16", "fp32 under bf16"])
def test_linear_forms_compiled(precision):
    shape = (2, 9, 16, 129)
    run_compiled(
        [linear_work(PRECISIONS[precision], shape) for _ in range(2)], "cpu", backend="aot_eager"
    )


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch without gloo")
def test_a_sharded_head():
    assert_sharded_equals_whole("cpu", "gloo", "cpu")


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch without gloo")
def test_a_split_head():
    assert_parts_equal_whole("cpu", "cpu")


@pytest.mark.parametrize("way", WAYS)
def test_first_calls(way):
    WAYS[way]("cpu", "cpu", CALLS)

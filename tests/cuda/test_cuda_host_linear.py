"""The linear forms as a GPU runs them, on the CUDA kernels in their host build."""

import pytest
import torch

from tests.gpu.device import linear_workloads as workloads
from tests.support.cuda_on_host import backend, registered  # noqa: F401
from tests.triton.test_triton_linear import *  # noqa: F403

pytestmark = pytest.mark.usefixtures("tensor_cores")


@pytest.mark.parametrize("head", workloads.HEADS)
@pytest.mark.parametrize("precision", workloads.PRECISIONS)
def test_the_budgets_of_the_tests_for_a_gpu(backend, precision, head, monkeypatch):  # noqa: F811
    given = workloads.PRECISIONS[precision]
    operand = given.operand(torch.device("cuda"))
    monkeypatch.setattr(workloads.Precision, "operand", lambda self, device: operand)
    for compact in (True, False):
        shape = (2, 33, 64, 1001)
        work = workloads.linear_work(given, shape, compact=compact, **workloads.HEADS[head])
        workloads.assert_policy_loss(work, backend)
        workloads.assert_token_stats(work, backend)

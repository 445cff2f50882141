"""The calls that tests/gpu makes on a GPU, on the CPU backend: a test of those tests."""

import pytest
import torch
import torch.distributed

import fastrl
from tests.gpu.device.graph_workloads import CALLS, WAYS
from tests.gpu.device.linear_workloads import (
    HEADS,
    OBJECTIVE,
    PRECISIONS,
    Exact,
    assert_policy_loss,
    assert_token_stats,
    excess,
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


def emulated(work, *, logits_in=torch.float32, gradient_in=torch.bfloat16):
    """Loss and gradients of hidden states and weight, rounded where a GPU rounds them."""
    operand = work.precision.operand(torch.device("cuda"))
    narrow, mask = operand.itemsize == 2, work.tokens["mask"]
    hidden, weight = (work.parameters[name].to(operand) for name in ("hidden", "weight"))
    hidden = hidden.masked_fill(~mask[..., None], 0.0).flatten(0, 1)
    logits = (hidden.float() @ weight.float().t()).to(logits_in).float().requires_grad_()
    tokens = dict(work.tokens)
    loss = fastrl.logits_policy_loss(
        logits.view(*mask.shape, -1), tokens.pop("token_ids"), **tokens, objective=OBJECTIVE
    ).loss
    (g,) = torch.autograd.grad(loss, logits)
    if narrow:
        g, hidden, weight = g.to(gradient_in), hidden.bfloat16(), weight.bfloat16()
    found = {"weight": g.float().t() @ hidden.float(), "hidden": g.float() @ weight.float()}
    grads = {
        n: x.view_as(work.parameters[n]).to(work.parameters[n].dtype) for n, x in found.items()
    }
    return loss.detach(), grads


def errors(work, **roundings):
    """Which results of the emulation are not within their budgets."""
    exact = Exact(work, torch.device("cuda"))
    found, grads = emulated(work, **roundings)
    loss, budget, _, s, e = exact.loss()
    wanted = {"loss": (loss, budget), **exact.gradients(s, e)}
    came = {"loss": found, **grads}
    return [name for name in came if excess(came[name], *wanted[name]) > 1]


@pytest.mark.parametrize("shape", [(1, 1, 64, 1000), (4, 64, 256, 5003)], ids=str)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_budgets_of_a_gpu_hold_for_its_roundings_and_no_coarser_ones(precision, shape):
    work = linear_work(PRECISIONS[precision], shape)
    assert errors(work) == []
    assert "weight" in errors(work, logits_in=torch.bfloat16)
    if work.precision.operand(torch.device("cuda")).itemsize == 2:
        assert "weight" in errors(work, gradient_in=torch.float8_e4m3fn)


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

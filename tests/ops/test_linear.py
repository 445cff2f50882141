"""The weight gradient of the linear forms over very many chunks, and a frozen head."""

import math

import pytest
import torch

import fastrl
from tests.ops.linear.linear_head import H, V


@pytest.mark.kernels
@pytest.mark.not_on("reference", "triton")  # a thousand chunks of autograd say nothing new
def test_the_weight_gradient_of_1024_chunks_is_as_good_as_one_gemm(backend):
    rows = 1024
    hidden = torch.randn(rows, H).bfloat16()
    weight = (torch.randn(V, H) / math.sqrt(H)).bfloat16().requires_grad_()
    token_ids, upstream = torch.randint(V, (rows,)), torch.randn(rows)
    logprobs = fastrl.linear_token_logprobs(
        hidden, weight, token_ids, chunk_tokens=1, backend=backend
    )
    (grad,) = torch.autograd.grad((logprobs * upstream).sum(), weight)
    exact_weight = weight.detach().double().requires_grad_()
    z = hidden.double() @ exact_weight.t()
    chosen = z.log_softmax(-1)[torch.arange(rows), token_ids]
    (exact,) = torch.autograd.grad((chosen * upstream.double()).sum(), exact_weight)
    grad_logits = upstream[:, None] * (
        torch.nn.functional.one_hot(token_ids, V) - z.detach().softmax(-1)
    )
    one_gemm = grad_logits.bfloat16().t() @ hidden
    error, reference = ((g.double() - exact).norm() for g in (grad, one_gemm))
    assert error <= 1.5 * reference


def test_a_frozen_head_is_kept_and_not_copied():
    with torch.inference_mode():
        weight = torch.randn(11, 4)
    hidden = torch.randn(3, 4, requires_grad=True)
    node = fastrl.linear_token_logprobs(hidden, weight, torch.tensor([1, 2, 3])).grad_fn
    while not hasattr(node, "inference_tensors"):
        node = node.next_functions[0][0]
    (kept,) = (x for x in node.inference_tensors if x is not None)
    assert kept.data_ptr() == weight.data_ptr()

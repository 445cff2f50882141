"""The weight gradient of the linear forms over very many chunks; frozen heads, clipped chunks."""

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
    while not hasattr(node, "of_inference"):
        node = node.next_functions[0][0]
    (kept,) = node.of_inference.values()
    assert kept.data_ptr() == weight.data_ptr()


def test_a_chunk_of_clipped_rows_has_no_gradient_gemms():
    hidden, ids = torch.randn(1, 4, 8), torch.tensor([[3, 1, 4, 1]])
    weight, mask = torch.randn(11, 8), torch.ones(1, 4)
    ratio = torch.tensor([[2.0, 2.0, 1.0, 1.0]])  # the first two above the bound
    old = fastrl.linear_token_logprobs(hidden, weight, ids) - ratio.log()
    given = {"objective": fastrl.Objective(aggregation="token-sum"), "chunk_tokens": 2}
    grads = []
    for first in (0, 2):
        leaf, tokens = weight.clone().requires_grad_(), slice(first, None)
        rows = hidden[:, tokens], leaf, ids[:, tokens], torch.ones(1), mask[:, tokens]
        fastrl.linear_policy_loss(*rows, old_logprobs=old[:, tokens], **given).loss.backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)


@pytest.mark.kernels
@pytest.mark.parametrize("compact", [False, True])
def test_an_old_log_probability_of_nan_reaches_the_gradients(backend, compact):
    """Also in a row of advantage 0, which has no other gradient."""
    hidden, weight = torch.randn(1, 3, 8).requires_grad_(), torch.randn(11, 8).requires_grad_()
    ids, old, mask = torch.tensor([[3, 1, 4]]), torch.full((1, 3), -2.0), torch.ones(1, 3)
    old[0, 1] = math.nan
    given = {"old_logprobs": old, "compact": compact, "backend": backend}
    fastrl.linear_policy_loss(hidden, weight, ids, torch.zeros(1), mask, **given).loss.backward()
    assert hidden.grad[0, 1].isnan().all()
    assert (hidden.grad[0, ::2] == 0).all()
    assert weight.grad.isnan().all()

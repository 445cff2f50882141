"""Heads whose weight is a view: column-major, with gaps, or with overlapping rows or columns."""

import pytest
import torch
from test_linear import H, V, assert_near, batch, explicit, in_float64, linear

import fastrl

WEIGHTS = {
    "transposed": lambda dtype: torch.randn(H, V).to(dtype).t(),
    "part of a wider one": lambda dtype: torch.randn(V, H + 3).to(dtype)[:, 2 : 2 + H],
    "every second": lambda dtype: torch.randn(2 * V, 2 * H).to(dtype)[::2, ::2],
    "one row": lambda dtype: torch.randn(1, 2 * H).to(dtype)[:, ::2],
    "rows alike": lambda dtype: torch.randn(1, H).to(dtype).expand(V, H),
    "all alike": lambda dtype: torch.randn(1, 1).to(dtype).expand(V, H),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_in_any_memory(backend, name, dtype):
    parameters, tokens, _ = batch(dtype)
    weight = WEIGHTS[name](dtype)
    tokens["token_ids"] %= weight.shape[0]
    parameters["weight"] = weight.requires_grad_()
    result = linear(parameters, fastrl.linear_policy_loss, **tokens, backend=backend)
    result.loss.backward()
    truth = in_float64(parameters)
    exact = explicit(truth, fastrl.logits_policy_loss, **in_float64(tokens))
    exact.loss.backward()
    assert_near(result.loss.detach(), exact.loss.detach(), torch.float32, "loss")
    assert_near(parameters["weight"].grad, truth["weight"].grad, dtype, "weight")

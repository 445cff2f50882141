"""The one-pass loss from logits: the same bits as its parts, and float16 under a loss scale."""

import pytest
import torch

import fastrl
from tests.ops.closeness import assert_same
from tests.ops.entry_points import ENTRIES, FEW

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("name", FEW)
def test_it_equals_its_parts(backend, name):
    entry = ENTRIES[f"logits_policy_loss {name}"]
    inputs = entry.draw(3, 4, torch.float32)
    if name == "function" and backend != "reference":
        backend = "auto"  # as a function needs
    whole = entry.call(backend, inputs)
    logits, token_ids = inputs.pop("logits"), inputs.pop("token_ids")
    stats = fastrl.token_stats(logits, token_ids, mask=inputs["mask"], backend=backend)
    inputs |= {"logprobs": stats.logprobs, "entropy": stats.entropy}
    parts = ENTRIES[f"policy_loss {name}"].call(backend, inputs)
    assert_same(parts, {key: whole[key] for key in parts})


def test_fp16_gradients_that_would_underflow_survive_a_loss_scale(backend):
    logits = torch.zeros(1, 2, 4, dtype=torch.float16, requires_grad=True)
    token_ids, mask = torch.tensor([[0, 1]]), torch.ones(1, 2)
    tiny = torch.tensor([1e-9])
    loss = fastrl.logits_policy_loss(logits, token_ids, tiny, mask, backend=backend).loss
    (loss * 2.0**20).backward()
    expected = -1e-9 * 2.0**20 / 2 * 0.75
    assert abs(logits.grad[0, 0, 0].item() - expected) <= 1e-3 * abs(expected)

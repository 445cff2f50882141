"""The one-pass loss from logits: the same bits as its parts, and float16 under a loss scale."""

import pytest
import torch

import fastrl
from fastrl import Objective, Teacher
from tests.calls.entries import ENTRIES, FEW
from tests.ops.closeness import assert_same

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


@pytest.mark.parametrize("form", ["logits", "linear"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"teacher_coef": 0.5},
        {"teacher_coef": 0.5, "entropy_coef": 0.1},
        {"kl_coef": 0.1},
        {"kl_coef": 0.1, "kl_estimator": "exact"},
        {"kl_coef": 0.1, "kl_estimator": "exact", "surrogate": "reinforce"},
    ],
)
def test_zero_grad_fraction_counts_the_tokens_without_any_gradient(backend, form, fields):
    """A masked one; two of the teacher's own; sequences with an advantage and without."""
    logits, ids = torch.randn(3, 4, 9).requires_grad_(), torch.randint(9, (3, 4))
    other, mask = torch.randn(3, 4, 9), torch.ones(3, 4)
    other[0, :2] = logits.detach()[0, :2]
    other[2, 0], mask[2, 1] = logits.detach()[2, 0], 0
    o, options = Objective(**fields), {}
    if o.teacher_coef or o.has_exact_kl:
        options["teacher"] = Teacher.from_logits(other)
    elif o.kl_coef:
        options["ref_logprobs"] = fastrl.token_logprobs(other, ids, backend=backend)
    if form == "linear" and "teacher" in options:
        options["teacher"] = Teacher.from_hidden(other, torch.eye(9))
    head = [torch.eye(9)] * (form == "linear")
    result = getattr(fastrl, f"{form}_policy_loss")(
        logits,
        *head,
        ids,
        torch.tensor([0.0, 1.0, 0.0]),
        mask,
        objective=o,
        backend=backend,
        **options,
    )
    result.loss.backward()
    still = (logits.grad.abs().amax(-1) == 0) & (mask > 0)
    assert result.metrics["zero_grad_fraction"].item() == pytest.approx(still.sum().item() / 11)

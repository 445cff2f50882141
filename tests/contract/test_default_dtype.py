"""`torch.set_default_dtype` changes no bit of any function or drop-in."""

import pytest
import torch

import fastrl
from fastrl.integrations.liger.distillation import LigerFusedLinearJSDLoss
from fastrl.integrations.verl.aggregation import agg_loss
from fastrl.integrations.verl.group_baselines import compute_gpg_outcome_advantage
from tests.calls.entries import entries, outcome
from tests.ops.closeness import assert_same

OTHERS = (torch.bfloat16, torch.float16, torch.float64)


def assert_same_with_every_default(compute):
    wanted, usual = compute(), torch.get_default_dtype()
    for dtype in OTHERS:
        torch.set_default_dtype(dtype)
        try:
            found = compute()
        finally:
            torch.set_default_dtype(usual)
        assert_same(found, wanted, dtype)


@pytest.mark.kernels
@entries()
def test_of_every_function(backend, entry):
    of_reference = (torch.float64,) * (backend == "reference")
    for dtype in (torch.float32, *of_reference):
        inputs = entry.draw(3, 7, dtype)
        assert_same_with_every_default(lambda inputs=inputs: outcome(entry, backend, inputs))


def liger_distillation():
    hidden = STATES.clone().requires_grad_()
    loss = LigerFusedLinearJSDLoss(weight_hard_loss=0.3, weight_soft_loss=0.7)(
        hidden, WEIGHT, 2 * STATES, WEIGHT, torch.arange(7)
    )
    loss.backward()
    return {"loss": loss.detach(), "gradient": hidden.grad}


def top_tokens():
    logits = WEIGHT.clone().requires_grad_()
    ids = torch.tensor([[0, 3]]).expand(9, 2)
    teacher = fastrl.Teacher.from_top_k(ids, -1 - WEIGHT[:, :2])
    found = fastrl.token_divergence(logits, teacher, temperature=0.7)
    return {"divergence": found.detach(), "gradient": torch.autograd.grad(found.sum(), logits)[0]}


STATES, WEIGHT, REWARDS = torch.rand(7, 5), torch.rand(9, 5), torch.eye(7)
MASK = torch.ones(7, 7, dtype=torch.int64)
OTHER_CALLS = {
    "a temperature beside a teacher's tokens": top_tokens,
    "Liger's distillation": liger_distillation,
    "verl's GPG": lambda: {
        "advantages": compute_gpg_outcome_advantage(
            REWARDS * torch.tensor([0, 0, 1, 1, 1, 0, 0])[:, None], MASK, ["a", "b"] * 3 + ["a"]
        )[0]
    },
    "verl's aggregation": lambda: {
        "loss": agg_loss(REWARDS, MASK, "token-mean", 3, torch.tensor(1001))
    },
    "global_normalizer": lambda: {
        "count": fastrl.global_normalizer([MASK] * 83, aggregation="token-mean")
    },
}


@pytest.mark.parametrize("compute", OTHER_CALLS.values(), ids=OTHER_CALLS)
def test_of_other_calls_and_drop_ins(compute):
    assert_same_with_every_default(compute)

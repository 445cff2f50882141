"""The number of operators that a public call runs, except views: each is a launch on a GPU."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fastrl
from fastrl import Objective, native

pytestmark = pytest.mark.skipif(native.missing is not None, reason=str(native.missing))


class Counted(TorchDispatchMode):
    """Records every operator that is not a view."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        # unbind is a view that the schema does not mark as such
        if not (operator.is_view or operator is torch.ops.aten.unbind.int):
            self.names.append(str(operator))
        return operator(*args, **(kwargs or {}))


def operators_of(call):
    with Counted() as counted:
        call()
    return counted.names


def batch(sequences=3, tokens=5, vocabulary=11):
    logprobs = -torch.rand(sequences, tokens)
    lengths = torch.tensor([5, 2, 3])
    return {
        "logits": torch.randn(sequences, tokens, vocabulary),
        "token_ids": torch.randint(vocabulary, (sequences, tokens)),
        "logprobs": logprobs,
        "advantages": torch.randn(sequences),
        "mask": torch.arange(tokens) < lengths[:, None],
        "old_logprobs": logprobs + 0.1,
        "ref_logprobs": logprobs - 0.1,
    }


NORMALIZERS = {
    "local counts": None,
    "a global count": 40.0,
    "a global count as a tensor": torch.tensor(40),
}
MASKS = (torch.bool, torch.int64, torch.float32)
OBJECTIVES = {
    name: Objective.preset(name, kl_coef=0.04)
    for name in ("grpo", "dapo", "gspo", "luspo", "dr_grpo")
}


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("normalizer", NORMALIZERS.values(), ids=NORMALIZERS)
@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_policy_loss_runs_at_most_four(objective, normalizer, mask):
    given = batch()
    logprobs = given["logprobs"].requires_grad_()

    def call():
        result = fastrl.policy_loss(
            logprobs,
            given["advantages"],
            given["mask"].to(mask),
            old_logprobs=given["old_logprobs"],
            ref_logprobs=given["ref_logprobs"],
            objective=objective,
            normalizer=normalizer,
            backend="cpu",
        )
        result.loss.backward()

    given["mask"] = given["mask"].to(mask)
    names = operators_of(call)
    assert len(names) <= 4, names
    assert logprobs.grad is not None


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("normalizer", NORMALIZERS.values(), ids=NORMALIZERS)
@pytest.mark.parametrize("name", ["grpo", "dapo"])
def test_logits_policy_loss_runs_at_most_five(name, normalizer, mask):
    given = batch()
    logits = given["logits"].requires_grad_()
    given["mask"] = given["mask"].to(mask)

    def call():
        result = fastrl.logits_policy_loss(
            logits,
            given["token_ids"],
            given["advantages"],
            given["mask"],
            old_logprobs=given["old_logprobs"],
            ref_logprobs=given["ref_logprobs"],
            objective=OBJECTIVES[name],
            normalizer=normalizer,
            backend="cpu",
        )
        result.loss.backward()

    names = operators_of(call)
    assert len(names) <= 5, names
    assert logits.grad is not None


@pytest.mark.parametrize("mask", [None, *MASKS], ids=str)
def test_token_logprobs_runs_one(mask):
    given = batch()
    mask = None if mask is None else given["mask"].to(mask)
    logits = given["logits"].requires_grad_()
    names = operators_of(
        lambda: fastrl.token_logprobs(logits, given["token_ids"], mask=mask, backend="cpu")
    )
    assert names == ["fastrl.token_stats_fwd.default"]


def test_gae_runs_one():
    given = batch()
    names = operators_of(
        lambda: fastrl.gae(given["logprobs"], given["old_logprobs"], given["mask"], backend="cpu")
    )
    assert names == ["fastrl.gae_fwd.default"]


@pytest.mark.parametrize("grouping", [{"group_size": 3}, {"group_ids": torch.tensor([5, 1, 5])}])
def test_group_advantages_runs_one(grouping):
    rewards = torch.randn(3)
    names = operators_of(lambda: fastrl.group_advantages(rewards, backend="cpu", **grouping))
    assert names == ["fastrl.group_advantages_fwd.default"]

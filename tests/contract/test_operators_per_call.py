"""The number of operators that a public call runs, except views: each is a launch on a GPU."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fastrl
from fastrl import Objective

pytestmark = pytest.mark.usefixtures("compiled")

B, T, V = 3, 5, 11
MASKS = (torch.bool, torch.int64, torch.float32)
NORMALIZERS = {
    "local counts": None,
    "a global count": 40.0,
    "a global count as a tensor": torch.tensor(40),
}


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


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("normalizer", NORMALIZERS.values(), ids=NORMALIZERS)
@pytest.mark.parametrize(
    ("form", "preset", "most"),
    [("logprobs", name, 4) for name in ("grpo", "dapo", "gspo", "luspo", "dr_grpo")]
    + [("logits", name, 5) for name in ("grpo", "dapo")],
)
def test_a_loss_and_its_gradient(form, preset, most, normalizer, mask):
    inputs, function = torch.randn(B, T), fastrl.policy_loss
    if form == "logits":
        inputs, function = torch.randn(B, T, V), fastrl.logits_policy_loss
    leaf, ids = inputs.requires_grad_(), torch.randint(V, (B, T))
    valid = (torch.arange(T) < torch.tensor([[5], [2], [3]])).to(mask)
    advantages, old, ref = torch.randn(B), torch.randn(B, T), torch.randn(B, T)
    with Counted() as counted:
        function(
            *((leaf, ids) if form == "logits" else (leaf,)),
            advantages,
            valid,
            old_logprobs=old,
            ref_logprobs=ref,
            objective=Objective.preset(preset, kl_coef=0.04),
            normalizer=normalizer,
            backend="cpu",
        ).loss.backward()
    assert len(counted.names) <= most, counted.names
    assert leaf.grad is not None


LOGITS, IDS, TOKENS = torch.randn(B, T, V), torch.randint(V, (B, T)), torch.randn(B, T)
REWARDS, GROUPS = torch.randn(B), torch.tensor([5, 1, 5])
ALL = {dtype: torch.ones(B, T, dtype=dtype) for dtype in MASKS}
SINGLE = [
    ("token_stats_fwd", fastrl.token_logprobs, (LOGITS, IDS), {}),
    *(("token_stats_fwd", fastrl.token_logprobs, (LOGITS, IDS), {"mask": x}) for x in ALL.values()),
    ("gae_fwd", fastrl.gae, (TOKENS, TOKENS, ALL[torch.bool]), {}),
    ("group_advantages_fwd", fastrl.group_advantages, (REWARDS,), {"group_size": 3}),
    ("group_advantages_fwd", fastrl.group_advantages, (REWARDS,), {"group_ids": GROUPS}),
]


@pytest.mark.parametrize(("operator", "function", "arguments", "options"), SINGLE)
def test_a_single_operator(operator, function, arguments, options):
    with Counted() as counted:
        function(*arguments, **options, backend="cpu")
    assert counted.names == [f"fastrl.{operator}.default"]

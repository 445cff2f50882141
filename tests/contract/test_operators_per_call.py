"""The number of operators that a public call runs, except views: each is a launch on a GPU."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.calls.case import Case
from tests.calls.combined import each
from tests.calls.entries import Entry

pytestmark = pytest.mark.usefixtures("compiled")

MASKS = ["bool", "int64", "float32"]


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


LOSSES = each(
    mask="ragged",
    mask_dtype=MASKS,
    fields={"kl_coef": 0.04},
    old="near",
    ref="near",
    advantages="sequence",
    normalizer=[None, 40.0, (40,)],  # local counts, a global one, one as a tensor
    objective=["grpo", "dapo", "gspo", "luspo", "dr_grpo"],
)
OF_LOGITS = [one for one in LOSSES if one["objective"] in ("grpo", "dapo")]


@pytest.mark.parametrize(
    ("case", "most"),
    [(Case("policy_loss", **one), 4) for one in LOSSES]
    + [(Case("logits_policy_loss", vocabulary=11, **one), 5) for one in OF_LOGITS],
    ids=str,
)
def test_a_loss_and_its_gradient(case, most):
    entry = Entry(case)
    inputs = entry.draw(3, 5, torch.float32)
    leaf = inputs[entry.leaves[0]].requires_grad_()
    arguments, call = entry.arguments(inputs), entry.function
    with Counted() as counted:
        call(**arguments, backend="cpu").loss.backward()
    assert len(counted.names) <= most, counted.names
    assert leaf.grad is not None


GROUPS = Case("group_advantages", mask="absent", layout="packed")
ROWS = Case("token_logprobs", vocabulary=11)
SINGLE = [
    ("token_stats_fwd", ROWS.changed(mask="absent")),
    *(("token_stats_fwd", ROWS.changed(mask_dtype=dtype)) for dtype in MASKS),
    ("gae_fwd", Case("gae")),
    ("group_advantages_fwd", GROUPS),
    ("group_advantages_fwd", GROUPS.changed(groups="ids")),
]


@pytest.mark.parametrize(("operator", "case"), SINGLE, ids=str)
def test_a_single_operator(operator, case):
    entry = Entry(case)
    arguments, call = entry.arguments(entry.draw(2, 2, torch.float32)), entry.function
    with Counted() as counted:
        call(**arguments, backend="cpu")
    assert counted.names == [f"fastrl.{operator}.default"]

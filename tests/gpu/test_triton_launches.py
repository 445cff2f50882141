"""How Triton kernels are registered and launched."""

import importlib

import pytest
import torch

from fastrl import Objective
from fastrl.contract import LossArguments, RowArguments
from fastrl.library import operators
from fastrl.triton.runtime.registration import OPERATORS
from tests.calls.entries import ENTRIES
from tests.contract.operator_calls import operator_calls

pytestmark = [pytest.mark.kernels_alone, pytest.mark.not_on("cuda")]
ROWS = RowArguments(
    token_ids=torch.zeros(1, 1, dtype=torch.int64),
    mask=None,
    ignore_index=-100,
    temperatures=None,
    temperature=1.0,
    logit_scale=1.0,
    logit_softcap=0.0,
)


def modules(*names):
    return [importlib.import_module(f"fastrl.triton.vocabulary.{name}") for name in names]


def test_opcheck_of_every_operator(backend):
    chosen = ("policy_loss by term", "logits_policy_loss ppo", "token_stats outputs", "gae")
    chosen = [
        ENTRIES[name]
        for name in (*chosen, "token_weights prompt-mean", "group_advantages mean group")
    ]
    calls = operator_calls("triton", wanted=lambda entry: entry in chosen)
    calls[operators("triton").scale_.default] = [(torch.randn(2, 3, 40)[:, :-1], torch.tensor(0.5))]
    seen = set()
    for operator, given in calls.items():
        if operator.namespace.startswith("fastrl_triton"):
            for arguments in given:
                torch.library.opcheck(operator, arguments)
            seen.add(operator.name().partition("::")[2])
    assert seen == set(OPERATORS)


class Launches:
    """Stands in for a kernel and keeps the grids that it is launched on."""

    def __init__(self):
        self.grids = []

    def __getitem__(self, grid):
        self.grids.append(grid)
        return lambda **arguments: None


def test_rows_are_on_the_first_axis_of_the_grid(backend, monkeypatch):
    """The other two axes end at 65,535 programs."""
    stats, policy = modules("token_stats", "logits_policy_loss")
    launches = Launches()
    monkeypatch.setattr(stats, "token_stats_fwd_kernel", launches)
    monkeypatch.setattr(stats, "token_stats_bwd_kernel", launches)
    monkeypatch.setattr(policy, "logits_policy_loss_kernel", launches)
    logits = torch.zeros(1, 1, 8).expand(70_000, 2, 8)
    row = torch.zeros(1, 1).expand(70_000, 2)
    rows = ROWS._replace(token_ids=row.long(), mask=row.bool())
    stats.token_stats_fwd(logits, *rows, True, True)
    stats.token_stats_bwd(logits, *rows, row, row, row, row, None, None)
    loss = LossArguments(row, row, None, None, None, None, None, None)
    policy.logits_policy_loss_fwd(logits, *rows, *loss, *Objective().arguments)
    assert launches.grids == [(140_000,)] * 3

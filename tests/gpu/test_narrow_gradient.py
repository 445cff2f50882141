"""The narrow mode: float32 logits make room for a gradient in bfloat16, in half of each row.

It is the gradient in float32, whose values tests/gpu/test_rows.py has, rounded once.
"""

from math import nan

import pytest
import torch

from fastrl.library import operators
from tests.gpu.rows import (
    OPTIONS,
    loss_of,
    rows_of,
    saved,
    shared_out,
    token_stats,
)

pytestmark = pytest.mark.kernels_alone  # the mode is for GPUs

# (vocabulary, stride): ends within a vector, gradients that begin within one, blocks that are
# written where others begin, and more parts than a cluster has blocks
SHAPES = [
    (1, 4),
    (37, 40),
    (40, 40),
    pytest.param(
        37, 41, marks=pytest.mark.not_on("cuda")
    ),  # it wants rows at multiples of 16 bytes
    (1000, 1000),
    (5001, 5008),
    (33_000, 33_000),
]


class Workspace:
    """Rows of float32 logits; NaN in the padding and in the last row, which does not count."""

    def __init__(self, V, stride, B=1, T=4):
        self.stride, self.V = stride, V
        self.memory = torch.full((B * T, stride), nan)
        self.logits = self.memory.as_strided((B, T, V), (T * stride, stride, 1))
        self.logits.normal_(std=3)
        self.token_ids = torch.randint(V, (B, T))
        # the gradient of V - 1 is the last to be written, over the last logits
        self.token_ids.view(-1)[:2] = torch.tensor([V - 1, 0])[: B * T]
        self.mask = torch.ones(B, T, dtype=torch.bool)
        if B * T > 1:
            self.mask[-1, -1] = False
            self.logits[-1, -1] = nan

    def gradients(self, operator, *arguments):
        """Run in place, in float32 and narrow; return other results and the narrow gradient."""
        before = self.memory.clone()
        results = operator(self.logits, *arguments, False)
        wide = self.logits.clone()
        self.memory.copy_(before)
        for one, other in zip(
            operator(self.logits, *arguments, True) or (), results or (), strict=True
        ):
            assert torch.equal(one, other)
        halves = self.memory.view(torch.bfloat16)
        written = halves[:, self.stride : self.stride + self.V]
        narrow = written.clone().view(wide.shape)
        written.copy_(before.view(torch.bfloat16)[:, self.stride : self.stride + self.V])
        assert torch.equal(self.memory.view(torch.int32), before.view(torch.int32))
        assert torch.equal(narrow, wide.bfloat16())
        assert not narrow[~self.mask].any()
        return results, narrow


@pytest.mark.some_on("triton")
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "softcap", "temperatures"])
@pytest.mark.parametrize(("V", "stride"), SHAPES)
def test_token_stats_backward(backend, V, stride, options):
    work = Workspace(V, stride)
    grads = [torch.randn(1, 4) for _ in range(3)]
    grads[0][0, 1] = grads[1][0, 1] = grads[2][0, 1] = 0
    rows = rows_of(work.token_ids, work.mask, **options)
    of_stats = saved(token_stats(backend, work.logits, rows))
    _, narrow = work.gradients(operators(backend).token_stats_bwd_, *rows, *of_stats, *grads)
    assert not narrow[0, 1].any()


@pytest.mark.some_on("triton")
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "softcap", "temperatures"])
@pytest.mark.parametrize(("V", "stride"), SHAPES)
def test_the_loss_in_one_pass(backend, monkeypatch, V, stride, options):
    work = Workspace(V, stride)
    loss = loss_of(work.logits, work.token_ids, work.mask, **options)
    rows = rows_of(work.token_ids, work.mask, **options)
    given = (operators(backend).logits_policy_loss_fwd_, *rows, *loss[0], *loss[1])
    results, narrow = work.gradients(*given)
    with shared_out(backend, monkeypatch):
        again, same = work.gradients(*given)
    assert torch.equal(same, narrow)
    assert all(map(torch.equal, results, again))


@pytest.mark.parametrize(("B", "T"), [(1, 1), (3, 2), (1, 45)])
def test_any_number_of_rows(backend, B, T):
    work = Workspace(1000, 1008, B, T)
    loss, objective = loss_of(work.logits, work.token_ids, work.mask)
    given = (*rows_of(work.token_ids, work.mask), *loss, *objective)
    work.gradients(operators(backend).logits_policy_loss_fwd_, *given)


@pytest.mark.parametrize(
    "logits",
    [
        torch.zeros(1, 3, 40, dtype=torch.bfloat16),
        torch.zeros(1, 1, 40).expand(1, 3, 40),
        torch.zeros(6, 2, 48)[:3].transpose(0, 1)[..., :40],
    ],
    ids=["bfloat16", "one memory", "out of order"],
)
def test_what_cannot_be_narrowed_is_refused(backend, logits):
    row = torch.ones(logits.shape[:2])
    rows = rows_of(row.long())
    with pytest.raises((ValueError, RuntimeError), match=r"narrow|share|rows|dtype"):
        operators(backend).token_stats_bwd_(logits, *rows, *[row] * 4, None, None, True)

"""A bfloat16 gradient in the second half of each row of float32 logits, beside the float32 one."""

import math
from typing import NamedTuple

import pytest
import torch

import fastrl
from fastrl import Objective
from fastrl.contract import LossArguments, RowArguments, RowStats
from fastrl.library import operators
from fastrl.triton.runtime.registration import INTERPRETED

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="runs where TRITON_INTERPRET=1 says so"),
    pytest.mark.interpreted,
]

OBJECTIVE = Objective(aggregation="token-sum", kl_coef=0.1, entropy_coef=0.01)
ROWS = 5
MASK = torch.tensor([[1, 1, 0, 1, 1]])
NO_SLOPE = 3  # an active row whose loss does not depend on it


class Shape(NamedTuple):
    vocabulary: int
    stride: int
    softcap: float = 0.0
    per_row: bool = False
    rows: int = ROWS


SHAPES = [
    Shape(37, 40),
    Shape(37, 40, rows=1),
    Shape(40, 40, softcap=20.0),
    Shape(37, 41),  # rows and gradients at any multiple of 4 and 2 bytes
    Shape(1000, 1000, per_row=True),
    Shape(1000, 1008, softcap=20.0, per_row=True),
    Shape(20_000, 20_000),  # one whole block and a tail
    Shape(33_000, 33_000, per_row=True),  # the last block is written where the first one begins
]


class Chunk:
    """Rows of logits in a workspace whose masked rows and padding hold NaN."""

    def __init__(self, shape):
        self.shape = shape
        V, stride = shape.vocabulary, shape.stride
        workspace = torch.full((shape.rows * stride,), math.nan).view(shape.rows, stride)
        workspace[:, :V] = torch.randn(shape.rows, V) * 3
        self.mask = MASK[:, : shape.rows]
        workspace[self.mask[0] == 0] = math.nan
        self.workspace = workspace
        self.ids = torch.randint(V, (1, shape.rows))
        self.ids[0, 0] = V - 1  # whose gradient is the last to be written, over the last logits
        heat = torch.rand(1, shape.rows) + 0.5 if shape.per_row else None
        self.temperature = 1.0 if shape.per_row else 0.8
        self.rows = RowArguments(
            self.ids, self.mask, -100, heat, self.temperature, 1.0, shape.softcap
        )

    def logits(self, workspace):
        return workspace[None, :, : self.shape.vocabulary]

    def gradients(self, operator, *arguments):
        """Run in place, in float32 and narrow; return the other results and both gradients."""
        wide, narrow = self.workspace.clone(), self.workspace.clone()
        found = operator(self.logits(wide), *self.rows, *arguments, False)
        found_narrow = operator(self.logits(narrow), *self.rows, *arguments, True)
        for one, other in zip(found or (), found_narrow or (), strict=True):
            assert torch.equal(one, other)
        stride, V = self.shape.stride, self.shape.vocabulary
        halves = narrow.view(torch.bfloat16)
        grad = halves[:, stride : stride + V].clone()
        # nothing else was written
        halves[:, stride : stride + V] = self.workspace.view(torch.bfloat16)[:, stride : stride + V]
        assert torch.equal(narrow.view(torch.int32), self.workspace.view(torch.int32))
        return found_narrow, self.logits(wide)[0], grad

    def settings(self):
        softcap, heat = self.shape.softcap, self.rows.temperatures
        return {
            "mask": self.mask,
            "temperature": self.temperature if heat is None else heat.double(),
            "logit_softcap": softcap or None,
            "backend": "reference",
        }


def assert_rounded(narrow, wide, exact):
    """The gradient is the float32 one rounded once, and that is near the one in float64."""
    assert torch.equal(narrow, wide.bfloat16())
    assert torch.isfinite(narrow).all()
    budget = 2.0**-8 * exact.abs() + 4e-6 * exact.abs().amax(-1, keepdim=True) + 1e-38
    assert ((narrow.double() - exact).abs() <= budget).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_backward(shape):
    chunk = Chunk(shape)
    grads = [torch.randn(1, shape.rows) for _ in range(3)]
    for grad in grads:
        grad[:, NO_SLOPE:] = 0
    given = (chunk.logits(chunk.workspace), *chunk.rows, True, False)
    stats = RowStats._make(operators("triton").token_stats_fwd(*given))
    saved = (stats.row_max, stats.log_sum, stats.entropy)
    _, wide, narrow = chunk.gradients(operators("triton").token_stats_bwd_, *saved, *grads)
    leaf = chunk.logits(chunk.workspace).double().requires_grad_()
    outputs = ("logprobs", "entropy", "logsumexp")
    exact = fastrl.token_stats(leaf, chunk.ids, outputs=outputs, **chunk.settings())
    sum((getattr(exact, n) * g).sum() for n, g in zip(outputs, grads, strict=True)).backward()
    assert_rounded(narrow, wide, leaf.grad[0])
    assert torch.equal(narrow[NO_SLOPE:], torch.zeros_like(narrow[NO_SLOPE:]))


@pytest.mark.parametrize("entropy_coef", [0.0, 0.01])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_pass(shape, entropy_coef):
    chunk = Chunk(shape)
    objective = Objective(aggregation="token-sum", kl_coef=0.1, entropy_coef=entropy_coef)
    exact_logits = chunk.logits(chunk.workspace).double()
    exact_stats = fastrl.token_stats(exact_logits, chunk.ids, **chunk.settings())
    old = (exact_stats.logprobs + 0.1).float()
    ones = torch.ones(1, shape.rows)
    advantages = torch.linspace(-1, 2, ROWS)[None, : shape.rows].contiguous()
    loss = LossArguments(advantages, ones, None, None, None, old, old - 0.2, None)
    (logprobs, _), wide, narrow = chunk.gradients(
        operators("triton").logits_policy_loss_fwd_, *loss, *objective.arguments
    )
    torch.testing.assert_close(logprobs.double(), exact_stats.logprobs, rtol=2e-6, atol=2e-6)
    leaf = exact_logits.requires_grad_()
    result = fastrl.logits_policy_loss(
        leaf,
        chunk.ids,
        advantages.double(),
        old_logprobs=old.double(),
        ref_logprobs=(old - 0.2).double(),
        objective=objective,
        **chunk.settings(),
    )
    result.loss.backward()
    assert_rounded(narrow, wide, leaf.grad[0])


def test_a_row_is_not_split_over_programs(monkeypatch):
    from fastrl.triton.vocabulary import rows

    shape = Shape(33_000, 33_000, rows=2)
    chunk, ones = Chunk(shape), torch.ones(1, 2)
    loss = LossArguments(ones, ones, None, None, None, ones - 12, ones - 12, None)
    arguments = (operators("triton").logits_policy_loss_fwd_, *loss, *OBJECTIVE.arguments)
    _, _, whole = chunk.gradients(*arguments)
    monkeypatch.setattr(rows, "processors", lambda device: 10**6)
    assert rows.splits_of(chunk.logits(chunk.workspace)) > 1
    _, wide, narrow = chunk.gradients(*arguments)
    assert torch.equal(narrow, whole)
    assert torch.equal(narrow, wide.bfloat16())


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (torch.zeros(1, 3, 40, dtype=torch.bfloat16), "narrow expected torch.float32, got"),
        (torch.zeros(1, 1, 40).expand(1, 3, 40), "narrow expected rows in order"),
        (torch.zeros(6, 2, 48)[:3].transpose(0, 1)[..., :40], "narrow expected rows in order"),
    ],
)
def test_what_cannot_be_narrowed_is_refused(logits, message):
    row = torch.ones(logits.shape[:2])
    rows = RowArguments(row.long(), None, -100, None, 1.0, 1.0, 0.0)
    with pytest.raises(ValueError, match=message):
        operators("triton").token_stats_bwd_(logits, *rows, *[row] * 4, None, None, True)

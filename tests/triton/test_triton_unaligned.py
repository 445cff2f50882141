"""Rows of logits that begin, or end, between multiples of 16 bytes."""

import itertools
import math

import pytest
import torch

from fastrl import Objective
from fastrl.contract import LossArguments, RowArguments, RowStats
from fastrl.library import operators
from fastrl.triton.runtime.registration import INTERPRETED

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="runs where TRITON_INTERPRET=1 says so"),
    pytest.mark.interpreted,
]

ROWS = 3
OBJECTIVE = Objective(kl_coef=0.1, entropy_coef=0.01).arguments
BITS = {2: torch.int16, 4: torch.int32}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def bits(x):
    return x.view(BITS[x.element_size()])


def operators_on(logits, ids, softcap=0.0):
    """All results of a row and both gradients, fresh and in place; `logits` is overwritten."""
    run, row = operators("triton"), torch.ones(1, ROWS)
    mask = torch.tensor([[True, False, True]])
    rows = RowArguments(ids, mask, -100, None, 0.9, 1.0, softcap)
    stats = RowStats._make(run.token_stats_fwd(logits, *rows, True, True))
    saved = (stats.row_max, stats.log_sum, stats.entropy, row, 0.3 * row, -0.2 * row)
    backward = run.token_stats_bwd(logits, *rows, *saved)
    loss = LossArguments(row, row, None, None, None, row - 4, row - 5, None)
    *values, one_pass = run.logits_policy_loss_fwd(logits, *rows, *loss, *OBJECTIVE)
    buffer = logits.clone()
    run.token_stats_bwd_(logits, *rows, *saved, False)
    in_place = logits.clone()
    logits.copy_(buffer)
    run.logits_policy_loss_fwd_(logits, *rows, *loss, *OBJECTIVE, False)
    assert torch.equal(bits(in_place), bits(backward))
    assert torch.equal(bits(logits), bits(one_pass))
    return [*stats, *values, backward, one_pass]


@pytest.mark.parametrize(
    ("V", "softcap", "paddings", "starts"),
    [
        (1, 0.0, (0,), (3,)),
        (9, 20.0, (0, 6), (1, 3)),  # within 16 bytes, or over two such boundaries
        (1021, 0.0, (0,), range(8)),
        (17_001, 0.0, (2,), (1,)),  # a whole block and a tail
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_bit_depends_on_where_rows_begin(dtype, V, softcap, paddings, starts):
    """Rows amid NaN that must stay, against rows at multiples of 16 bytes."""
    logits = (torch.randn(1, ROWS, V) * 3).to(dtype)
    ids = torch.tensor([[0, V // 2, V - 1]])
    width = 16 // logits.element_size()
    aligned = torch.zeros(1, ROWS, -(-V // width) * width, dtype=dtype)[..., :V]
    aligned.copy_(logits)
    expected = operators_on(aligned, ids, softcap)
    for start, padding in itertools.product(starts, paddings):
        stride = V + padding
        size, begin = (1, ROWS, V), width + start % width
        buffer = torch.full((begin + ROWS * stride + width,), math.nan).to(dtype)
        view = buffer.as_strided(size, (ROWS * stride, stride, 1), begin)
        view.copy_(logits)
        untouched = buffer.clone()
        found = operators_on(view, ids, softcap)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
        view.copy_(logits)
        assert torch.equal(bits(buffer), bits(untouched))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_gradient_and_logits_begin_apart(dtype):
    """Rows without the last token, of an odd vocabulary; their gradient is contiguous."""
    from fastrl.triton.vocabulary.rows import launch_options

    whole = (torch.randn(3, 4, 1021) * 3).to(dtype)
    ids = torch.randint(1021, (3, 3))
    ids[0, 0], ids[1, 0], ids[2, 2] = 0, 1020, 1019
    fresh = torch.zeros(3, 3, 1021, dtype=dtype)
    assert not launch_options(whole[:, :-1], fresh, softcap=0.0)["SPEC"].together
    rows = RowArguments(ids, ids != 5, -100, None, 0.9, 1.0, 0.0)
    row = torch.ones(3, 3)
    loss = LossArguments(row, row, None, None, None, row - 4, row - 5, None)
    found, expected = (
        operators("triton").logits_policy_loss_fwd(logits, *rows, *loss, *OBJECTIVE)
        for logits in (whole[:, :-1], whole[:, :-1].contiguous())
    )
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("token_id", [0, 16_384])  # in block 0, which begins behind the head
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_row_split_over_programs_begins_anywhere(monkeypatch, dtype, token_id):
    from fastrl.triton.vocabulary import rows

    V = 33_001  # two whole blocks and a tail, or one and a tail behind the head
    ids = torch.tensor([[token_id, 5, V - 1]])
    buffer = (torch.randn(3 + ROWS * V) * 3).to(dtype)
    whole, split = (buffer.clone()[3:].view(1, ROWS, V) for _ in range(2))
    expected = operators_on(whole, ids)
    monkeypatch.setattr(rows, "processors", lambda device: 10**6)
    assert rows.splits_of(split) > 1
    for one, other in zip(operators_on(split, ids), expected, strict=True):
        assert torch.equal(one, other)

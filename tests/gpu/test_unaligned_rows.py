"""Where a row of logits lies, and where its gradient does, shows in no bit of its results."""

from math import nan

import pytest
import torch

from fastrl.library import operators
from tests.gpu.rows import (
    DTYPES,
    loss_of,
    make_rows,
    one_pass,
    rows_of,
    saved,
    shared_out,
    token_stats,
)

pytestmark = pytest.mark.kernels_alone  # no backend but those for GPUs promises it
BITS = {2: torch.int16, 4: torch.int32}


def placed(x, start, padding):
    """Return a copy that begins `start` elements behind a vector, and its memory, else NaN."""
    _, T, V = x.shape
    stride, lanes = V + padding, 16 // x.element_size()
    memory = torch.full((2 * lanes + T * stride + 16,), nan, dtype=x.dtype)
    assert memory.data_ptr() % 16 == 0
    return memory.as_strided((1, T, V), (T * stride, stride, 1), lanes + start).copy_(x), memory


def results(backend, logits, memory, rows, loss):
    """All results of rows and both gradients, fresh and in place."""
    before = memory.clone()
    stats = token_stats(backend, logits, rows)
    row = torch.ones(rows.token_ids.shape)
    given = (logits, *rows, *saved(stats), row, 0.3 * row, -0.2 * row)
    backward = operators(backend).token_stats_bwd(*given)
    *values, forward = one_pass(backend, logits, rows, *loss)
    for grad, operator, arguments in (
        (backward, "token_stats_bwd_", given),
        (forward, "logits_policy_loss_fwd_", (logits, *rows, *loss[0], *loss[1])),
    ):
        getattr(operators(backend), operator)(*arguments, False)
        assert torch.equal(logits, grad)
        logits.copy_(before.as_strided(logits.shape, logits.stride(), logits.storage_offset()))
        bits = BITS[memory.element_size()]
        assert torch.equal(memory.view(bits), before.view(bits))  # nothing beside the rows
    return [*stats, *values, backward, forward]


# within a vector, over two of them, of whole ones and not, of one block of Triton's and a tail
@pytest.mark.some_on("triton")
@pytest.mark.parametrize("V", [1021, 1, 9, 3072, 17_001])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("softcap", [0.0, 8.0])
def test_no_bit_depends_on_where_rows_begin(backend, V, dtype, softcap):
    _, logits, token_ids, mask = make_rows(V, dtype, 0, 1, 3)
    loss = loss_of(logits, token_ids, mask)
    rows = rows_of(token_ids, mask, logit_softcap=softcap, temperature=0.9)
    aligned = -V % (16 // dtype.itemsize)
    expected = results(backend, *placed(logits, 0, aligned), rows, loss)
    for start in range(16 // dtype.itemsize) if V == 1021 else (1, 3):
        found = results(backend, *placed(logits, start, start % 3 * 6), rows, loss)
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_gradient_and_logits_begin_apart(backend, dtype):
    """Rows without the last token, of an odd vocabulary; their gradient is contiguous."""
    _, logits, token_ids, mask = make_rows(1021, dtype, 0, 3, 3)
    loss, rows = loss_of(logits, token_ids, mask), rows_of(token_ids, mask)
    assert not logits.is_contiguous()
    found = one_pass(backend, logits, rows, *loss)
    expected = one_pass(backend, logits.contiguous(), rows, *loss)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("token_id", [0, 16_384])  # in block 0, which begins behind the head
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_row_split_over_programs_begins_anywhere(backend, monkeypatch, dtype, token_id):
    V = 33_001  # two whole blocks of Triton's and a tail, or one and a tail behind the head
    _, logits, token_ids, mask = make_rows(V, dtype, 0, 1, 3)
    token_ids[0, 0] = token_id
    loss, rows = loss_of(logits, token_ids, mask), rows_of(token_ids, mask)
    whole = results(backend, *placed(logits, 3, 0), rows, loss)
    with shared_out(backend, monkeypatch):
        split = results(backend, *placed(logits, 3, 0), rows, loss)
    assert all(map(torch.equal, whole, split))

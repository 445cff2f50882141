"""The CUDA kernels of token statistics, run on a CPU, against the reference in float64."""

import pytest
import torch

from tests.support import cuda_vocabulary as kernels
from tests.support.closeness import assert_within_budget
from tests.support.cuda_rows import CASES, assert_gradient, exact, gradient, make_rows


@pytest.mark.parametrize(("V", "beside", "dtype", "options"), CASES)
def test_token_stats(V, beside, dtype, options):
    _, logits, token_ids, active = make_rows(V, beside, dtype)
    rows = kernels.rows_of(logits, token_ids, active, **options)
    actual = kernels.token_stats(rows, token_ids)
    alone = kernels.token_stats(rows, token_ids, clusters=False)
    assert all(torch.equal(x, y) for x, y in zip(actual, alone, strict=True))
    expected = exact(logits, token_ids, active, **options)
    size = 1 + expected[2].abs() + expected[0].abs()
    for got, want in zip(actual[:4], expected[:4], strict=True):
        assert_within_budget(got, want, size=size, ulps=12)
    assert torch.equal(actual[4], expected[4])
    raw = logits.float().amax(-1)
    assert torch.equal(actual[5], torch.where(active, raw, torch.zeros_like(raw)))


def test_token_stats_alone():
    _, logits, token_ids, active = make_rows(1000, 0, torch.bfloat16)
    rows = kernels.rows_of(logits, token_ids, active)
    everything = kernels.token_stats(rows, token_ids)
    for flags in ((False, False), (True, False)):
        some = kernels.token_stats(rows, token_ids, with_entropy=flags[0], with_sum_sq_probs=False)
        assert torch.equal(some[0], everything[0])
        assert torch.equal(some[1], everything[1] if flags[0] else torch.zeros_like(some[1]))
        assert not some[3].any()


@pytest.mark.parametrize(("V", "beside", "dtype", "options"), CASES)
def test_token_stats_backward(V, beside, dtype, options):
    whole, logits, token_ids, active = make_rows(V, beside, dtype)
    grads = [torch.randn(2, 3) for _ in range(3)]
    grads[0][0, 1] = grads[1][0, 1] = grads[2][0, 1] = 0
    expected, size = gradient(logits, token_ids, active, grads, **options)
    rows = kernels.rows_of(logits, token_ids, active, **options)
    stats = kernels.token_stats(rows, token_ids)
    saved = (stats[5], stats[6], stats[1])
    grad = kernels.nan_like(logits.contiguous())
    kernels.token_stats_backward(rows, saved, grads, grad)
    assert_gradient(grad, expected, size)
    assert not grad[0, 1].any()
    assert not grad[~active].any()
    before = whole.clone()
    kernels.token_stats_backward(rows, saved, grads, None)
    assert torch.equal(logits, grad)
    logits.copy_(before[:, :3, :V])
    assert torch.equal(whole.nan_to_num(7), before.nan_to_num(7))

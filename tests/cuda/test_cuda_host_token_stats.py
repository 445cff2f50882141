"""The CUDA kernels of token statistics, run on a CPU, against the reference in float64."""

import pytest
import torch

from tests.ops.closeness import assert_within_budget
from tests.support import cuda_vocabulary as kernels
from tests.support.cuda_rows import CASES, assert_gradient, exact, gradient, make_rows


@pytest.mark.parametrize(("V", "beside", "dtype", "options"), CASES)
def test_token_stats(V, beside, dtype, options):
    _, logits, token_ids, mask = make_rows(V, beside, dtype)
    rows = kernels.rows_of(token_ids, mask, **options)
    actual = kernels.token_stats(logits, rows)
    alone = kernels.token_stats(logits, rows, clusters=False)
    assert all(torch.equal(x, y) for x, y in zip(actual, alone, strict=True))
    expected = exact(logits, token_ids, mask, **options)
    size = 1 + expected.logsumexp.abs() + expected.logprobs.abs()
    for name in ("logprobs", "entropy", "logsumexp", "sum_sq_probs"):
        assert_within_budget(getattr(actual, name), getattr(expected, name), size=size, ulps=12)
    assert torch.equal(actual.is_top1, expected.is_top1)
    raw = logits.float().amax(-1)
    assert torch.equal(actual.row_max, torch.where(mask, raw, torch.zeros_like(raw)))


@pytest.mark.parametrize("options", [{}, {"logit_softcap": 10.0}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_an_excluded_token_is_the_most_likely_only_among_excluded_ones(dtype, options):
    logits = torch.full((1, 3, 1000), -torch.inf, dtype=dtype)
    logits[0, 1, 7], logits[0, 2] = -1e4, torch.nan
    stats = kernels.token_stats(logits, kernels.rows_of(torch.full((1, 3), 5), **options))
    assert stats.is_top1.tolist() == [[True, False, False]]


@pytest.mark.parametrize("V", [4096, 5001])
def test_a_row_does_not_depend_on_their_number(V):
    """With fewer rows, more blocks share a row."""
    _, logits, token_ids, _ = make_rows(V, 0, torch.bfloat16, 1, 170)  # 4 blocks each of 40 SMs
    stats = kernels.token_stats(logits, kernels.rows_of(token_ids))
    for count in (100, 50, 1):
        few = kernels.rows_of(token_ids[:, :count].clone())
        for some, every in zip(kernels.token_stats(logits[:, :count], few), stats, strict=True):
            assert torch.equal(some, every[:, :count])


def test_token_stats_alone():
    _, logits, token_ids, mask = make_rows(1000, 0, torch.bfloat16)
    rows = kernels.rows_of(token_ids, mask)
    everything = kernels.token_stats(logits, rows)
    for entropy in (False, True):
        some = kernels.token_stats(logits, rows, with_entropy=entropy, with_sum_sq_probs=False)
        assert torch.equal(some.logprobs, everything.logprobs)
        wanted = everything.entropy if entropy else torch.zeros_like(some.entropy)
        assert torch.equal(some.entropy, wanted)
        assert not some.sum_sq_probs.any()


@pytest.mark.parametrize(("V", "beside", "dtype", "options"), CASES)
def test_token_stats_backward(V, beside, dtype, options):
    whole, logits, token_ids, mask = make_rows(V, beside, dtype)
    grads = [torch.randn(2, 3) for _ in range(3)]
    grads[0][0, 1] = grads[1][0, 1] = grads[2][0, 1] = 0
    expected, size = gradient(logits, token_ids, mask, grads, **options)
    rows = kernels.rows_of(token_ids, mask, **options)
    stats = kernels.token_stats(logits, rows)
    grad = kernels.nan_like(logits.contiguous())
    kernels.token_stats_backward(logits, rows, stats, grads, grad)
    assert_gradient(grad, expected, size)
    assert not grad[0, 1].any()
    assert not grad[~mask].any()
    before = whole.clone()
    kernels.token_stats_backward(logits, rows, stats, grads)
    assert torch.equal(logits, grad)
    logits.copy_(before[:, :3, :V])
    assert torch.equal(whole.nan_to_num(7), before.nan_to_num(7))


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int8, torch.bfloat16, torch.int32, torch.float64, None]
)
def test_rows_that_count(dtype):
    """By a mask of any dtype and by their ids: the others are 0, whatever they hold."""
    _, logits, token_ids, mask = make_rows(1000, 0, torch.bfloat16)
    logits, mask = logits.nan_to_num(0.0).contiguous(), torch.rand(mask.shape) < 0.5
    mask[0, 0] = mask[0, 1] = True
    token_ids[0, 1] = -7
    given = None if dtype is None else mask.to(dtype)
    if dtype is not None and dtype.is_floating_point:
        given = torch.where(mask, given, -0.0)
    valid = (mask if dtype is not None else torch.ones_like(mask)) & (token_ids != -7)
    logits[~valid] = float("nan")
    rows = kernels.rows_of(token_ids, given, ignore_index=-7)
    plain = kernels.rows_of(token_ids, valid)
    stats = kernels.token_stats(logits, rows)
    for got, want in zip(stats, kernels.token_stats(logits, plain), strict=True):
        assert torch.equal(got, want)
        assert not got[~valid].any()
    assert stats.logprobs[valid].isfinite().all()
    grads = [torch.randn(token_ids.shape) for _ in range(3)]
    results = [kernels.nan_like(logits) for _ in range(2)]
    for grad, one in zip(results, (rows, plain), strict=True):
        kernels.token_stats_backward(logits, one, stats, grads, grad)
    assert torch.equal(*results)
    assert not results[0][~valid].any()

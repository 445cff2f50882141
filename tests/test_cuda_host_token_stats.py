"""The CUDA kernels of token statistics, run on a CPU, against the reference in float64."""

import cuda_vocabulary as kernels
import pytest
import torch
from closeness import assert_within_budget
from cuda_rows import assert_gradient, exact, gradient, make_rows

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# (vocabulary, elements beside each row): rows of one part and of many, aligned and not; the last
# has more parts than a cluster has blocks.
SHAPES = ((1, 0), (37, 2), (1000, 0), (1003, 1), (5001, 0), (24000, 64))
OPTIONS = (
    {},
    {"temperature": 0.7, "logit_scale": 1.5, "logit_softcap": 8.0},
    {"temperature": torch.tensor([[0.5, 1.0, 1.7], [0.9, 1.2, float("nan")]])},
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("V", "beside"), SHAPES)
@pytest.mark.parametrize("options", OPTIONS)
def test_token_stats(V, beside, dtype, options):
    _, logits, token_ids, active = make_rows(V, beside, dtype)
    rows = kernels.rows_of(logits, token_ids, active, **options)
    actual = kernels.token_stats(rows, token_ids)
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("V", "beside"), SHAPES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("inplace", [False, True])
def test_token_stats_backward(V, beside, dtype, options, inplace):
    whole, logits, token_ids, active = make_rows(V, beside, dtype)
    grads = [torch.randn(2, 3) for _ in range(3)]
    grads[0][0, 1] = grads[1][0, 1] = grads[2][0, 1] = 0
    expected, size = gradient(logits, token_ids, active, grads, **options)
    rows = kernels.rows_of(logits, token_ids, active, **options)
    stats = kernels.token_stats(rows, token_ids)
    outside = whole.clone()
    grad = None if inplace else kernels.nan_like(logits.contiguous())
    kernels.token_stats_backward(rows, (stats[5], stats[6], stats[1]), grads, grad)
    actual = logits if inplace else grad
    assert_gradient(actual, expected, size)
    assert not actual[0, 1].any()
    assert not actual[~active].any()
    if inplace:
        logits.copy_(outside[:, :3, :V])
        assert torch.equal(whole.nan_to_num(7), outside.nan_to_num(7))

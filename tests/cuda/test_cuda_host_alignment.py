"""Where a row of logits lies does not show in its results, on the host build of the kernels."""

import pytest
import torch

from fastrl.contract import LossArguments
from tests.support import cuda_vocabulary as kernels
from tests.support.cuda_rows import make_rows
from tests.support.cuda_vocabulary import objective_of


def placed(x, offset):
    """Return a copy that begins `offset` elements after a vector does, with NaN around it."""
    whole = torch.full((x.numel() + 32,), float("nan"), dtype=x.dtype)
    assert whole.data_ptr() % 16 == 0
    copy = whole[8 + offset : 8 + offset + x.numel()].view(x.shape)
    return copy.copy_(x)


# whole vectors, which the aligned kernels take where the row begins with one, and not; both long
# enough for steps of several vectors
@pytest.mark.parametrize("V", [3072, 3001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [0.0, 8.0])
def test_bits_do_not_depend_on_where_a_row_lies(V, dtype, softcap):
    _, logits, token_ids, _ = make_rows(V, 0, dtype, 1, 2)
    row, token_ids = logits[:, :1], token_ids[:, :1].contiguous()
    rows = kernels.rows_of(token_ids, logit_softcap=softcap)
    flows = [torch.tensor([[flow]]) for flow in (0.7, -0.3, 0.2)]
    one = torch.ones(1, 1)
    loss = (
        LossArguments(one, one, None, None, None, None, None, None),
        objective_of(entropy_coef=0.1),
    )
    nan_row = kernels.nan_like(row)
    lanes = 16 // dtype.itemsize
    results = []
    for offset in range(lanes):
        x = placed(row, offset)
        stats = kernels.token_stats(x, rows)
        sums = kernels.token_stats(x, rows, with_entropy=False, with_sum_sq_probs=False)
        for to in (offset, (offset + 3) % lanes):  # the gradient lies alike, and otherwise
            found = [*stats, sums.logprobs]
            for clusters in (True, False):
                grad = placed(nan_row, to)
                found += kernels.logits_policy_loss(x, rows, *loss, grad, clusters=clusters)
                found.append(grad)
            grad = placed(nan_row, to)
            kernels.token_stats_backward(x, rows, stats, flows, grad)
            results.append([*found, grad])
    for found in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(found, results[0], strict=True))

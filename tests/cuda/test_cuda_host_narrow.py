"""The narrow mode of the CUDA kernels: float32 logits make room for a gradient in bfloat16."""

import pytest
import torch

from tests.cuda.test_cuda_host_one_pass import OBJECTIVES, loss_arguments, loss_gradient
from tests.support import cuda_vocabulary as kernels
from tests.support.cuda_host import watched
from tests.support.cuda_rows import assert_gradient, exact, gradient

# (vocabulary, stride): ends within a vector, gradients that begin within one, many steps; in the
# host build the last is of more splits than a cluster has blocks
SHAPES = [(1, 4), (4, 4), (37, 40), (1000, 1000), (1001, 1004), (5001, 5008), (50257, 50264)]
OPTIONS = [
    {},
    {"temperature": 0.7, "logit_scale": 1.5, "logit_softcap": 8.0},
    {"temperatures": torch.tensor([[0.5, 1.0, 1.7, float("nan")]])},
]


def make_rows(V, stride, B=1, T=4):
    """Rows in a workspace; NaN in the padding and in the last row, which does not count."""
    memory = torch.full((B * T, stride), float("nan"))
    logits = memory.as_strided((B, T, V), (T * stride, stride, 1))
    logits.normal_(std=3)
    token_ids = torch.randint(V, (B, T))
    token_ids.view(-1)[:2] = torch.tensor([0, V - 1])[: B * T]
    logits.scatter_add_(-1, token_ids[..., None], torch.full((B, T, 1), 5.0))
    mask = torch.ones(B, T, dtype=torch.bool)
    if B * T > 1:
        mask[-1, -1] = False
        logits[-1, -1] = float("nan")
    return memory, logits, token_ids, mask


def assert_only_the_half_changed(memory, before, V, mask):
    """Nothing behind the gradient changes, and of a row that does not count nothing before it."""
    stride = memory.shape[1]
    after, old = (x.view(torch.int16) for x in (memory, before))
    assert torch.equal(after[:, stride + V :], old[:, stride + V :])
    skipped = ~mask.view(-1)
    assert torch.equal(after[skipped, :stride], old[skipped, :stride])


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("V", "stride"), SHAPES)
def test_token_stats_backward(V, stride, options):
    memory, logits, token_ids, mask = make_rows(V, stride)
    grads = [torch.randn(1, 4) for _ in range(3)]
    grads[0][0, 1] = grads[1][0, 1] = grads[2][0, 1] = 0
    expected, size = gradient(logits, token_ids, mask, grads, **options)
    rows = kernels.rows_of(token_ids, mask, **options)
    stats = kernels.token_stats(logits, rows)
    wide = kernels.nan_like(logits.contiguous())
    kernels.token_stats_backward(logits, rows, stats, grads, wide)
    before = memory.clone()
    narrow = kernels.narrow_half(logits)
    kernels.token_stats_backward(logits, rows, stats, grads, narrow)
    assert_gradient(narrow, expected, size)
    assert torch.equal(narrow, wide.bfloat16())
    assert not narrow[0, 1].any()
    assert not narrow[~mask].any()
    assert_only_the_half_changed(memory, before, V, mask)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("clusters", [True, False])
@pytest.mark.parametrize(("V", "stride"), SHAPES)
def test_policy_loss(V, stride, clusters, options):
    objective, optional = OBJECTIVES["everything"]
    memory, logits, token_ids, mask = make_rows(V, stride)
    arguments = loss_arguments(exact(logits, token_ids, mask, **options).logprobs.float(), optional)
    inputs = (logits, token_ids, mask, arguments, objective)
    expected, size = loss_gradient(*inputs, **options)
    rows = kernels.rows_of(token_ids, mask, **options)
    wide = kernels.nan_like(logits.contiguous())
    stats = kernels.logits_policy_loss(logits, rows, arguments, objective, wide, clusters=clusters)
    before = memory.clone()
    narrow = kernels.narrow_half(logits)
    again = kernels.logits_policy_loss(
        logits, rows, arguments, objective, narrow, clusters=clusters
    )
    assert_gradient(narrow, expected, size)
    assert torch.equal(narrow, wide.bfloat16())
    assert all(torch.equal(x, y) for x, y in zip(stats, again, strict=True))
    assert not narrow[~mask].any()
    assert_only_the_half_changed(memory, before, V, mask)


@pytest.mark.parametrize(("B", "T"), [(1, 1), (3, 2), (1, 90)])
def test_a_row_does_not_depend_on_the_others(B, T):
    V, stride = 1000, 1008
    objective, optional = OBJECTIVES["everything"]
    _, logits, token_ids, mask = make_rows(V, stride, B, T)
    arguments = loss_arguments(exact(logits, token_ids, mask).logprobs.float(), optional)
    wide = kernels.nan_like(logits.contiguous())
    rows = kernels.rows_of(token_ids, mask)
    kernels.logits_policy_loss(logits, rows, arguments, objective, wide, clusters=False)
    narrow = kernels.narrow_half(logits)
    kernels.logits_policy_loss(logits, rows, arguments, objective, narrow, clusters=True)
    assert torch.equal(narrow, wide.bfloat16())


def test_one_pass_loads_each_logit_once_and_stores_half_of_its_bytes():
    V, stride = 1001, 1008
    objective, optional = OBJECTIVES["everything"]
    memory, logits, token_ids, mask = make_rows(V, stride)
    arguments = loss_arguments(exact(logits, token_ids, mask).logprobs.float(), optional)
    rows = kernels.rows_of(token_ids, mask)
    narrow = kernels.narrow_half(logits)
    with watched("vocabulary", memory) as [(loads, stores)]:
        kernels.logits_policy_loss(logits, rows, arguments, objective, narrow, clusters=True)
    loads, stores = loads.view(4, stride, 4), stores.view(4, 2 * stride, 2)
    assert (loads[:3, :V] == 1).all()
    assert not loads[3].any()
    assert not loads[:, V:].any()
    chosen = torch.zeros(4, V, dtype=torch.bool).scatter_(1, token_ids[0][:, None], True)
    chosen &= mask[0][:, None]
    assert (stores[:, stride : stride + V] == torch.where(chosen[..., None], 2, 1)).all()
    assert not stores[:, :stride].any()
    assert not stores[:, stride + V :].any()


def test_the_backward_loads_each_logit_once_and_stores_half_of_its_bytes():
    V, stride = 1000, 1008
    memory, logits, token_ids, mask = make_rows(V, stride)
    rows = kernels.rows_of(token_ids, mask)
    stats = kernels.token_stats(logits, rows)
    grads = [torch.randn(1, 4) for _ in range(3)]
    with watched("vocabulary", memory) as [(loads, stores)]:
        kernels.token_stats_backward(logits, rows, stats, grads, kernels.narrow_half(logits))
    # thread 0 looks at the chosen token before the others
    chosen = torch.zeros(4, V, dtype=torch.bool).scatter_(1, token_ids[0][:, None], True)
    chosen &= mask[0][:, None]
    loads = loads.view(4, stride, 4)
    assert (loads[:3, :V] == torch.where(chosen[:3, :, None], 2, 1)).all()
    assert not loads[3].any()
    assert not loads[:, V:].any()
    stores = stores.view(4, 2 * stride, 2)
    assert (stores[:, stride : stride + V] == torch.where(chosen[..., None], 2, 1)).all()
    assert not stores[:, :stride].any()
    assert not stores[:, stride + V :].any()

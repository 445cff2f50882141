"""The CUDA vocabulary kernels, run on a CPU, against the reference in float64."""

import pytest
import torch

import cuda_vocabulary as kernels
from closeness import assert_within_budget
from fastrl import reference
from inputs import make_logits

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# (vocabulary, elements beside each row): rows of one part and of many, aligned and not; the last
# has more parts than a cluster has blocks.
SHAPES = ((1, 0), (37, 2), (1000, 0), (1003, 1), (4096, 0), (5001, 0), (24000, 64))


def make_rows(V, beside, dtype, B=2, T=3):
    """Logits [B, T, V], a view of a larger tensor, with ids and mask; the last row is not active."""
    token_ids = torch.randint(V, (B, T))
    whole = make_logits(B, T + 1, V + beside, dtype=dtype)
    logits = whole[:, :T, :V]
    lift = torch.full((B, T, 1), 5.0).to(dtype)
    logits.scatter_add_(-1, token_ids[..., None], lift)
    active = torch.ones(B, T, dtype=torch.bool)
    active[-1, -1] = False
    logits[-1, -1] = float("nan")
    return whole, logits, token_ids, active


def exact(logits, token_ids, active, temperature=1.0, logit_scale=1.0, logit_softcap=None):
    options = {"logit_scale": logit_scale, "logit_softcap": logit_softcap}
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.double()
    return reference.token_stats(
        logits.double(), token_ids, active, temperature=temperature, **options
    )


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


def gradient(logits, token_ids, active, grads, temperature=1.0, **options):
    """Return the gradient, and the magnitude of what is added up for each element of it."""
    leaf = logits.double()
    leaf[~active] = 0
    leaf.requires_grad_()
    stats = exact(leaf, token_ids, active, temperature, **options)[:3]
    grads = [torch.where(active, grad.double(), 0.0) for grad in grads]
    loss = sum((stat * grad).sum() for stat, grad in zip(stats, grads, strict=True))
    heat = temperature[..., None] if isinstance(temperature, torch.Tensor) else temperature
    slope = torch.where(active[..., None], options.get("logit_scale", 1.0) / heat, 0.0)
    cap = options.get("logit_softcap")
    z = leaf.detach() * slope if cap is None else cap * torch.tanh(leaf * slope * heat / cap) / heat
    logp = torch.where(active[..., None], z.detach(), 0.0).log_softmax(-1)
    parts = grads[0].abs() + grads[2].abs() + grads[1].abs() * (stats[1].detach() + 1)
    size = logp.exp() * (parts[..., None] - grads[1].abs()[..., None] * logp) * (1 - logp)
    size.scatter_add_(-1, token_ids[..., None], grads[0].abs()[..., None])
    return torch.autograd.grad(loss, leaf)[0], size * slope


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


def assert_gradient(actual, expected, size):
    """In the arithmetic of float32, then rounded once."""
    float32 = torch.finfo(torch.float32).eps
    smallest = torch.finfo(actual.dtype).smallest_normal
    assert_within_budget(actual, expected, ulps=1, atol=16 * float32 * size + smallest)

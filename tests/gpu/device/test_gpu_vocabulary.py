"""Statistics of logits on a GPU: exact, large, row by row the same."""

import pytest
import torch

import fastrl
from fastrl.ops._rows.statistics import OF_ROW

CUDA = "cuda"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def logits_and_ids(B, T, V, dtype=torch.bfloat16):
    logits = torch.randn(B, T, V, device=CUDA).mul_(3.0)
    ids = torch.randint(V, (B, T), device=CUDA)
    logits.scatter_add_(-1, ids[..., None], torch.full_like(logits[..., :1], 6.0))
    return logits.to(dtype), ids


def stats_and_gradient(logits, ids, backend, **options):
    leaf = logits.detach().requires_grad_()
    fields = OF_ROW
    stats = fastrl.token_stats(leaf, ids, outputs=fields, backend=backend, **options)
    total = (stats.logprobs + 0.3 * stats.entropy - 0.1 * stats.logsumexp).sum()
    return [*(x.detach() for x in stats[: len(fields)]), *torch.autograd.grad(total, leaf)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("softcap", [None, 5.0, 30.0])
@pytest.mark.parametrize("vocabulary", [1, 2, 129, 1000, 32001, 50257, 129280, 151936])
def test_statistics_and_gradient_are_exact(backend, vocabulary, softcap, dtype):
    logits, ids = logits_and_ids(2, 33, vocabulary, dtype)
    if vocabulary > 1:
        logits[0, 0, vocabulary // 2] = -torch.inf
        ids[0, 0] = 0
    options = {
        "temperature": torch.rand(2, 33, device=CUDA) + 0.5,
        "mask": torch.rand(2, 33, device=CUDA) < 0.8,
        "logit_softcap": softcap,
    }
    logits[~options["mask"]] = torch.nan
    found = stats_and_gradient(logits, ids, backend, **options)
    exact = stats_and_gradient(logits.double(), ids, "reference", **options)
    # the kernels' tanh is off by 2^-22
    off = (softcap or 0.0) / options["temperature"].double() * 2.0**-22
    for name, one, wanted in zip(("logprobs", "entropy", "logsumexp"), found, exact, strict=False):
        error, size = (one.double() - wanted).abs().nan_to_num(), wanted.abs().nan_to_num(posinf=0)
        of_cap = 2 * off * (1 + size if name == "entropy" else 1)
        assert (error <= 1e-5 + 2e-7 * size + of_cap).all(), name
    # the slopes are 1, 0.3 and -0.1, and 4e-6 is the budget without a softcap
    finfo, terms = torch.finfo(dtype), 3 * (1 + 0.3 * 3 + 0.1) / options["temperature"]
    budget = finfo.eps * exact[-1].abs() + (4e-6 + 2 * off * terms)[..., None] + finfo.tiny
    assert ((found[-1].double() - exact[-1]).abs() <= budget).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_other_rows(kernels, dtype):
    """With many rows each gets a program, few rows are split over programs; the bits agree."""
    logits, ids = logits_and_ids(1, 700, 151936, dtype)
    together = stats_and_gradient(logits, ids, kernels)
    for size in (1, 5, 60):
        alone = stats_and_gradient(logits[:, :size], ids[:, :size], kernels)
        assert all(
            torch.equal(many[:, :size], few) for many, few in zip(together, alone, strict=True)
        )
    shifted = torch.empty(logits.numel() + 1, dtype=dtype, device=CUDA)[1:].view_as(logits)
    odd = stats_and_gradient(shifted.copy_(logits), ids, kernels)
    assert all(map(torch.equal, together, odd))


def test_a_common_offset_changes_nothing(kernels):
    logits, ids = logits_and_ids(2, 100, 151936, torch.float32)
    logits = (logits * 256).round() / 256  # exact beside 1e4
    plain = stats_and_gradient(logits, ids, kernels, temperature=0.7)
    moved = stats_and_gradient(logits + 1e4, ids, kernels, temperature=0.7)
    for one, other in zip(plain[:2] + plain[-1:], moved[:2] + moved[-1:], strict=True):
        assert (one - other).abs().max() <= 1e-5


def test_more_than_two_to_the_31_elements(kernels, memory):
    rows, vocabulary, dtype = 16_400, 131_072, torch.bfloat16
    memory(5 * rows * vocabulary * dtype.itemsize)
    logits = torch.empty(1, rows, vocabulary, dtype=dtype, device=CUDA).normal_()
    assert logits.numel() > 2**31
    ids = torch.randint(vocabulary, (1, rows), device=CUDA)
    found = stats_and_gradient(logits, ids, kernels)
    alone = stats_and_gradient(logits[:, -8:].clone(), ids[:, -8:], kernels)
    assert all(torch.equal(one[:, -8:], last) for one, last in zip(found, alone, strict=True))


@pytest.mark.parametrize("shape", [(1, 131_072), (70_000, 2)], ids=str)
def test_more_rows_than_a_limited_grid_axis_holds(kernels, shape):
    logits, ids = logits_and_ids(*shape, 64, torch.float32)
    found = fastrl.token_logprobs(logits, ids, backend=kernels)
    exact = logits.double().log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    assert (found - exact).abs().max() <= 1e-5

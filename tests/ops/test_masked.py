"""Masked mean and whitening, in one process and over the ranks of a process group."""

import math

import pytest
import torch
from hypothesis import given

import fastrl
from tests.fuzz.oracle.bounded import Bounded, of_results
from tests.fuzz.oracle.values import whiten
from tests.ops.closeness import assert_covers, assert_within_budget
from tests.ops.inputs import (
    FLOAT_DTYPES,
    MASKS,
    dtypes,
    in_layout,
    layouts,
    make_mask,
    mask_kinds,
    seeds,
    shapes,
)

nan = math.nan


def exact_mean(x, mask):
    values = x.double()[mask].tolist()
    return torch.tensor(math.fsum(values) / max(len(values), 1), dtype=torch.float64)


def assert_white(x, mask, shift_mean=True):
    white = fastrl.whiten(x, mask, shift_mean=shift_mean)
    assert not white[~mask].any()
    arithmetic = of_results(str(x.dtype).removeprefix("torch."))
    exact = whiten(Bounded(x[mask].double().numpy(), 0.0, arithmetic), shift_mean=shift_mean)
    assert_covers(exact, white[mask])


@given(shapes, layouts, mask_kinds, dtypes, seeds)
def test_the_mean_of_any_shape_layout_and_mask(shape, layout, mask, dtype, seed):
    torch.manual_seed(seed)
    x, valid = torch.randn(shape).to(dtype), make_mask(mask, *shape)
    x, valid = in_layout(x, layout), in_layout(valid, layout)
    mean = fastrl.masked_mean(x, valid)
    assert mean.dtype == torch.float32
    assert_within_budget(mean, exact_mean(x, valid), size=4.0)


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
def test_the_mean_along_a_dimension(dim):
    x, mask = torch.randn(3, 4, 5), torch.rand(3, 4, 5) < 0.5
    mask.movedim(dim, 0)[:, 0, 0] = False  # nothing is left here
    mean = fastrl.masked_mean(x, mask, dim=dim)
    rows, valid = x.movedim(dim, -1), mask.movedim(dim, -1)
    exact = torch.stack(
        [
            exact_mean(row, ok)
            for row, ok in zip(rows.reshape(-1, rows.shape[-1]), valid.flatten(0, 1), strict=True)
        ]
    )
    assert_within_budget(mean, exact.reshape(rows.shape[:-1]), size=4.0)
    assert mean[0, 0] == 0


def test_the_mean_by_hand():
    x = torch.tensor([[1.0, nan], [3.0, 5.0]])
    mask = torch.tensor([[1, 0], [1, 1]])
    assert fastrl.masked_mean(x, mask).item() == 3
    assert fastrl.masked_mean(x, mask, dim=1).tolist() == [1, 4]
    assert fastrl.masked_mean(x, mask, dim=0).tolist() == [2, 5]


def test_the_gradient_of_the_mean():
    mask = torch.tensor([[1, 0], [1, 1]])
    x = torch.tensor([[1.0, nan], [3.0, 5.0]], requires_grad=True)
    fastrl.masked_mean(x, mask).backward()
    assert x.grad.tolist() == [pytest.approx([1 / 3, 0]), pytest.approx([1 / 3, 1 / 3])]
    y = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    valid = make_mask("random", 3, 4)
    assert torch.autograd.gradcheck(lambda v: fastrl.masked_mean(v, valid, dim=1), y)


@pytest.mark.parametrize("dtype", [torch.float64, *FLOAT_DTYPES], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shift_mean", [True, False])
def test_whitening_is_exact(mask, shift_mean, dtype):
    x, valid = (torch.randn(6, 9) * 3 + 5).to(dtype), make_mask(mask, 6, 9)
    assert_white(x, valid, shift_mean)


@given(shapes, layouts, mask_kinds, seeds)
def test_whitening_any_shape_layout_and_mask(shape, layout, mask, seed):
    torch.manual_seed(seed)
    x, valid = in_layout(torch.randn(shape), layout), in_layout(make_mask(mask, *shape), layout)
    assert_white(x, valid)


def test_whitened_values_have_mean_zero_and_variance_one():
    x, mask = torch.randn(50, 40) * 7 + 100, make_mask("random", 50, 40)
    white = fastrl.whiten(x, mask).double()[mask]
    assert abs(white.mean()) < 1e-5
    assert white.var().item() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("value", [0.0, 0.1, -3.7])
def test_equal_values_become_about_zero(value):
    white = fastrl.whiten(torch.full((7,), value), torch.ones(7))
    assert white.abs().max() < 1e-2


def test_one_value_becomes_zero():
    white = fastrl.whiten(torch.tensor([[5.0, nan]]), torch.tensor([[1, 0]]))
    assert white.tolist() == [[0, 0]]

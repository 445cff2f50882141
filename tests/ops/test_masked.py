"""Masked mean and whitening, in one process and over the ranks of a process group."""

import math
import os
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given

import fastrl
from tests.ops.closeness import assert_within_budget
from tests.ops.inputs import (
    FLOAT_DTYPES,
    MASKS,
    POISONS,
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


def exact_whiten(x, mask, shift_mean=True):
    """(x - mean) / sqrt(var + 1e-8) with the unbiased variance, 0 where masked."""
    values = x.double()[mask].tolist()
    n = len(values)
    mean = math.fsum(values) / max(n, 1)
    variance = math.fsum((v - mean) ** 2 for v in values) / max(n - 1, 1)
    white = (x.double() - mean) / math.sqrt(variance + 1e-8) + (0.0 if shift_mean else mean)
    return torch.where(mask, white, 0.0)


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


@pytest.mark.parametrize("poison", POISONS, ids=str)
def test_values_at_masked_entries_change_no_bit(poison):
    x, mask = torch.randn(4, 6), make_mask("random", 4, 6)
    dirty = x.masked_fill(~mask, poison)
    for function in (fastrl.masked_mean, fastrl.whiten):
        assert torch.equal(function(x, mask), function(dirty, mask))
    assert torch.equal(fastrl.masked_mean(x, mask, dim=1), fastrl.masked_mean(dirty, mask, dim=1))


def test_the_gradient_of_the_mean():
    mask = torch.tensor([[1, 0], [1, 1]])
    x = torch.tensor([[1.0, nan], [3.0, 5.0]], requires_grad=True)
    fastrl.masked_mean(x, mask).backward()
    assert x.grad.tolist() == [pytest.approx([1 / 3, 0]), pytest.approx([1 / 3, 1 / 3])]
    y = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    valid = make_mask("random", 3, 4)
    assert torch.autograd.gradcheck(lambda v: fastrl.masked_mean(v, valid, dim=1), y)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (2, 2)])
def test_without_an_entry_the_mean_is_zero(shape):
    x = torch.full(shape, nan, requires_grad=True)
    mean = fastrl.masked_mean(x, torch.zeros(shape))
    mean.backward()
    assert mean.item() == 0
    assert (x.grad == 0).all()
    assert torch.equal(fastrl.whiten(x, torch.zeros(shape)), torch.zeros(shape))


@pytest.mark.parametrize("dtype", [torch.float64, *FLOAT_DTYPES], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shift_mean", [True, False])
def test_whitening_is_exact(mask, shift_mean, dtype):
    x, valid = (torch.randn(6, 9) * 3 + 5).to(dtype), make_mask(mask, 6, 9)
    white = fastrl.whiten(x, valid, shift_mean=shift_mean)
    assert white.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert not white.requires_grad
    # the mean is 5, so that is what roundings are relative to
    assert_within_budget(white, exact_whiten(x, valid, shift_mean), size=10.0, ulps=16)


@given(shapes, layouts, mask_kinds, seeds)
def test_whitening_any_shape_layout_and_mask(shape, layout, mask, seed):
    torch.manual_seed(seed)
    x, valid = in_layout(torch.randn(shape), layout), in_layout(make_mask(mask, *shape), layout)
    white = fastrl.whiten(x, valid)
    # few entries may lie so close that 1e-8 is their variance: then roundings grow by 1e4
    assert_within_budget(white, exact_whiten(x, valid), size=1 + white.double().abs(), ulps=64)


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


def test_whitening_does_not_differentiate():
    x = torch.randn(4, requires_grad=True)
    assert not fastrl.whiten(x, torch.ones(4)).requires_grad


RANK = """
import datetime, sys, torch, torch.distributed as dist
sys.path.insert(0, sys.argv[3])
import fastrl
dist.init_process_group("gloo", init_method=sys.argv[1], rank=1, world_size=2,
                        timeout=datetime.timedelta(seconds=100))
x, mask = torch.load(sys.argv[2])
for shift_mean in (True, False):
    white = fastrl.whiten(x, mask, shift_mean=shift_mean, process_group=dist.group.WORLD)
    torch.save(white, f"{sys.argv[2]}.{shift_mean}")
dist.destroy_process_group()
"""


@pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo")
@pytest.mark.skipif(sys.platform != "linux", reason="the loopback device is named as on Linux")
def test_whitening_over_the_ranks_of_a_process_group(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    x = torch.randn(5, 8) * 3 + 2
    mask = make_mask("random", 5, 8)  # the ranks hold 3 and 2 rows
    x = x.masked_fill(~mask, nan)
    store, part = f"file://{tmp_path}/store", f"{tmp_path}/part"
    torch.save((x[3:], mask[3:]), part)
    root = os.path.dirname(os.path.dirname(fastrl.__file__))
    other = subprocess.Popen([sys.executable, "-c", RANK, store, part, root])
    try:
        dist.init_process_group(
            "gloo", init_method=store, rank=0, world_size=2, timeout=timedelta(seconds=100)
        )
        group = dist.group.WORLD
        whites = {
            shift_mean: fastrl.whiten(x[:3], mask[:3], shift_mean=shift_mean, process_group=group)
            for shift_mean in (True, False)
        }
        assert other.wait(timeout=100) == 0
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        other.kill()
    for shift_mean, mine in whites.items():
        together = torch.cat([mine, torch.load(f"{part}.{shift_mean}")])
        expected = exact_whiten(torch.where(mask, x, 0.0), mask, shift_mean)
        assert_within_budget(together, expected, size=4.0, ulps=16)

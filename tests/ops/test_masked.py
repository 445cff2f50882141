"""Masked mean and whitening, in one process and over the ranks of a process group."""

import math

import pytest
import torch

import fastrl
from tests.ops.inputs import (
    make_mask,
)

nan = math.nan


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

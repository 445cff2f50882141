"""The gradient times a factor that a device holds, in place, against torch's `mul_`."""

import math

import pytest
import torch

from fastrl.library import operators
from fastrl.triton.runtime.registration import INTERPRETED

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="runs where TRITON_INTERPRET=1 says so"),
    pytest.mark.interpreted,
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FACTORS = (*DTYPES, torch.float64)
BITS = {2: torch.int16, 4: torch.int32}


def bits(x):
    return x.view(BITS[x.element_size()])


def assert_scaled(buffer, view, factor):
    """Only the view of the buffer is scaled, to the bit as by `mul_`."""
    ours, theirs = buffer.clone(), buffer.clone()
    operators("triton").scale_(view(ours), factor)
    view(theirs).mul_(factor)
    assert torch.equal(bits(ours), bits(theirs))
    return ours


@pytest.mark.parametrize("of_factor", FACTORS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype, of_factor):
    gradient = torch.randn(3, 17_001).to(dtype)
    gradient[0, :4] = torch.tensor([math.inf, -0.0, math.nan, torch.finfo(dtype).tiny])
    for number in (0.3, -1.7, 0.0, 1e-3, 3e4):
        assert_scaled(gradient, lambda x: x, torch.tensor(number, dtype=of_factor))
    if of_factor != torch.float64:  # torch multiplies by it in float64 unless it has no dimension
        assert_scaled(gradient, lambda x: x, torch.tensor([0.3], dtype=of_factor))


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_factors_that_are_not_finite(number):
    gradient = torch.tensor([1.0, 0.0, -2.0])
    operators("triton").scale_(gradient, torch.tensor(number))
    torch.testing.assert_close(
        gradient, torch.tensor([1.0, 0.0, -2.0]) * number, rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 2, 7, 15, 4095, 40_000])
@pytest.mark.parametrize("start", range(8))
def test_a_gradient_that_begins_anywhere(start, length, dtype):
    buffer = torch.randn(length + 16).to(dtype)
    assert_scaled(buffer, lambda x: x[start : start + length], torch.tensor(0.7))


VIEWS = {
    "without the last token": lambda x: x.view(4, 5, 1050)[:, :-1],
    "of the first tokens": lambda x: x.view(4, 5, 1050)[:, :1],
    "a padded vocabulary": lambda x: x.view(4, 5, 1050)[..., :1043],
    "an odd vocabulary": lambda x: x.view(1, 20, 1050)[..., 1:1044],
    "permuted": lambda x: x.view(4, 5, 1050).transpose(0, 1),
    "permuted and padded": lambda x: x.view(4, 5, 1050).transpose(0, 2)[3:],
    "one row": lambda x: x.view(4, 5, 1050)[1:2, 2:3],
    "short segments": lambda x: x.view(-1, 42)[:, :40],
}
LEFT_TO_TORCH = {
    "tokens and vocabulary": lambda x: x.view(4, 5, 1050)[:, :-1, :1000],
    "every other": lambda x: x[::2],
    "very short segments": lambda x: x.view(-1, 21)[:, :20],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("view", [*VIEWS, *LEFT_TO_TORCH])
def test_views(view, dtype, monkeypatch):
    from fastrl.triton import scale

    launches = []
    kernel = scale.scale_kernel
    monkeypatch.setattr(scale, "scale_kernel", Launched(kernel, launches))
    buffer = torch.randn(4 * 5 * 1050).to(dtype)
    assert_scaled(buffer, (VIEWS | LEFT_TO_TORCH)[view], torch.tensor(0.7))
    assert len(launches) == (view in VIEWS)


class Launched:
    """A kernel whose launches are counted."""

    def __init__(self, kernel, launches):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        self.launches.append(grid)
        return self.kernel[grid]


def test_segments_are_shared_among_programs(monkeypatch):
    from fastrl.triton import scale

    for programs in (1, 3, 100):
        monkeypatch.setattr(scale, "programs_of", lambda device, programs=programs: programs)
        for rows, length in ((1, 70_000), (2, 20_003), (7, 5000)):
            buffer = torch.randn(rows, length + 3).bfloat16()
            assert_scaled(buffer, lambda x: x[:, :-3], torch.tensor(0.7))


def test_a_factor_of_one_leaves_every_bit():
    gradient = torch.randint(-(2**15), 2**15, (70_000,)).to(torch.int16).view(torch.bfloat16)
    before = bits(gradient).clone()
    for dtype in FACTORS:
        operators("triton").scale_(gradient, torch.ones((), dtype=dtype))
    assert torch.equal(bits(gradient), before)


def test_an_empty_gradient():
    operators("triton").scale_(torch.zeros(3, 0, 5), torch.tensor(2.0))


def test_segments_cover_every_element_once():
    from fastrl.segments import segments_of

    x = torch.zeros(6, 7, 8)
    assert segments_of(x) == (1, 336, 0)
    assert segments_of(x[:, 1:]) == (6, 48, 56)
    assert segments_of(x[..., 1:]) == (42, 7, 8)
    assert segments_of(x[2]) == (1, 56, 0)
    assert segments_of(x.permute(2, 0, 1)[3:]) == (42, 5, 8)
    assert segments_of(torch.zeros(())) == (1, 1, 0)
    for overlapping in (x[:, :1].expand(6, 7, 8), x.as_strided((6, 8), (4, 1))):
        assert segments_of(overlapping) is None
    assert segments_of(x[:, 1:, 1:]) is None

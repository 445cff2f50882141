"""The gradient times a factor that a device holds, in place, against torch's `mul_`."""

from math import inf, nan

import pytest
import torch

from fastrl.library import operators
from fastrl.segments import segments_of
from tests.gpu.rows import DTYPES

pytestmark = pytest.mark.kernels_alone  # torch multiplies there
FACTORS = (*DTYPES, torch.float64)
BITS = {2: torch.int16, 4: torch.int32}


def bits(x):
    return x.view(BITS[x.element_size()])


def assert_scaled(backend, buffer, view, factor):
    """Only the view of the buffer is scaled, in float32 and rounded once."""
    ours, theirs = buffer.clone(), buffer.clone()
    operators(backend).scale_(view(ours), factor)
    place = view(theirs)
    place.copy_((place.float() * factor.float()).to(place.dtype))
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(bits(ours.nan_to_num(7)), bits(theirs.nan_to_num(7)))


@pytest.mark.parametrize("of_factor", FACTORS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_factor(backend, dtype, of_factor):
    gradient = torch.randn(3, 17_001).to(dtype)
    gradient[0, :4] = torch.tensor([inf, -0.0, nan, torch.finfo(dtype).tiny])
    for number in (0.3, -1.7, 0.0, 1e-3, 3e4, 1 + 2**-23):
        for factor in (torch.tensor(number), torch.tensor([number])):
            assert_scaled(backend, gradient, lambda x: x, factor.to(of_factor))
    for number in (nan, inf, -inf):
        small = gradient[0, :50].clone()
        assert_scaled(backend, small, lambda x: x, torch.tensor(number, dtype=of_factor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [1, 2, 7, 15, 4095])
@pytest.mark.parametrize("start", range(8))
def test_a_gradient_that_begins_anywhere(backend, start, length, dtype):
    buffer = torch.randn(length + 16).to(dtype)
    assert_scaled(backend, buffer, lambda x: x[start : start + length], torch.tensor(0.7))


# what a gradient looks like, as a view of something larger
VIEWS = {
    "without the last token": lambda x: x.view(4, 5, 1050)[:, :-1],
    "of the first tokens": lambda x: x.view(4, 5, 1050)[:, :1],
    "a padded vocabulary": lambda x: x.view(4, 5, 1050)[..., :1043],
    "an odd vocabulary": lambda x: x.view(1, 20, 1050)[..., 1:1044],
    "permuted": lambda x: x.view(4, 5, 1050).transpose(0, 1),
    "permuted and padded": lambda x: x.view(4, 5, 1050).transpose(0, 2)[3:],
    "one row": lambda x: x.view(4, 5, 1050)[1:2, 2:3],
    "short segments": lambda x: x.view(-1, 42)[:, :40],
    "very short segments": lambda x: x.view(-1, 21)[:300, :20],
    "every other": lambda x: x[:200:2],
    "one number": lambda x: x[5],
    "nothing": lambda x: x[:0],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_views(backend, view, dtype):
    buffer = torch.randn(4 * 5 * 1050).to(dtype)
    assert_scaled(backend, buffer, VIEWS[view], torch.tensor(0.7))


def test_segments_are_shared_among_programs(backend):
    for rows, length in ((1, 70_000), (2, 20_003), (7, 5000)):
        buffer = torch.randn(rows, length + 3).bfloat16()
        assert_scaled(backend, buffer, lambda x: x[:, :-3], torch.tensor(0.7))


def test_segments_further_apart_than_an_index_of_32_bits_reaches(backend):
    distance = 2**31 + 64
    gradient = torch.empty(distance + 40, dtype=torch.bfloat16).as_strided((2, 40), (distance, 1))
    gradient.normal_()
    expected = gradient * 0.5
    operators(backend).scale_(gradient, torch.tensor(0.5))
    assert torch.equal(gradient, expected)


def test_a_factor_of_one_leaves_every_bit(backend):
    gradient = torch.randint(-(2**15), 2**15, (70_000,)).to(torch.int16).view(torch.bfloat16)
    before = bits(gradient).clone()
    for dtype in FACTORS:
        operators(backend).scale_(gradient, torch.ones((), dtype=dtype))
    assert torch.equal(bits(gradient), before)


@pytest.mark.not_on("triton")  # which leaves them to torch
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:60].view(3, 4, 5)[:, :3, :4],  # two strides between segments
        lambda x: x[:5].expand(3, 5),
        lambda x: x.as_strided((4, 5), (3, 1)),
    ],
)
def test_other_layouts_are_refused(backend, view):
    whole = torch.randn(100)
    before = whole.clone()
    with pytest.raises(RuntimeError, match="contiguous segments"):
        operators(backend).scale_(view(whole), torch.tensor(2.0))
    assert torch.equal(whole, before)


def test_segments_cover_every_element_once(backend):
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

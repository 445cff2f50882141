"""Scaling a gradient in place on the host build of the CUDA kernel."""

import pytest
import torch

from tests.support.cuda_host import assert_program_passes, watched
from tests.support.cuda_on_host import scale_

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize(("sanitizer", "warp"), [("address", 32), ("thread", 8)])
def test_under_sanitizers(sanitizer, warp):
    assert_program_passes("scale", sanitizer, warp=warp)


def exactly(gradient, factor):
    """Multiplied in float32 and rounded once."""
    return (gradient.float() * factor.float()).to(gradient.dtype)


# what a gradient looks like, as a view of something larger
VIEWS = {
    "contiguous": lambda x: x[: 7 * 1001].view(7, 1001),
    "misaligned": lambda x: x[3:5004],
    "padded rows": lambda x: x[: 8 * 1000].view(8, 1000)[:, :997],
    "all but the last token": lambda x: x[: 4 * 5 * 333].view(4, 5, 333)[:, :-1],
    "transposed": lambda x: x[: 7 * 100].view(7, 100).t(),
    "batches of padded rows": lambda x: x[: 2 * 3 * 64].view(2, 3, 64)[..., :60],
    "one number": lambda x: x[5],
    "one row of many": lambda x: x[: 4 * 90].view(4, 1, 90)[1:2],
    "every other element": lambda x: x[:200:2],
    "nothing": lambda x: x[:0],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", VIEWS)
def test_every_layout(name, dtype):
    whole = torch.randn(9000).to(dtype)
    before = whole.clone()
    factor = torch.tensor(-0.37)
    scale_(VIEWS[name](whole), factor)
    expected = before.clone()
    view = VIEWS[name](expected)
    view.copy_(exactly(view, factor))
    assert torch.equal(whole, expected)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:60].view(3, 4, 5)[:, :3, :4],  # two strides between segments
        lambda x: x[:5].expand(3, 5),
        lambda x: x.as_strided((4, 5), (3, 1)),
    ],
)
def test_other_layouts_are_refused(view):
    whole = torch.randn(100)
    before = whole.clone()
    with pytest.raises(RuntimeError, match="contiguous segments"):
        scale_(view(whole), torch.tensor(2.0))
    assert torch.equal(whole, before)


@pytest.mark.parametrize("factor", [0.0, float("inf"), float("nan"), 1e-30, 3.1, 1 + 2**-23])
@pytest.mark.parametrize("factor_dtype", [torch.float64, *DTYPES])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_factor(dtype, factor_dtype, factor):
    gradient = torch.randn(1000).to(dtype)
    gradient[:4] = torch.tensor([float("inf"), float("nan"), 0.0, -0.0])
    number = torch.tensor([factor], dtype=factor_dtype)
    expected = exactly(gradient, number)
    scale_(gradient, number)
    assert torch.equal(gradient.nan_to_num(7), expected.nan_to_num(7))
    assert torch.equal(gradient.isnan(), expected.isnan())


def test_segments_further_apart_than_an_index_of_32_bits_reaches():
    distance = 2**31 + 64
    gradient = torch.empty(distance + 40, dtype=torch.bfloat16).as_strided((2, 40), (distance, 1))
    gradient.normal_()
    expected = exactly(gradient, torch.tensor(0.5))
    scale_(gradient, torch.tensor(0.5))
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize(("factor", "times"), [(1.0, 0), (0.5, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_factor_of_one_moves_no_byte(dtype, factor, times):
    gradient = torch.randn(5000).to(dtype)
    before = gradient.clone()
    with watched("scale", gradient) as [(loads, stores)]:
        scale_(gradient, torch.tensor(factor))
    assert (loads == times).all()
    assert (stores == times).all()
    assert torch.equal(gradient, exactly(before, torch.tensor(factor)))

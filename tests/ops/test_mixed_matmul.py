"""The product on the CPU's matrix tiles: float32 sums of bfloat16 operands, against float64."""

import pytest
import torch

from fastrl import native

pytestmark = pytest.mark.skipif(not native.has_matrix_tiles(), reason="no AMX tiles here")

SHAPES = [(1, 1, 1), (5, 7, 3), (16, 16, 32), (32, 32, 32), (33, 47, 65), (600, 1050, 40)]
LAYOUTS = {
    "split rows": (torch.float32, False),
    "split columns": (torch.float32, True),
    "bfloat16": (torch.bfloat16, False),
}


def matmul(out, a, b, *, accumulate=False):
    torch.ops.fastrl.mixed_matmul_(out, a, b, accumulate)
    return out


def operands(m, n, k, layout="bfloat16", b_by_column=False):
    dtype, by_column = LAYOUTS[layout]
    a = torch.randn(k, m).t() if by_column else torch.randn(m, k)
    b = (torch.randn(n, k).t() if b_by_column else torch.randn(k, n)).bfloat16()
    return a.to(dtype), b


def budget(a, b):
    """Two bfloat16 hold 16 bits of a float32; a sum of float32 loses half an ulp per term."""
    size = a.double().abs() @ b.double().abs()
    representation = 2.0**-16 if a.dtype == torch.float32 else 0.0
    return (representation + a.shape[1] ** 0.5 * 2.0**-23) * size


@pytest.mark.parametrize("b_by_column", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_agrees_with_float64(shape, layout, b_by_column):
    a, b = operands(*shape, layout, b_by_column)
    exact = a.double() @ b.double()
    out = torch.full(shape[:2], torch.nan)
    assert ((matmul(out, a, b) - exact).abs() <= budget(a, b)).all()
    before = out.clone()
    matmul(out, a, b, accumulate=True)
    assert ((out - before - exact).abs() <= budget(a, b) + 2.0**-22 * exact.abs()).all()


def test_rows_of_the_result_may_be_apart():
    a, b = operands(20, 30, 40)
    wide = torch.full((20, 50), 7.0)
    matmul(wide[:, :30], a, b)
    assert torch.equal(wide[:, :30], matmul(torch.empty(20, 30), a, b))
    assert (wide[:, 30:] == 7.0).all()


def test_long_sums_do_not_depend_on_the_number_of_threads():
    a, b = operands(40, 50, 40_000, "split rows")
    found = matmul(torch.empty(40, 50), a, b)
    assert ((found - a.double() @ b.double()).abs() <= budget(a, b)).all()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert torch.equal(found, matmul(torch.empty(40, 50), a, b))
    finally:
        torch.set_num_threads(threads)


def test_a_broken_row_stays_by_itself():
    a, b = operands(40, 20, 35, "split rows")
    clean = matmul(torch.empty(40, 20), a, b)
    a[3, 4], a[17, 0] = torch.nan, torch.inf
    found = matmul(torch.empty(40, 20), a, b)
    broken = torch.zeros(40, dtype=torch.bool)
    broken[[3, 17]] = True
    assert not found[broken].isfinite().any()
    assert torch.equal(found[~broken], clean[~broken])


def test_products_of_other_libraries_between_ours_are_unharmed():
    a, b = operands(64, 64, 64)
    ours, theirs = matmul(torch.empty(64, 64), a, b), a @ b
    for _ in range(3):
        assert torch.equal(matmul(torch.empty(64, 64), a, b), ours)
        assert torch.equal(a @ b, theirs)


@pytest.mark.parametrize(
    ("out", "a", "b", "message"),
    [
        (torch.empty(2, 4), torch.ones(2, 3), torch.ones(3, 4), "b must have dtype BFloat16"),
        (torch.empty(2, 4), torch.ones(2, 3), torch.ones(5, 4).bfloat16(), "must fit"),
        (torch.empty(2, 5), torch.ones(2, 3), torch.ones(3, 4).bfloat16(), "out must be row-major"),
        (torch.empty(2, 4).half(), torch.ones(2, 3), torch.ones(3, 4).bfloat16(), "out must have"),
        (torch.empty(2, 4), torch.ones(2, 0), torch.ones(0, 4).bfloat16(), "must have terms"),
        (torch.empty(2, 4), torch.ones(2, 6)[:, ::2], torch.ones(3, 4).bfloat16(), "a must be"),
    ],
)
def test_mismatched_operands_are_refused(out, a, b, message):
    with pytest.raises(RuntimeError, match=message):
        matmul(out, a, b)

"""The GEMMs of the LM head: which are chosen, what they round; those on a CPU's matrix tiles."""

import contextlib

import pytest
import torch

from fastrl import native
from fastrl.ops._head import products
from fastrl.ops._head.products import ConvertedProducts, choose_products
from fastrl.ops._head.tensor_cores import TensorCoreProducts, gemm_dtype, multiply_bfloat16
from tests.ops.linear.tensor_cores import tensor_cores  # noqa: F401

ROWS, WIDTH, VOCABULARY = 5, 8, 37
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_tensor_cores_round_operands_once(tensor_cores, dtype):  # noqa: F811
    hidden = torch.randn(ROWS, WIDTH).to(dtype)
    weight = torch.randn(VOCABULARY, WIDTH)
    grad = torch.randn(ROWS, VOCABULARY).bfloat16()
    cores = TensorCoreProducts(weight, dtype)
    logits = torch.empty(ROWS, VOCABULARY)
    cores.logits(hidden, logits)
    torch.testing.assert_close(logits, (hidden.double() @ weight.to(dtype).double().t()).float())
    found = torch.empty(ROWS, WIDTH)
    cores.hidden_gradient(grad, found)
    torch.testing.assert_close(found, (grad.double() @ weight.bfloat16().double()).float())
    total = torch.full((VOCABULARY, WIDTH), torch.nan)
    cores.weight_gradient(grad, hidden, total, accumulate=False)
    cores.weight_gradient(grad, hidden, total, accumulate=True)
    expected = 2 * grad.double().t() @ hidden.bfloat16().double()
    torch.testing.assert_close(total, expected.float())


def test_the_weight_is_cast_once_and_not_at_all_in_its_own_dtype(tensor_cores):  # noqa: F811
    weight = torch.randn(VOCABULARY, WIDTH)
    cores = TensorCoreProducts(weight, BF16)
    assert cores._weight_of_gradient is cores._weight_of_gradient is cores._weight
    assert TensorCoreProducts(weight.bfloat16(), BF16)._weight.dtype == BF16
    half = TensorCoreProducts(weight.half(), F16)
    assert half._weight is half._given
    assert half._weight_of_gradient is half._weight_of_gradient


def operands(*dtypes, device="cuda"):
    class OnDevice:
        def __init__(self, dtype):
            self.dtype, self.device = dtype, torch.device(device)

    return map(OnDevice, dtypes)


@contextlib.contextmanager
def autocast_of_a_gpu(dtype):
    """`torch.autocast` turns itself off where there is none."""
    torch.set_autocast_enabled("cuda", True)
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_dtype("cuda", dtype)
    try:
        yield
    finally:
        torch.set_autocast_dtype("cuda", before)
        torch.set_autocast_enabled("cuda", False)


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_the_dtype_of_the_gemms_is_that_of_autocast_or_of_both_operands(backend):
    assert gemm_dtype(*operands(BF16, BF16), backend) == BF16
    assert gemm_dtype(*operands(F16, F16), backend) == F16
    for others in ((F32, F32), (BF16, F32), (F32, BF16), (BF16, F16), (F64, F64)):
        assert gemm_dtype(*operands(*others), backend) is None
    for dtype in (BF16, F16):
        with autocast_of_a_gpu(dtype):
            for both in ((F32, F32), (BF16, F32), (BF16, BF16), (F16, F16)):
                assert gemm_dtype(*operands(*both), backend) == dtype
            assert gemm_dtype(*operands(F32, F64), backend) is None
            assert gemm_dtype(*operands(F32, F32), "reference") is None
            with torch.autocast("cuda", enabled=False):
                assert gemm_dtype(*operands(F32, F32), backend) is None
    with torch.autocast("cpu", BF16):
        assert gemm_dtype(*operands(F32, F32, device="cpu"), backend) is None  # the interpreter


def test_the_gemms_are_chosen_by_dtype_backend_and_machine(monkeypatch):
    def chosen(hidden, weight, backend, operand_dtype=None):
        tensors = (torch.empty(1, 1, dtype=dtype) for dtype in (hidden, weight))
        return type(choose_products(*tensors, F32, backend, operand_dtype))

    def an_old_gpu(device):
        return False

    for tiles, expected in ((True, products.TileProducts), (False, ConvertedProducts)):
        monkeypatch.setattr(products.native, "has_matrix_tiles", lambda tiles=tiles: tiles)
        assert chosen(BF16, BF16, "cpu") is expected
    assert chosen(BF16, F32, "cpu") is ConvertedProducts
    assert chosen(BF16, BF16, "reference") is ConvertedProducts
    for backend in ("triton", "cuda"):
        assert chosen(F32, F32, backend, BF16) is TensorCoreProducts
        assert chosen(F32, F32, backend) is ConvertedProducts
    monkeypatch.setattr(products, "multiply_bfloat16", an_old_gpu)
    assert chosen(F16, F16, "triton", F16) is ConvertedProducts


@pytest.mark.parametrize(
    ("capability", "expected"), [((7, 5), False), ((8, 0), True), ((9, 0), True)]
)
def test_gpus_older_than_sm_80_multiply_in_float32(monkeypatch, capability, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    assert multiply_bfloat16.__wrapped__(torch.device("cuda", 0)) is expected
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert multiply_bfloat16.__wrapped__(torch.device("cuda", 0))


# --- the product on the matrix tiles: float32 sums of bfloat16 operands

tiles = pytest.mark.skipif(not native.has_matrix_tiles(), reason="no AMX tiles here")
SHAPES = [(1, 1, 1), (5, 7, 3), (16, 16, 32), (32, 32, 32), (33, 47, 65), (600, 1050, 40)]
LAYOUTS = {
    "split rows": (torch.float32, False),
    "split columns": (torch.float32, True),
    "bfloat16": (torch.bfloat16, False),
}


def matmul(out, a, b, *, accumulate=False):
    torch.ops.fastrl.mixed_matmul_(out, a, b, accumulate)
    return out


def matrices(m, n, k, layout="bfloat16", b_by_column=False):
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
@tiles
def test_agrees_with_float64(shape, layout, b_by_column):
    a, b = matrices(*shape, layout, b_by_column)
    exact = a.double() @ b.double()
    out = torch.full(shape[:2], torch.nan)
    assert ((matmul(out, a, b) - exact).abs() <= budget(a, b)).all()
    before = out.clone()
    matmul(out, a, b, accumulate=True)
    assert ((out - before - exact).abs() <= budget(a, b) + 2.0**-22 * exact.abs()).all()


@tiles
def test_rows_of_the_result_may_be_apart():
    a, b = matrices(20, 30, 40)
    wide = torch.full((20, 50), 7.0)
    matmul(wide[:, :30], a, b)
    assert torch.equal(wide[:, :30], matmul(torch.empty(20, 30), a, b))
    assert (wide[:, 30:] == 7.0).all()


@tiles
def test_long_sums_do_not_depend_on_the_number_of_threads():
    a, b = matrices(40, 50, 40_000, "split rows")
    found = matmul(torch.empty(40, 50), a, b)
    assert ((found - a.double() @ b.double()).abs() <= budget(a, b)).all()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert torch.equal(found, matmul(torch.empty(40, 50), a, b))
    finally:
        torch.set_num_threads(threads)


@tiles
def test_a_broken_row_stays_by_itself():
    a, b = matrices(40, 20, 35, "split rows")
    clean = matmul(torch.empty(40, 20), a, b)
    a[3, 4], a[17, 0] = torch.nan, torch.inf
    found = matmul(torch.empty(40, 20), a, b)
    broken = torch.zeros(40, dtype=torch.bool)
    broken[[3, 17]] = True
    assert not found[broken].isfinite().any()
    assert torch.equal(found[~broken], clean[~broken])


@tiles
def test_products_of_other_libraries_between_ours_are_unharmed():
    a, b = matrices(64, 64, 64)
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
@tiles
def test_mismatched_operands_are_refused(out, a, b, message):
    with pytest.raises(RuntimeError, match=message):
        matmul(out, a, b)

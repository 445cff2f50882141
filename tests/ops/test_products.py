"""The GEMMs of the LM head: which are chosen, and what they round."""

import contextlib

import pytest
import torch

from fastrl.ops._linear import products
from fastrl.ops._linear.products import ConvertedProducts, choose_products
from fastrl.ops._linear.tensor_cores import TensorCoreProducts, gemm_dtype, multiply_bfloat16
from tests.ops.tensor_cores import tensor_cores  # noqa: F401

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

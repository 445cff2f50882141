"""The GEMMs of the LM head: the same gradients with every library."""

import pytest
import torch

from fastrl.ops._linear import products
from fastrl.ops._linear.products import (
    ConvertedProducts,
    TensorCoreProducts,
    choose_products,
    narrowed,
)

ROWS, WIDTH, VOCABULARY = 5, 8, 37


@pytest.fixture
def wide_results(monkeypatch):
    """torch.mm and torch.addmm with `out_dtype`, which torch only has on a GPU."""

    def mm(a, b, *, out_dtype, out):
        assert a.dtype == b.dtype == torch.bfloat16
        assert out.dtype == out_dtype == torch.float32
        return out.copy_(a.double() @ b.double())

    def addmm(total, a, b, *, out_dtype, out):
        assert out is total
        product = mm(a, b, out_dtype=out_dtype, out=torch.empty_like(out))
        return out.add_(product)

    monkeypatch.setattr(products.torch, "mm", mm)
    monkeypatch.setattr(products.torch, "addmm", addmm)


@pytest.mark.parametrize("columns", [1, 2, 3, 16, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_matrix_is_narrowed_in_its_own_memory(dtype, columns):
    matrix = torch.randn(4, columns)
    expected, memory = matrix.to(dtype), matrix.untyped_storage().data_ptr()
    narrow = narrowed(matrix, dtype)
    assert torch.equal(narrow, expected)
    assert narrow.untyped_storage().data_ptr() == memory


def test_tensor_cores_round_the_gradient_of_the_logits_and_nothing_else(wide_results):
    hidden = torch.randn(ROWS, WIDTH).bfloat16()
    weight = torch.randn(VOCABULARY, WIDTH).bfloat16()
    grad = torch.randn(ROWS, VOCABULARY)
    cores = TensorCoreProducts(torch.bfloat16)
    logits = torch.empty(ROWS, VOCABULARY)
    cores.logits(hidden, weight, logits)
    torch.testing.assert_close(logits.double(), hidden.double() @ weight.double().t())
    rounded = grad.bfloat16().double()
    operand = cores.gradient_operand(grad.clone())
    found = torch.empty(ROWS, WIDTH)
    cores.hidden_gradient(operand, weight, found)
    torch.testing.assert_close(found.double(), rounded @ weight.double())
    total = torch.full((VOCABULARY, WIDTH), torch.nan)
    cores.weight_gradient(operand, hidden, total, accumulate=False)
    cores.weight_gradient(operand, hidden, total, accumulate=True)
    torch.testing.assert_close(total.double(), 2 * rounded.t() @ hidden.double())


def test_the_gemm_is_chosen_by_device_dtype_and_machine(monkeypatch):
    def chosen(hidden, weight, backend, device="cpu"):
        operands = (torch.empty(1, 1, dtype=dtype, device="meta") for dtype in (hidden, weight))

        class OnDevice:
            def __init__(self, tensor):
                self.dtype, self.device = tensor.dtype, torch.device(device)
                self.stride = tensor.stride

        return choose_products(*map(OnDevice, operands), torch.float32, backend)

    half, full = torch.bfloat16, torch.float32
    for tiles, expected in ((True, products.TileProducts), (False, ConvertedProducts)):
        monkeypatch.setattr(products.native, "has_matrix_tiles", lambda tiles=tiles: tiles)
        assert type(chosen(half, half, "cpu")) is expected
    assert type(chosen(half, full, "cpu")) is ConvertedProducts
    assert type(chosen(half, half, "reference")) is ConvertedProducts
    for backend in ("triton", "cuda"):
        assert type(chosen(half, half, backend, "cuda")) is TensorCoreProducts
        assert type(chosen(full, full, backend, "cuda")) is ConvertedProducts
        assert type(chosen(torch.float16, torch.float16, backend, "cuda")) is ConvertedProducts
    assert type(chosen(half, half, "triton", "cpu")) is ConvertedProducts  # the interpreter

"""The GEMMs of a GPU on the CPU: products of 16-bit matrices with float32 results."""

import functools

import pytest
import torch

from fastrl.ops._head import tensor_cores as module


def _accepted(matrix):
    """Whether cuBLAS takes a matrix as it is: one stride is 1, the other spans what it must."""
    rows, columns = matrix.stride()
    return (columns == 1 and rows >= matrix.shape[1]) or (rows == 1 and columns >= matrix.shape[0])


def wide_mm(a, b, *, out_dtype, out):
    """`torch.mm` with `out_dtype`, which torch has on a GPU only: summed exactly, rounded once."""
    assert a.dtype == b.dtype
    assert a.dtype in (torch.bfloat16, torch.float16)
    assert out.dtype == out_dtype == torch.float32
    # torch copies an operand none of whose strides is 1
    taken = [out, *(matrix for matrix in (a, b) if 1 in matrix.stride())]
    assert all(_accepted(matrix) for matrix in taken if 1 not in matrix.shape)
    assert out.shape == (a.shape[0], b.shape[1])
    return out.copy_(a.double() @ b.double())


def wide_addmm(total, a, b, *, out_dtype, out):
    """`torch.addmm` with `out_dtype`, in place."""
    assert out is total
    return out.add_(wide_mm(a, b, out_dtype=out_dtype, out=torch.empty_like(out)))


@pytest.fixture
def tensor_cores(monkeypatch):
    """Let the linear forms multiply on a CPU as on a GPU."""
    multiply_as_on_a_gpu(monkeypatch.setattr)


def multiply_as_on_a_gpu(put_attribute):
    """Put the stand-ins in place, with this function."""

    def replace(name, wide):
        plain = getattr(torch, name)

        @functools.wraps(plain)
        def run(*args, **options):
            return (wide if "out_dtype" in options else plain)(*args, **options)

        put_attribute(torch, name, run)

    replace("mm", wide_mm)
    replace("addmm", wide_addmm)
    put_attribute(module, "_WITHOUT", ())

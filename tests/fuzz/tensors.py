"""Tensors of a case: float64 numbers in the requested dtype, memory layout and masked values."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .case import Case
from .tokens import Tokens

#: Values where the mask is 0, which must not change any result.
MASKED_VALUES = {"nan": np.nan, "1e30": 1e30, "inf": np.inf}
#: A NaN whose payload carries into the sign if it is rounded to 16 bits like a number.
NAN_PAYLOADS = {
    torch.float32: (torch.int32, 0x7FFFFFFF),
    torch.bfloat16: (torch.int16, 0x7FFF),
    torch.float16: (torch.int16, 0x7FFF),
    torch.float64: (torch.int64, 0x7FFFFFFFFFFFFFFF),
}


def dtype_of(name: str) -> torch.dtype:
    return getattr(torch, name)


def flat_tensor(case: Case, values: np.ndarray, dtype: str) -> Tensor:
    """Return a tensor of these numbers, with the NaN that the case asks for."""
    result = torch.from_numpy(np.ascontiguousarray(values)).to(dtype_of(dtype))
    if case.has("nan-payload") and result.is_floating_point():
        integers, payload = NAN_PAYLOADS[result.dtype]
        bits = result.view(integers)
        bits[result.isnan()] = payload
    return result


def laid_out(x: Tensor, layout: str) -> Tensor:
    """Return the same numbers in another memory layout, with NaN in the gaps."""
    if x.numel() == 0:  # numpy gives such a tensor strides of 0
        return torch.empty(x.shape, dtype=x.dtype) if layout != "strided" else x
    if layout == "contiguous" or x.dim() == 0:
        return x
    if layout == "expanded":
        return x[:1].expand(x.shape) if bool((x == x[:1]).all()) else x
    if layout == "odd":  # the base address is not aligned to a vector
        base = _unused(x.numel() + 1, x)
        return base[1:].view(x.shape).copy_(x)
    if layout == "sliced":
        base = _unused((*x.shape[:-1], x.shape[-1] + 3), x)
        return base[..., : x.shape[-1]].copy_(x)
    if layout == "shifted":  # logits[:, :-1]
        rows = x.dim() - 2 if x.dim() > 1 else 0
        shape = list(x.shape)
        shape[rows] += 1
        return _unused(shape, x).narrow(rows, 0, x.shape[rows]).copy_(x)
    if layout == "transposed":
        if x.dim() < 2:
            return x
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "strided":
        return _unused((*x.shape[:-1], 2 * x.shape[-1]), x)[..., ::2].copy_(x)
    raise ValueError(f"no layout {layout}")


def _unused(shape: object, like: Tensor) -> Tensor:
    fill = float("nan") if like.is_floating_point() else 1
    return torch.full(
        shape if isinstance(shape, list | tuple) else (shape,), fill, dtype=like.dtype
    )


def token_values(case: Case, tokens: Tokens, values: np.ndarray) -> np.ndarray:
    """Return `[N]` values with the case's values at masked tokens."""
    if case.masked_values == "usual" or tokens.mask is None:
        return values
    return np.where(tokens.valid, values, MASKED_VALUES[case.masked_values])


def token_tensor(case: Case, tokens: Tokens, values: np.ndarray, dtype: str) -> Tensor:
    """Return `[N]` float values as a per-token tensor."""
    values = token_values(case, tokens, values)
    return laid_out(flat_tensor(case, values, dtype).view(tokens.shape), case.token_layout)


def mask_tensor(case: Case, tokens: Tokens) -> Tensor | None:
    if tokens.mask is None:
        return None
    mask = torch.from_numpy(tokens.mask.astype(np.int64)).to(dtype_of(case.mask_dtype))
    return laid_out(mask.view(tokens.shape), case.token_layout)


def bounds_tensor(case: Case, tokens: Tokens) -> Tensor | None:
    if tokens.bounds is None:
        return None
    return torch.from_numpy(tokens.bounds).to(dtype_of(case.bounds_dtype))


def numbers(x: Tensor | None) -> np.ndarray | None:
    """Return what a tensor holds, as float64, or as bool."""
    if x is None:
        return None
    x = x.detach().cpu()
    return (x if x.dtype == torch.bool else x.to(torch.float64)).numpy()

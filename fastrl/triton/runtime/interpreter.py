"""Corrections to Triton's interpreter, which the tests run in place of a GPU.

A fused multiply-add rounds once there, as the kernels rely on where logits share a large offset;
the interpreter rounds twice. It cuts float32 off to bfloat16 where a GPU rounds to nearest. Before
Triton 3.7 no bound of a loop is an integer to numpy 2.4, which converts arrays of no dimension
alone. And most of its time goes into patching the language anew whenever one function calls
another, and into a second evaluation of integer arithmetic in 64 bits.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


def _fma(self: Any, x: Any, y: Any, z: Any) -> Any:
    with np.errstate(all="ignore"):
        wide = (x.data.astype(np.float64) * y.data + z.data).astype(z.data.dtype)
    return interpreter.TensorHandle(wide, z.dtype.scalar)


def _cast(self: Any, source: Any, dtype: Any) -> Any:
    types = (source.dtype.scalar, dtype.scalar)
    if types == (tl.bfloat16, tl.float32):
        data = (source.data.astype(np.uint32) << 16).view(np.float32)
    elif types == (tl.float32, tl.bfloat16):
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16()
        data = rounded.view(torch.int16).numpy().view(np.uint16).reshape(source.data.shape)
    else:
        return _original_cast(self, source, dtype)
    return interpreter.TensorHandle(data, dtype.scalar)


def _call(self: Any, *arguments: Any, **named: Any) -> Any:
    if tl.core.is_builtin(tl.core.full):
        interpreter._patch_lang(self.fn)
    return self.rewrite()(*arguments, **named)


def _patch_tensor(tensor: Any, *scope: Any) -> None:
    _original_patch_tensor(tensor, *scope)
    tensor.__index__ = lambda self: int(self.handle.data.squeeze())


_original_cast = interpreter.InterpreterBuilder.cast_impl
_original_patch_tensor = interpreter._patch_lang_tensor


def correct() -> None:
    """Install the corrections; a second time changes nothing."""
    interpreter.InterpreterBuilder.create_fma = _fma
    interpreter.InterpreterBuilder.cast_impl = _cast
    interpreter.InterpretedFunction.__call__ = _call
    interpreter._patch_lang_tensor = _patch_tensor
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

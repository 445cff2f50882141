"""Argument checks, whose errors name the argument, the expected value and the given value."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.masked import MaskedTensor

from fastrl.tracing import is_traced

#: floating-point dtypes with full arithmetic in torch (float8 only stores)
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
)
#: What rounding adds to a log-probability of 0: a logit of 20 in bfloat16 is up to 0.06 off.
_ROUNDED_LOGPROB = 0.1
_ENOUGH_TOKENS = 16
#: Larger numbers make torch's operators on float32 tensors raise.
_LARGEST = torch.finfo(torch.float32).max


def one_of(name: str, value: object, choices: Sequence[str]) -> str:
    """Return `value` if it is one of the strings in `choices`."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {type(value).__name__}")
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")
    return value


def number(
    name: str, value: object, *, low: float | None = None, high: float | None = None
) -> float:
    """Return `value` as a float if it is a number with low <= value <= high, finite in float32.

    NumPy scalars are accepted. Symbolic numbers of a trace are returned unchanged.
    """
    traced = isinstance(value, torch.SymInt | torch.SymFloat)
    if isinstance(value, bool) or not (traced or isinstance(value, int | float | numbers.Real)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    result = cast("float", value)
    expected = "finite"
    expected += "" if low is None else f" and >= {low:g}"
    expected += "" if high is None else f" and <= {high:g}"
    try:
        result = result if traced else float(result)
    except OverflowError:
        raise ValueError(
            f"{name} must be {expected}, got an integer too large for a float"
        ) from None
    inside = (low is None or result >= low) and (high is None or result <= high)
    # torch.compile(dynamic=True) traces floats, which math.isfinite does not accept
    if not (inside and -math.inf < result < math.inf):
        raise ValueError(f"{name} must be {expected}, got {result}")
    if not -_LARGEST <= result <= _LARGEST:
        raise ValueError(f"{name} must be finite in float32, got {result}")
    return result


def positive(name: str, value: object) -> float:
    """Return `value` as a float if it is a finite number above 0."""
    result = number(name, value)
    if result <= 0:
        raise ValueError(f"{name} must be above 0, got {value}")
    return result


def around_zero(name: str, value: object) -> float | tuple[float, float]:
    """Return a positive number, or a pair (low, high) of which one may be infinite."""
    if not isinstance(value, tuple):
        return positive(name, value)
    if len(value) != 2 or any(
        isinstance(x, bool) or not isinstance(x, numbers.Real) for x in value
    ):
        raise TypeError(f"{name} must be a number or a pair (low, high), got {value}")
    if not value[0] < 0 < value[1]:
        raise ValueError(f"{name} must be (low, high) with low < 0 < high, got {value}")
    low, high = (float(x) if x in (-math.inf, math.inf) else number(name, x) for x in value)
    return low, high


def whole(name: str, value: object, *, low: int = -(2**63)) -> int:
    """Return `value` as an int if it is a 64-bit integer >= low."""
    traced = isinstance(value, torch.SymInt)
    if isinstance(value, bool) or not (traced or isinstance(value, int | numbers.Integral)):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    result = cast("int", value)
    result = result if traced else int(result)
    if result < low:
        raise ValueError(f"{name} must be at least {low}, got {value}")
    if result >= 2**63:
        raise ValueError(f"{name} must be below 2**63, got {value}")
    return result


def flag(name: str, value: object) -> bool:
    """Return `value` if it is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {type(value).__name__}")
    return value


def tensor(name: str, value: object) -> Tensor:
    """Return `value` if it is a dense tensor, but not a DTensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if is_sharded(value):
        raise TypeError(
            f"{name} must be a plain tensor, got a DTensor: pass its `to_local()` if its rows are "
            "distributed over ranks, else its `full_tensor()`"
        )
    strided = value.layout is torch.strided and not value.is_nested
    if not strided or value.is_quantized or isinstance(value, MaskedTensor):
        kind = "nested" if value.is_nested else value.dtype if value.is_quantized else value.layout
        raise TypeError(
            f"{name} must be a dense tensor, not sparse, nested, masked or quantized, got "
            f"{type(value).__name__} ({kind})"
        )
    return value


def floating(name: str, value: object) -> Tensor:
    """Return `value` if it is a tensor of a dtype in `FLOATS`."""
    result = tensor(name, value)
    if result.dtype not in FLOATS:
        mend = f": pass {name}.float()" if result.dtype in (torch.bool, *INTEGERS) else ""
        raise TypeError(
            f"{name} must be a floating-point tensor (float32, bfloat16, float16 or float64), "
            f"got {result.dtype}{mend}"
        )
    return result


def is_sharded(value: object) -> bool:
    """Return whether a tensor is a DTensor (FSDP2, tensor parallelism)."""
    return hasattr(value, "full_tensor")


def integer(name: str, value: object) -> Tensor:
    """Return `value` if it is a tensor of integers."""
    result = tensor(name, value)
    if result.dtype not in INTEGERS:
        raise TypeError(f"{name} must be a tensor of integers, got {result.dtype}")
    return result


def on_device(name: str, value: Tensor, like: Tensor, like_name: str) -> None:
    """Raise unless `value` is on the device of `like`."""
    if value.device != like.device:
        raise ValueError(
            f"{name} must be on {like.device} like {like_name}, got a tensor on {value.device}"
        )


def same_shape(name: str, value: Tensor, like: Tensor, like_name: str) -> Tensor:
    """Return `value` if it has the shape and device of `like`."""
    if value.shape != like.shape:
        raise ValueError(
            f"{name} must have shape {tuple(like.shape)} like {like_name}, got {tuple(value.shape)}"
        )
    on_device(name, value, like, like_name)
    return value


def per_token(name: str, value: object) -> Tensor:
    """Return `value` if it is a floating-point tensor `[B, T]` or `[N]`."""
    result = floating(name, value)
    if result.dim() not in (1, 2):
        raise ValueError(f"{name} must have shape [B, T] or [N], got {tuple(result.shape)}")
    return result


def unread_mask(name: str, value: object, like: Tensor, like_name: str) -> Tensor:
    """Check the dtype, shape and device of a mask, but not its values."""
    result = tensor(name, value)
    if result.dtype not in (torch.bool, *INTEGERS, *FLOATS):
        raise TypeError(f"{name} must be bool, integer or float 0/1, got {result.dtype}")
    return same_shape(name, result, like, like_name)


def as_mask(name: str, value: object, like: Tensor, like_name: str) -> Tensor:
    """Return a 0/1 mask with the shape of `like` as bool."""
    result = unread_mask(name, value, like, like_name)
    if result.dtype != torch.bool and can_read(result):
        invalid = (result != 0) & (result != 1)
        if bool(invalid.any()):
            raise ValueError(
                f"{name} must be bool, integer or float 0/1, got {result[invalid][0].item()}"
            )
    return saveable(result.to(torch.bool))


def saveable(value: Tensor) -> Tensor:
    """Return `value` in a form that autograd can save: an inference tensor is cloned."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return value
    return value.clone() if value.is_inference() else value


def can_read(value: Tensor) -> bool:
    """Return whether checking values costs nothing: on a CPU, and not while tracing."""
    return value.device.type == "cpu" and not is_traced(value)


def refuse_no_logprobs(name: str, values: Tensor, active: Tensor) -> None:
    """Raise on a CPU if no finite value of the active tokens is below 0, and some are above.

    Negative log-likelihoods and probabilities are so; they would train in the wrong direction. A
    few positive values may be rounded, and a few tokens may be positive by chance.
    """
    if not (can_read(values) and can_read(active)) or values.numel() < _ENOUGH_TOKENS:
        return  # in this order: a trace would be specialized to the number of tokens
    if float(values.amax()) <= _ROUNDED_LOGPROB:  # masked tokens may be anything
        return
    of_tokens = values[active]
    of_tokens = of_tokens[of_tokens.isfinite()]
    low, high = of_tokens.aminmax() if len(of_tokens) >= _ENOUGH_TOKENS else (-1.0, 0.0)
    if low >= 0 and high > _ROUNDED_LOGPROB:
        raise ValueError(
            f"{name} must be log-probabilities in nats, which are at most 0, got values from "
            f"{float(low):.6g} to {float(high):.6g}"
        )


def sequence_bounds(cu_seqlens: object, tokens: int, like: Tensor) -> Tensor:
    """Return `cu_seqlens` as int32 `[S + 1]` if it splits `tokens` packed tokens into sequences."""
    result = integer("cu_seqlens", cu_seqlens).to(torch.int64)  # unsigned differences wrap around
    on_device("cu_seqlens", result, like, "the per-token tensors")
    if result.dim() != 1 or result.shape[0] < 1:
        raise ValueError(f"cu_seqlens must have shape [S + 1], got {tuple(result.shape)}")
    if can_read(result):
        lengths = result.diff()
        first, last = int(result[0]), int(result[-1])
        if first != 0 or last != tokens or bool((lengths < 0).any()):
            raise ValueError(
                f"cu_seqlens must rise from 0 to the number of tokens {tokens}, "
                f"got {result.tolist() if result.numel() <= 16 else f'{first} ... {last}'}"
            )
    return result.to(torch.int32)

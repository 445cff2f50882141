"""The choice of the backend for a call: a named backend, or the fastest that supports the call.

The environment variable `FASTRL_BACKEND` and `set_backend` change what `auto` means. If a named
backend cannot run the call, an error says why.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Literal, cast, get_args

import torch

from fastrl import native
from fastrl.checks import one_of
from fastrl.triton.runtime import registration as triton

Backend = Literal["auto", "reference", "cpu", "triton", "cuda"]
BACKENDS: tuple[str, ...] = get_args(Backend)

#: Fastest first, by device type. A device that is not listed uses the reference backend.
_PREFERENCE = {"cpu": ("cpu", "reference"), "cuda": ("triton", "cuda", "reference")}
#: Supported devices of each compiled backend.
_DEVICES = {
    "cpu": ("cpu",),
    "triton": ("cuda",),
    "cuda": ("cuda",),
}
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class MissingBackendWarning(UserWarning):
    """A warning that plain PyTorch runs a call because a compiled backend is not installed.

    The results are the same, but take more time and memory: on a CPU, about as much time as the
    formulas in PyTorch without fastrl. The warning comes once per process, at the first call with
    `backend="auto"` that a missing backend would have run. It names the missing backends and says
    how to get them. `set_backend("reference")` silences it.

    Examples:
        >>> import warnings
        >>> import torch
        >>> import fastrl
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore", fastrl.MissingBackendWarning)
        ...     logprobs = fastrl.token_logprobs(torch.zeros(1, 2), torch.tensor([0]))
    """


_warned = False
_default: str = one_of("FASTRL_BACKEND", os.environ.get("FASTRL_BACKEND", "auto"), BACKENDS)


def set_backend(backend: Backend) -> None:
    """Set the default backend of all later calls with `backend="auto"`.

    Args:
        backend: `"auto"` (the fastest backend that supports the call) or the name of a backend.

    Raises:
        TypeError: the name is not a string.
        ValueError: the name is unknown or the backend cannot be used on this machine.

    Examples:
        >>> import fastrl
        >>> fastrl.set_backend("reference")
        >>> fastrl.set_backend("auto")
    """
    global _default
    one_of("backend", backend, BACKENDS)
    reason = unavailable(backend)
    if reason is not None:
        raise ValueError(f"backend {backend!r} cannot be used: {reason}")
    _default = backend


def get_backend() -> Backend:
    """Return the default backend, set by `set_backend` or by `FASTRL_BACKEND`, else `auto`.

    Returns:
        `auto` or the name of a backend.

    Examples:
        >>> import fastrl
        >>> fastrl.get_backend() in ("auto", "reference", "cpu", "triton", "cuda")
        True
    """
    return cast("Backend", _default)


def unavailable(backend: str) -> str | None:
    """Return in one sentence why this machine cannot use a backend, or None if it can."""
    if backend == "cpu":
        return native.missing
    if backend == "triton":
        return triton.missing()
    if backend == "cuda" and native.cuda_missing is None:
        return None if torch.cuda.is_available() else "there is no GPU that torch can use"
    return native.cuda_missing if backend == "cuda" else None


def refusal(
    backend: str, device: torch.device, dtype: torch.dtype, unsupported: str | None = None
) -> str | None:
    """Return the reason why `backend` cannot run a call on these tensors, or None if it can.

    Args:
        backend: a concrete backend, not `auto`.
        device: the device of the tensors.
        dtype: the dtype of the tensor that determines the arithmetic.
        unsupported: the reason why no compiled kernel can run this particular call, or None.
    """
    if backend == "reference":
        return None
    reason = unavailable(backend)
    if reason is not None:
        return reason
    if device.type not in _DEVICES[backend]:
        supported = " and ".join(_DEVICES[backend])
        return f"it supports tensors on {supported}, not on {device.type}"
    if dtype not in _KERNEL_DTYPES:
        return f"it takes float32, bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    return unsupported


def resolve(
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    unsupported: str | None = None,
    *,
    partial: bool = False,
) -> str:
    """Return the concrete backend for a call.

    Args:
        backend: a backend or `auto`.
        device: the device of the tensors.
        dtype: the dtype of the tensor that determines the arithmetic.
        unsupported: the reason why no compiled kernel can run this particular call, or None.
        partial: whether `auto` may choose a compiled backend although the call is `unsupported`,
            because its kernels can still do the largest part. A named backend must do the whole
            call.

    Raises:
        ValueError: the backend is unknown, or it was named and cannot do the call.
    """
    chosen = _default if one_of("backend", backend, BACKENDS) == "auto" else backend
    if chosen == "auto":
        reason = None if partial else unsupported
        for name in _PREFERENCE.get(device.type, ()):
            if refusal(name, device, dtype, reason) is None:
                if name == "reference" and dtype in _KERNEL_DTYPES and reason is None:
                    _warn_once(device.type)
                return name
        return "reference"
    refused = refusal(chosen, device, dtype, unsupported)
    if refused is not None:
        raise ValueError(f"backend {chosen!r} cannot do this call: {refused}")
    return chosen


def _warn_once(device: str) -> None:
    """Say that no compiled backend of a device is installed, to the caller of this package."""
    global _warned
    if torch.compiler.is_compiling() or _warned:
        return
    _warned = True
    level, frame, package = 1, sys._getframe(), __name__.partition(".")[0]
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        level, frame = level + 1, frame.f_back
    lacking = "; ".join(
        f"{name}: {unavailable(name)}" for name in _PREFERENCE[device] if name != "reference"
    )
    warnings.warn(
        f"fastrl computes on {device} with plain PyTorch, which gives the same results as its "
        f"compiled backends but takes more time and memory. What is missing: {lacking}. "
        "`fastrl doctor` lists all backends; fastrl.set_backend('reference') silences this.",
        MissingBackendWarning,
        stacklevel=level,
    )


def torch_only(backend: str) -> None:
    """Check the `backend` argument of a function that is plain torch on every device.

    Raises:
        ValueError: the backend is unknown or is a compiled one.
    """
    if one_of("backend", backend, BACKENDS) not in ("auto", "reference"):
        raise ValueError(
            f"backend {backend!r} cannot do this call: the function is plain torch on every "
            "device; use auto or reference"
        )

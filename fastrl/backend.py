"""Which backend runs a call: an explicit one is used or refused, `auto` takes the fastest able one.

The environment variable `FASTRL_BACKEND` and `set_backend` change what `auto` means.
"""

from __future__ import annotations

import os
from typing import Literal, cast, get_args

import torch

from fastrl import native
from fastrl.checks import one_of
from fastrl.triton.runtime import registration as triton

Backend = Literal["auto", "reference", "cpu", "triton", "cuda"]
BACKENDS: tuple[str, ...] = get_args(Backend)

#: Fastest first, by device type. A device that is not listed uses the reference backend.
_PREFERENCE = {"cpu": ("cpu", "reference"), "cuda": ("triton", "cuda", "reference")}
#: The devices whose tensors a compiled backend takes.
_DEVICES = {
    "cpu": ("cpu",),
    "triton": ("cuda", "cpu") if triton.INTERPRETED else ("cuda",),
    "cuda": ("cuda",),
}
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_default: str = one_of("FASTRL_BACKEND", os.environ.get("FASTRL_BACKEND", "auto"), BACKENDS)


def set_backend(backend: Backend) -> None:
    """Choose the backend of every later call that does not name one itself.

    Args:
        backend: `"auto"` (the fastest that can do the call) or the name of a backend.

    Raises:
        ValueError: the name is unknown, or the backend is not usable on this machine.

    Example:
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
    """Return the default backend: the last `set_backend`, else `FASTRL_BACKEND`, else `auto`.

    Example:
        >>> import fastrl
        >>> fastrl.get_backend() in ("auto", "reference", "cpu", "triton", "cuda")
        True
    """
    return cast("Backend", _default)


def unavailable(backend: str) -> str | None:
    """Return one sentence on why a backend cannot be used on this machine, or None."""
    if backend == "cpu":
        return native.missing
    if backend == "triton":
        return triton.missing()
    if backend == "cuda" and native.cuda_missing is None:
        return None if torch.cuda.is_available() else "there is no GPU that torch can use"
    return native.cuda_missing if backend == "cuda" else None


def refusal(
    backend: str, device: torch.device, dtype: torch.dtype, unable: str | None = None
) -> str | None:
    """Return why `backend` cannot do a call on these tensors, or None.

    Args:
        backend: a concrete backend, not `auto`.
        device: where the tensors are.
        dtype: the dtype of the tensor that decides the arithmetic.
        unable: a reason why compiled kernels cannot do this very call.
    """
    if backend == "reference":
        return None
    reason = unavailable(backend)
    if reason is not None:
        return reason
    if device.type not in _DEVICES[backend]:
        takes = " and ".join(_DEVICES[backend])
        return f"it works on {takes} tensors, these are on {device.type}"
    if dtype not in _KERNEL_DTYPES:
        return f"it takes float32, bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    return unable


def resolve(
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    unable: str | None = None,
    *,
    partly: bool = False,
) -> str:
    """Return the concrete backend for a call; the first arguments are those of `refusal`.

    Args:
        backend: as in `refusal`, or `auto`.
        device: as in `refusal`.
        dtype: as in `refusal`.
        unable: as in `refusal`.
        partly: whether a kernel that is unable to do all of the call can do its largest part; then
            `auto` takes it for that. A named backend does the whole call or is refused.

    Raises:
        ValueError: the backend is unknown, or it was named and cannot do the call.
    """
    if backend != "auto":
        one_of("backend", backend, BACKENDS)
    chosen = _default if backend == "auto" else backend
    if chosen == "auto":
        reason = None if partly else unable
        for name in _PREFERENCE.get(device.type, ()):
            if refusal(name, device, dtype, reason) is None:
                return name
        return "reference"
    refused = refusal(chosen, device, dtype, unable)
    if refused is not None:
        raise ValueError(f"backend {chosen!r} cannot do this call: {refused}")
    return chosen


def torch_only(backend: str) -> None:
    """Check the backend of a function that is plain torch everywhere.

    Raises:
        ValueError: the backend is unknown, or it was named and has no kernel for the function.
    """
    if one_of("backend", backend, BACKENDS) not in ("auto", "reference"):
        raise ValueError(
            f"backend {backend!r} cannot do this call: the function is plain torch on every "
            "device; use auto or reference"
        )

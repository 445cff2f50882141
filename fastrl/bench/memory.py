"""Peak memory of a call, beyond what was allocated before it."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
from pathlib import Path

import torch

_PROCESS = Path("/proc/self")
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -2, -3, -4  # of glibc's mallopt
_LARGE = 2**17  # bytes from which glibc can return an allocation by itself
_holes: list[int] = []  # addresses of the memory that fills them


def keep_freed(keep: bool) -> None:
    """Let glibc keep freed memory for later calls, or return it to the system.

    Times want it kept, as torch's allocator of a GPU does: new pages cost more than the arithmetic
    of many calls, and differ from run to run. Peaks want it returned, or they would contain what
    the heap has lost to fragments. Does nothing with another C library, or where
    ``MALLOC_MMAP_MAX_`` is set.
    """
    if platform.libc_ver()[0] != "glibc" or "MALLOC_MMAP_MAX_" in os.environ:
        return
    libc = ctypes.CDLL("libc.so.6")
    while _holes:
        libc.free(ctypes.c_void_p(_holes.pop()))
    libc.mallopt(_MMAP_MAX, 0 if keep else 2**16)
    libc.mallopt(_MMAP_THRESHOLD, _LARGE)
    libc.mallopt(_TRIM_THRESHOLD, -1 if keep else 2**17)
    libc.mallopt(_TOP_PAD, 2**28 if keep else 2**17)
    if not keep:
        libc.malloc_trim(0)
        _fill_holes(libc)


def _fill_holes(libc: ctypes.CDLL) -> None:
    """Take the free memory within the heap, untouched, so that large tensors lie outside of it.

    After times have been measured there may be some that cannot be returned; a peak would contain
    what is lost in it to fragments.
    """
    libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
    size = 2**34
    while size > _LARGE:
        address = libc.malloc(ctypes.c_size_t(size))
        if address and address < libc.sbrk(0):
            _holes.append(address)
        else:
            libc.free(ctypes.c_void_p(address))
            size //= 2


class Peak:
    """Measure the peak of memory within a ``with`` block, in bytes.

    On a GPU it is the peak of torch's allocator, on Linux the high-water mark of the process's
    resident memory, which the kernel resets. Elsewhere ``bytes`` stays None.

    Examples:
        >>> with Peak(torch.device("cpu")) as peak:
        ...     total = torch.ones(2**24).sum()
        >>> peak.bytes is None or peak.bytes > 2**25
        True
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes: int | None = None
        self.before: int | None = None  #: bytes in use at the start

    def __enter__(self) -> Peak:
        gc.collect()
        self.before = _reset_cuda() if self.device.type == "cuda" else _reset_resident()
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is not None or self.before is None:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            self.bytes = torch.cuda.max_memory_allocated() - self.before
        else:
            self.bytes = max(0, _status("VmHWM") - self.before)


def _reset_cuda() -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _reset_resident() -> int | None:
    """Return the resident bytes and make them the high-water mark; None where that is refused."""
    if platform.libc_ver()[0] == "glibc":  # memory that it keeps would hide what the call takes
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    try:
        (_PROCESS / "clear_refs").write_text("5")
        return _status("VmRSS")
    except OSError:
        return None


def _status(field: str) -> int:
    lines = (_PROCESS / "status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))

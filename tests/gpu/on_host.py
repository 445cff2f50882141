"""The operators of the CUDA backend on CPU tensors: csrc/cuda/torch and its kernels, on the host.

They are registered under the CPU key of `fastrl_cuda`, so that `backend="cuda"` goes the whole way
from the public function to the kernel.
"""

import contextlib
import ctypes
import functools

import torch

import fastrl
from tests.gpu.host_build import compile_operators


@functools.cache
def load(*flags):
    """Register the operators, for as long as the process runs; return their library."""
    built = compile_operators(*(flags or ["-O0"]))
    torch.ops.load_library(built)
    return ctypes.CDLL(str(built))


def allow_on_a_cpu(put_item, put_attribute):
    """Let CPU tensors use the backend `cuda`; the functions put a value in its place."""
    put_item(fastrl.backend._DEVICES, "cuda", ("cpu",))
    unavailable = fastrl.backend.unavailable
    put_attribute(
        fastrl.backend, "unavailable", lambda name: None if name == "cuda" else unavailable(name)
    )


@contextlib.contextmanager
def without_clusters():
    """Launch as on a GPU that has no clusters of blocks."""
    load().use_clusters(False)
    try:
        yield
    finally:
        load().use_clusters(True)


@contextlib.contextmanager
def watched(*tensors):
    """Count the loads and stores of each byte of the memory of one or two tensors.

    Yields a pair of counts per tensor.
    """
    watch = load().watch

    def counts_of(place, x):
        size = x.untyped_storage().nbytes()
        counts = [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]
        begin, *places = (ctypes.c_void_p(y.untyped_storage().data_ptr()) for y in (x, *counts))
        watch(place, begin, ctypes.c_int64(size), *places)
        return counts

    try:
        yield [counts_of(*pair) for pair in enumerate(tensors)]
    finally:
        for place in range(len(tensors)):
            watch(place, None, ctypes.c_int64(0), None, None)

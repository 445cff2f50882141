"""Tests that need a GPU (`make gpu`), for every backend that takes its tensors.

This folder is self-contained: it needs pytest and torch, but no other tests. A backend that cannot
be used skips its tests and fails test_gpu_backends.py.
"""

import pytest
import torch

from tests.gpu.device.outcomes import end_process

GPU_BACKENDS = ("triton", "cuda", "reference")


def pytest_configure(config):
    config.addinivalue_line("markers", "alone: needs most of the GPU's memory")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name == "device":
            item.add_marker(pytest.mark.gpu)
            if "memory" in item.fixturenames:
                item.add_marker(pytest.mark.alone)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="there is no GPU that torch can use"))


@pytest.fixture(autouse=True)
def fixed_seed(request):
    torch.manual_seed(20260923)
    yield
    if torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
        except RuntimeError as lost:  # of this test; every later call raises it again
            end_process(request.config, request.node.nodeid, f"it lost the GPU: {lost}")
            raise
        torch.cuda.empty_cache()


@pytest.fixture
def asked(request):
    """The backends to test, all unless `--backends` names some."""
    names = (request.config.getoption("--backends", "") or " ".join(GPU_BACKENDS)).split()
    return [name for given in names for name in given.split(",") if name]


@pytest.fixture(params=GPU_BACKENDS)
def backend(request, asked):
    return _usable(request.param, asked)


@pytest.fixture(params=("triton", "cuda"))
def kernels(request, asked):
    """The backends with GPU kernels."""
    return _usable(request.param, asked)


def _usable(name, asked):
    if name not in asked:
        pytest.skip(f"backend {name} was left out")
    from fastrl.backend import unavailable  # the tests of the runner have no fastrl

    reason = unavailable(name)
    if reason is not None:
        pytest.skip(f"backend {name} cannot be used: {reason}")
    return name


@pytest.fixture
def no_sync():
    """Make every call that synchronizes with the GPU raise."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def compilations(monkeypatch):
    """Names of the Triton kernels that are compiled during the test."""
    jit = pytest.importorskip("triton.runtime.jit")
    names = []
    compile_one = jit.JITFunction._do_compile

    def counted(self, *arguments, **named):
        names.append(self.__name__)
        return compile_one(self, *arguments, **named)

    monkeypatch.setattr(jit.JITFunction, "_do_compile", counted)
    return names


@pytest.fixture
def memory():
    """A function that skips the test if the GPU has fewer free bytes."""

    def needs(size):
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        if free < size:
            pytest.skip(f"needs {size / 2**30:.0f} GiB of GPU memory, {free / 2**30:.0f} are free")

    return needs


@pytest.fixture
def captured(request):
    """A function that captures a call in a CUDA graph; it returns the result and the replay."""
    failed = []

    def capture(call):
        failed.append(True)
        found = _captured(call)
        failed.pop()
        return found

    yield capture
    if failed:  # before torch 2.12 the allocator of this process is of no use any more
        end_process(request.config, request.node.nodeid, "a capture failed")


def _captured(call):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()  # compiles and warms up outside the capture
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        answer = call()
    return answer, graph.replay

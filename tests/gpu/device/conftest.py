"""Tests that need a GPU (`make gpu`), for every backend that takes its tensors.

They need pytest, torch and NumPy, in which tests/calls says what is right, and no other tests. A
backend that cannot be used skips its tests and fails test_gpu_calls.py.
"""

import pytest
import torch

from tests.gpu.device.run import LOST

GPU_BACKENDS = ("triton", "cuda", "reference")


def pytest_configure(config):
    config.addinivalue_line("markers", "alone: needs most of the GPU's memory")
    # beside the memory below, this changes operators of torch, some of which only warn
    config.addinivalue_line("filterwarnings", "ignore:.*eterministic")


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
        except RuntimeError:  # of this test; every later call raises it again
            request.node.stash[LOST] = True
            raise
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """What is allocated holds NaN, where the allocator would hand back the last right answer."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(8, device="cuda").isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=GPU_BACKENDS)
def backend(request):
    return usable(request.param)


@pytest.fixture(params=("triton", "cuda"))
def kernels(request):
    """The backends with GPU kernels."""
    return usable(request.param)


def usable(name):
    from fastrl.backend import unavailable  # the test of the runner has no fastrl

    reason = unavailable(name)
    if reason is not None:
        pytest.skip(f"backend {name} cannot be used: {reason}")
    return name


@pytest.fixture
def no_sync():
    """A function that makes every call after it raise if it synchronizes with the GPU."""

    def start():
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")

    yield start
    torch.cuda.set_sync_debug_mode("default")


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

    def capture(call):
        # before torch 2.12 the allocator of this process is of no use after a failure
        request.node.stash[LOST] = True
        found = in_a_graph(call)
        del request.node.stash[LOST]
        return found

    return capture


def in_a_graph(call):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()  # compiles and warms up outside the capture
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        answer = call()
    return answer, graph.replay

"""A GPU that is pretended: CPU tensors take the place of its tensors.

    pytest -p tests.gpu.device.pretended                        # the tests of this folder
    python -m tests.fuzz --backend cuda --device pretended      # cases against the oracle

A graph is the call that it holds, made again at each replay. Tests of this folder take the CPU
backend, which shows that a test runs and that its inputs are right; with
FASTRL_TESTED="triton cuda" in the environment they execute the kernels (tests/ptx), as the fuzzer
does, and multiply as on tensor cores, which shows that bounds are right, too.
"""

from __future__ import annotations

import contextlib
import os

import pytest
import torch
from torch._ops import OpOverloadPacket
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

EXECUTED = os.environ.get("FASTRL_TESTED", "").split()


class Pretended(TorchFunctionMode):
    """Put everything that belongs on a GPU on the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if isinstance(func, OpOverloadPacket):  # "cuda" may be a backend
            return func(*args, **(kwargs or {}))
        given = {name: _on_cpu(x) for name, x in (kwargs or {}).items()}
        return func(*map(_on_cpu, args), **given)


def _on_cpu(x):
    return torch.device("cpu") if isinstance(x, str) and x == "cuda" else x


def execute(backend, put_item, put_attribute):
    """Let CPU tensors use a backend's kernels, also by `auto`, and multiply as a GPU does."""
    from fastrl.backend import _PREFERENCE
    from fastrl.ops._autograd import known_gradient
    from fastrl.ops._companions import pair
    from tests.ops.linear.tensor_cores import multiply_as_on_a_gpu
    from tests.ptx import backends

    backends.use(backend, put_item, put_attribute)
    put_item(_PREFERENCE, "cpu", (backend, "reference"))
    multiply_as_on_a_gpu(put_attribute)
    put_attribute(known_gradient, "_on_gpu", lambda factor: True)  # scales by a kernel
    if backend == "cuda":  # which has no kernels for divergences
        backends.prepare("triton")
        own = pair.operators
        put_attribute(pair, "operators", lambda name: own("triton" if name == "cpu" else name))


class Stream:
    """A stream on which everything is done at once."""

    def wait_stream(self, other):
        pass


@pytest.fixture(autouse=True)
def pretended_gpu(monkeypatch, request):
    plugins = request.config.pluginmanager.get_plugins()
    (conftest,) = (one for one in plugins if hasattr(one, "GPU_BACKENDS"))
    monkeypatch.setattr(conftest, "usable", lambda name: _usable(name, monkeypatch))
    monkeypatch.setattr(conftest, "in_a_graph", _repeated)
    for name in ("synchronize", "empty_cache", "set_sync_debug_mode"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))
    with Pretended():
        yield


def _usable(name, monkeypatch):
    if not EXECUTED:
        return "cpu"
    if name in EXECUTED:
        execute(name, monkeypatch.setitem, monkeypatch.setattr)
    return name


def _repeated(call):
    answer = call()

    def replay():
        for one, new in zip(tree_leaves(answer), tree_leaves(call()), strict=True):
            if isinstance(one, torch.Tensor):
                one.detach().copy_(new.detach())

    return answer, replay


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    torch.cuda.is_available = lambda: True
    if EXECUTED:  # before any tensor of a module: the machine lets kernels reach what it knows
        from tests.ptx.machine import machine

        machine()

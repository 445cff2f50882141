"""The tests of this folder without a GPU: `pytest -p tests.gpu.device.pretended`.

CPU tensors and the CPU backend take the place of the GPU's, and a graph is the call that it holds,
made again at each replay. It shows that a test runs and that its inputs are right; it says nothing
about a GPU. With FASTRL_TESTED="triton cuda" in the environment the kernels are executed on the CPU
(tests/ptx), which shows that the budgets are right, too.
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
        from tests.ptx import backends

        backends.use(name, monkeypatch.setitem, monkeypatch.setattr)
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

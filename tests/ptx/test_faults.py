"""The machine finds what it is there for: the faults of faults.py.

A fault is an edit of a kernel's text. The public function then goes the whole way to the launch,
with a few seeds, until one finds it; the kernel as it is passes the same call with all of them.
"""

import functools
import re

import pytest
import torch

from tests.ptx import backends, cuda_operators
from tests.ptx.faults import FAULTS, one_pass
from tests.ptx.machine import machine

pytestmark = pytest.mark.slow

SEEDS = range(8)


def outcome(call, seed):
    """Return the values of a call, or what the machine says of it."""
    torch.manual_seed(17)
    # on one SM a cluster of the one-pass kernel takes several rows
    with cuda_operators.device(9, 1 if call.func is one_pass else 132):
        machine().seed = seed
        try:
            return [x.detach().clone() for x in call()]
        except RuntimeError as error:
            return str(error)
        finally:
            machine().seed = 0


@functools.cache
def control(call, seed):
    found = outcome(call, seed)
    assert not isinstance(found, str), found
    return found


def differ(some, others):
    pairs = zip(some, others, strict=True)
    return any((x - y).abs().max() > 1e-5 * y.abs().max() for x, y in pairs)


@pytest.fixture(params=FAULTS)
def fault(request, monkeypatch):
    found = FAULTS[request.param]
    backends.use(found.call.args[0], monkeypatch.setitem, monkeypatch.setattr)
    monkeypatch.setattr(machine(), "seed", 0)
    return found


def test_a_fault_is_found(fault, monkeypatch):
    for seed in SEEDS:
        assert not differ(control(fault.call, seed), control(fault.call, 0))
    given, edited = machine().kernel, functools.cache(fault.put_into)

    def kernel(ptx, name):
        return given(edited(ptx, name) if fault.kernel in name else ptx, name)

    monkeypatch.setattr(machine(), "kernel", kernel)
    for seed in SEEDS:
        found = outcome(fault.call, seed)
        assert edited.cache_info().currsize == 1
        if isinstance(found, str):
            assert fault.message
            assert re.search(fault.message, found), found
            return
        if differ(found, control(fault.call, seed)):
            assert not fault.message, "wrong values without a message"
            return
    pytest.fail("no seed found it")

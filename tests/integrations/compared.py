"""Results and gradients of ours and of a trainer's function, and whether they are equal."""

import pytest
import torch

from fastrl.integrations.replacing import parameters
from tests.integrations.packages import importable


def implementations(transcribed, home, *path):
    """A transcription and, where it is installed, the object of this path in the package."""
    found, own = {"transcribed": transcribed}, importable(home)
    if own:
        for name in path:
            own = getattr(own, name)
        found["installed"] = own
    return found


def each(implementations):
    """A fixture that is each of these in turn."""
    return pytest.fixture(params=implementations.values(), ids=implementations)(
        lambda request: request.param
    )


def outcome(function, *leaves):
    """What a function of leaves returns, without graph, and gradients of three times its first."""
    leaves = [x.clone().requires_grad_() for x in leaves]
    found = function(*leaves)
    found = found if isinstance(found, tuple) else (found,)
    (3 * found[0]).sum().backward()
    found = [x.detach() if isinstance(x, torch.Tensor) else x for x in found]
    return [*found, *(x.grad for x in leaves)]


def close(a, b, rtol=1e-5, atol=None):
    atol = rtol if atol is None else atol
    torch.testing.assert_close(a, b, rtol=rtol, atol=atol, check_dtype=False)


def equal(a, b):
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def assert_same_parameters(ours, theirs, *methods):
    for name in methods:
        assert parameters(getattr(ours, name)) == parameters(getattr(theirs, name)), name

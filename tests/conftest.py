"""What every test file shares: a fixed seed, and the backends that a test runs on."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

from fastrl import native

settings.register_profile(
    "fastrl",
    max_examples=25,
    deadline=None,
    derandomize=True,
    # the fixtures here only name a backend and set a seed, so an example may share them
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
settings.load_profile("fastrl")


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(20260923)


@pytest.fixture
def poisoned_memory():
    """Fill what `torch.empty` returns with NaN, so that a kernel that forgets to write is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["reference", "cpu"])
def backend(request):
    """Name of the backend under test; the compiled one may be absent, except in CI."""
    need_extension(request.param)
    return request.param


@pytest.fixture
def compiled():
    """For tests of the extension alone."""
    need_extension("cpu")


def need_extension(backend):
    if backend == "cpu" and native.missing is not None:
        if os.environ.get("CI"):
            pytest.fail(f"CI must test the compiled extension: {native.missing}")
        pytest.skip(native.missing)

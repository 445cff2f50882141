"""Fixtures of all tests: a fixed seed, and the backends that a test runs on."""

import importlib
import os

import pytest
import torch
from hypothesis import HealthCheck, settings

from fastrl import native
from fastrl.triton.runtime.registration import INTERPRETED

# Else MKL's products may depend on the alignment of memory, and two equal runs differ, as on an AMD
# EPYC. MKL reads this when it first computes.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

#: Larger vocabularies and these tests take too long in the interpreter.
MOST_INTERPRETED = 2_000
LONG_INTERPRETED = (
    "test_a_long_batch_is_as_exact_as_a_short_one",
    "test_any_shape_layout_and_mask",
    "test_many_groups",
    "test_many_short_sequences",
    "test_micro_batches_with_one_normalizer_add_up",
    "test_two_runs_are_bit_equal",  # the interpreter has only one order
    "test_values_at_masked_tokens_change_no_bit",
)

settings.register_profile(
    "fastrl",
    max_examples=25,
    deadline=None,
    derandomize=True,
    # these fixtures only name a backend and set a seed, so examples may share them
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
settings.load_profile("fastrl")


def pytest_configure(config):
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:  # processes side by side share the cores
        torch.set_num_threads(max(1, torch.get_num_threads() // workers))


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(20260923)


@pytest.fixture
def poisoned_memory():
    """Fill the result of `torch.empty` with NaN, to detect kernels that forget to write."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["triton"] if INTERPRETED else ["reference", "cpu"])
def backend(request):
    """The backend under test; outside of CI, the compiled one may be missing.

    Triton is interpreted on the CPU in a separate process (`make test-interpreted`), since it reads
    TRITON_INTERPRET at import.
    """
    need_extension(request.param)
    if request.param == "triton":
        interpret_small_blocks()
    return request.param


def interpret_small_blocks():
    """Make test batches span several programs, and save the interpreter time."""
    gae = importlib.import_module("fastrl.triton.gae.gae")
    policy_loss = importlib.import_module("fastrl.triton.tokens.policy_loss")
    gae.BLOCK, gae.BEHIND = 64, type(gae.BEHIND)(4)
    policy_loss.BLOCK, policy_loss.MOST_PROGRAMS = 256, 4


@pytest.fixture
def compiled():
    """For tests of the extension only."""
    need_extension("cpu")


def need_extension(backend):
    if backend == "cpu" and native.missing is not None:
        if os.environ.get("CI"):
            pytest.fail(f"CI must test the compiled extension: {native.missing}")
        pytest.skip(native.missing)


def pytest_collection_modifyitems(items):
    """Mark the tests of `make test-interpreted`: those of any backend that do not take too long."""
    for item in items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        too_large = given.get("vocabulary", 0) > MOST_INTERPRETED
        too_long = getattr(item, "originalname", "") in LONG_INTERPRETED
        if given.get("backend") == "triton" and not (too_large or too_long):
            item.add_marker("interpreted")

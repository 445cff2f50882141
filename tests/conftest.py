"""Fixtures of all tests: a fixed seed, and the backends that a test runs on."""

import importlib
import os

import pytest
import torch
from hypothesis import HealthCheck, settings

from fastrl import native
from fastrl.reference import row_blocks

# Else MKL's products may depend on the alignment of memory, and two equal runs differ, as on an AMD
# EPYC. MKL reads this when it first computes.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

#: What the fixture `backend` tests. FASTRL_TESTED="triton cuda" runs the tests marked `kernels` on
#: the kernels of GPUs, compiled for sm_90 and executed by tests/ptx.
TESTED = os.environ.get("FASTRL_TESTED", "reference cpu").split()
OF_GPUS = {"triton", "cuda"}
OF_KERNELS = {*TESTED} <= OF_GPUS
#: Most seconds of a test of `make test`, or its share of the time of all tests if that is more.
LONGEST, SHARE = 20, 1 / 40
DURATIONS = []

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
    if OF_KERNELS:  # before any tensor of a module: the machine lets kernels reach what it knows
        from tests.ptx.machine import machine

        machine()


def pytest_runtest_logreport(report):
    name = f"{report.when} of {report.nodeid}"
    DURATIONS.append((report.duration, name, "slow" in report.keywords))


def pytest_sessionfinish(session):
    """In CI, fail what makes `make test` slow, on a slow machine as on a fast one."""
    if not os.environ.get("CI") or OF_KERNELS or hasattr(session.config, "workerinput"):
        return
    lines = session.config.get_terminal_writer()
    longest = max(LONGEST, SHARE * sum(seconds for seconds, *_ in DURATIONS))
    for seconds, name, slow in DURATIONS:
        if seconds > longest and not slow:
            lines.line(
                f"{name} took {seconds:.0f} s, above {longest:.0f}: make it faster or mark it slow"
            )
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(20260923)


@pytest.fixture
def poisoned_memory():
    """Fill the result of `torch.empty` with NaN, to detect kernels that forget to write."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=TESTED)
def backend(request, monkeypatch):
    """The backend under test; outside of CI, the compiled one may be missing."""
    need_extension(request.param)
    if request.param == "triton":
        small_blocks()
    if request.param == "reference":
        monkeypatch.setattr(row_blocks, "_CPU_BYTES", 2**9)  # several blocks in a test
    if request.param in OF_GPUS:
        from tests.ptx import backends

        backends.use(request.param, monkeypatch.setitem, monkeypatch.setattr)
    return request.param


def small_blocks():
    """Make test batches span several programs."""
    gae = importlib.import_module("fastrl.triton.gae.gae")
    policy_loss = importlib.import_module("fastrl.triton.tokens.policy_loss")
    gathered = importlib.import_module("fastrl.triton.vocabulary.gathered")
    gathered.BLOCK = 4
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


def pytest_collection_modifyitems(config, items):
    here = [belongs_here(item) for item in items]
    config.hook.pytest_deselected(
        items=[item for item, stays in zip(items, here, strict=True) if not stays]
    )
    items[:] = [item for item, stays in zip(items, here, strict=True) if stays]


def diagonal(item):
    """Whether a test is one of as many as have every value of each of its parameters."""
    parameters = [mark.args for mark in item.iter_markers("parametrize")]
    given = item.callspec.params

    def is_given(names, value):
        names = names.split(",") if isinstance(names, str) else names
        if hasattr(value, "marks"):  # of pytest.param
            value = value.values
        elif len(names) == 1:
            value = (value,)
        return all(given[name.strip()] is one for name, one in zip(names, value, strict=True))

    longest = max(len(values) for _, values in parameters)
    return any(
        all(is_given(names, values[n % len(values)]) for names, values in parameters)
        for n in range(longest)
    )


def belongs_here(item):
    """Whether a test tests what this process is for."""
    marks = {mark.name for mark in item.iter_markers()}
    given = item.callspec.params if hasattr(item, "callspec") else {}
    backend = given.get("backend")
    if any(backend in mark.args for mark in item.iter_markers("not_on")):
        return False
    if any(backend in mark.args for mark in item.iter_markers("some_on")) and not diagonal(item):
        return False
    if OF_KERNELS:
        return bool(marks & {"kernels", "kernels_alone"}) and backend in TESTED
    return "kernels_alone" not in marks or backend in OF_GPUS & {*TESTED}

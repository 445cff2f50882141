"""The CUDA kernels under the sanitizers: no race, no access beyond a buffer; and their machine."""

import re
import shutil
import subprocess

import pytest

from tests.gpu import sanitized
from tests.gpu.device.build import ROOT, SOURCE, path_with_tools
from tests.gpu.host_build import run_program

pytestmark = pytest.mark.slow
NVCC = shutil.which("nvcc", path=path_with_tools())


@pytest.mark.parametrize(("sanitizer", "warp"), [("address", 32), ("thread", 8)])
@pytest.mark.parametrize("program", ["primitives", "launches"])
def test_a_program_passes(program, sanitizer, warp):
    """Every launch writes its outputs, and nothing beside them."""
    done = run_program(program, sanitizer, warp=warp)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        (1, "ThreadSanitizer: data race"),
        (2, "ThreadSanitizer: data race"),
        (3, "ThreadSanitizer: data race|a barrier is armed twice in a phase"),
        (4, "a barrier is armed twice in a phase"),
        (5, "a store to a block that has exited"),
    ],
)
def test_a_fault_is_seen(fault, seen):
    """The faults are those of tests/gpu/host/primitives.cpp."""
    done = run_program("primitives", "thread", str(fault))
    assert done.returncode != 0
    assert re.search(seen, done.stderr)


def test_the_operators_stay_within_their_tensors():
    sanitized.run("cuda", cases=300)


@pytest.mark.skipif(NVCC is None, reason="there is no nvcc")
def test_the_launches_compile_for_a_gpu(tmp_path):
    command = [
        NVCC,
        "-std=c++17",
        "-O3",
        "-gencode=arch=compute_90,code=sm_90",
        "-Werror",
        "all-warnings",
    ]
    command += [f"-I{ROOT / 'csrc'}", "-x", "cu", "-c", str(SOURCE), "-o", str(tmp_path / "out.o")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

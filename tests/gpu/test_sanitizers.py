"""The driver that CUDA's own sanitizers run on a GPU: without one, that it compiles."""

import subprocess

import pytest

from tests.gpu.device.build import ROOT, SOURCE
from tests.ptx.cuda_operators import nvcc

pytestmark = pytest.mark.slow


def test_the_launches_compile_for_a_gpu(tmp_path):
    command = [nvcc(), "-std=c++17", "-O3", "-gencode=arch=compute_90,code=sm_90"]
    command += ["-Werror", "all-warnings", f"-I{ROOT / 'csrc'}", "-x", "cu", "-c", str(SOURCE)]
    done = subprocess.run(
        [*command, "-o", str(tmp_path / "out.o")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr

"""tests/cuda/launches.cpp, which runs on a GPU under NVIDIA's tools: on the host, and for a GPU."""

import shutil
import subprocess

import pytest

from tests.gpu.device.build import ROOT, SOURCE, path_with_tools
from tests.support.cuda_host import assert_program_passes

NVCC = shutil.which("nvcc", path=path_with_tools())


def test_every_launch_writes_its_outputs_and_nothing_beside_them():
    assert_program_passes("launches", "address")


@pytest.mark.skipif(NVCC is None, reason="there is no nvcc")
def test_it_compiles_for_a_gpu(tmp_path):
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

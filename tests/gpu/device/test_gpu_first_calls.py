"""Calls as the first ones of a process."""

import subprocess
import sys

import pytest

from tests.gpu.device.first_calls import CASES, WAYS
from tests.gpu.device.limit import ROOT


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("way", WAYS)
def test_the_first_call_of_a_process(kernels, way, name):
    command = [sys.executable, "-m", "tests.gpu.device.first_calls", kernels, way, name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]

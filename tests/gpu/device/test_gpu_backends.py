"""What this folder tests is there: a backend that cannot be used is a failure, not a skip."""

import pytest
import torch

import fastrl
from fastrl.backend import BACKENDS, unavailable
from tests.gpu.device.conftest import GPU_BACKENDS


@pytest.mark.parametrize("name", GPU_BACKENDS)
def test_the_backend_can_be_used(name, asked):
    if name not in asked:
        pytest.skip(f"backend {name} was left out")
    assert unavailable(name) is None


def test_the_backends_asked_for_exist(asked):
    assert set(asked) <= set(BACKENDS)


def test_there_are_kernels_to_test():
    assert fastrl.backend.resolve("auto", torch.device("cuda"), torch.float32) != "reference"

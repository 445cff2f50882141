"""Fixtures of the tests of the fuzzer."""

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def threads():
    """A case sets how many threads torch has."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def silent_numpy():
    """The oracle computes with infinities and NaN on purpose."""
    with np.errstate(all="ignore"):
        yield

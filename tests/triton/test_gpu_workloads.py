"""The calls that tests/gpu makes on a GPU, on the CPU backend: a test of those tests."""

import pytest

from tests.gpu.workloads import assert_equals_the_reference, of_logits, of_tokens

pytestmark = pytest.mark.usefixtures("compiled")


@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (33, 300)], ids=str)
def test_tokens(shape):
    for work in of_tokens(*shape):
        assert_equals_the_reference(work, "cpu")


@pytest.mark.parametrize("vocabulary", [1, 129, 1001])
def test_logits(vocabulary):
    for work in of_logits(2, 3, vocabulary):
        assert_equals_the_reference(work, "cpu")

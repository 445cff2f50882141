"""Values and gradients of every row of the table against the oracle, on each backend.

A case that differs is printed as a line for `python -m tests.fuzz`.
"""

import pytest

from fastrl import native
from tests.calls.combined import assert_values
from tests.calls.table import ROWS

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("poisoned_memory")]


@pytest.mark.parametrize("name", ROWS)
def test_values_and_gradients_are_those_of_the_oracle(backend, name):
    function, options = ROWS[name]
    assert_values(backend, function, **options)


def test_bfloat16_heads_where_there_are_no_matrix_tiles(compiled, monkeypatch):
    monkeypatch.setattr(native, "has_matrix_tiles", lambda: False)
    test_values_and_gradients_are_those_of_the_oracle("cpu", "linear_policy_loss: heads")

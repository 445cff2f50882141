"""Bounds on rounding errors hold for float32, and tell what is certain."""

import numpy as np
import pytest

from . import functions
from .bounded import FLOAT32, FLOAT64, Bounded, Decision, beyond, choose, constant
from .functions import stored

OPERATIONS = {
    "sum": (lambda a, b: a + b, lambda a, b: a + b),
    "difference": (lambda a, b: a - b, lambda a, b: a - b),
    "product": (lambda a, b: a * b, lambda a, b: a * b),
    "quotient": (lambda a, b: a / b, lambda a, b: a / b),
    "exp": (lambda a, b: functions.exp(a), lambda a, b: np.exp(a)),
    "expm1": (lambda a, b: functions.expm1(a), lambda a, b: np.expm1(a)),
    "sigmoid": (lambda a, b: functions.sigmoid(a), lambda a, b: 1 / (1 + np.exp(-a))),
    "maximum": (functions.maximum, np.maximum),
    "total": (lambda a, b: a.sum(), lambda a, b: a.sum()),
    "chain": (
        lambda a, b: functions.exp(a - b) * b + (a * a).sum() / 3.0,
        lambda a, b: np.exp(a - b) * b + (a * a).sum() / np.float32(3),
    ),
}


def exact(x):
    return Bounded(x, 0.0, FLOAT32)


@pytest.mark.parametrize("name", OPERATIONS)
def test_float32_stays_within_the_bound(name):
    ours, theirs = OPERATIONS[name]
    random = np.random.default_rng(7)
    for scale in (1e-3, 1.0, 10.0):
        a, b = (np.float32(random.standard_normal(4000) * scale) for _ in range(2))
        bound = ours(exact(a), exact(b))
        error = np.abs(theirs(a, b).astype(np.float64) - bound.value)
        assert (error <= bound.error).all()
        magnitude = np.abs(bound.value) + np.square(a, dtype=np.float64).sum()
        assert (bound.error <= 1e-4 * (1 + magnitude)).all()


@pytest.mark.parametrize("arithmetic", [FLOAT32, FLOAT64], ids=["float32", "float64"])
def test_what_is_exact_has_no_error(arithmetic):
    grid = Bounded(np.arange(-8, 8) / 64, 0.0, arithmetic)
    results = [grid + grid, grid - 1.0, grid.sum(), functions.exp(grid * 0.0)]
    assert all((result.error == 0).all() for result in results)


def test_a_decision_on_the_bound_is_certain_if_both_sides_are_exact():
    half = exact([0.5, 0.75])
    decision = beyond(half + 0.5, 1.0)
    assert decision.yes.tolist() == [False, True]
    assert not decision.doubtful.any()


def test_a_decision_within_rounding_of_its_bound_is_in_doubt_and_covers_both_results():
    x = exact([0.1]) + 0.2
    decision = beyond(x, 0.1 + 0.2)
    chosen = choose(decision, exact([1.0]), exact([5.0]))
    assert decision.doubtful.all()
    assert (np.abs(chosen.value - [[1.0], [5.0]]) <= chosen.error).all()


def test_infinity_and_nan_are_certain_unless_rounding_may_make_them():
    infinite = exact([np.inf, -np.inf, np.nan]) + 1.0
    assert (infinite.error == 0).all()
    huge = exact([3e38]) * 10.0
    assert np.isinf(huge.error).all()
    unsure = (exact([0.1]) + 0.2 - 0.3) * np.inf
    assert np.isinf(unsure.error).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_is_stored_rounds_once_more(dtype):
    import torch

    x = np.random.default_rng(3).standard_normal(2000)
    held = torch.from_numpy(x).to(getattr(torch, dtype)).double().numpy()
    kept = stored(exact(x), dtype)
    assert (np.abs(held - x) <= kept.error).all()
    assert np.isinf(stored(exact([1e39]), dtype).value).all()


def test_decisions_combine_like_intervals():
    yes, no, open_ = (
        Decision(np.array([a]), np.array([b]))
        for a, b in ((True, False), (False, False), (True, True))
    )
    assert not (no & open_).doubtful.any()
    assert (yes & open_).doubtful.all()
    assert not (yes | open_).doubtful.any()
    assert (no | open_).doubtful.all()


def test_a_number_that_float32_does_not_hold_is_rounded():
    assert constant(0.1, FLOAT32).error > 0
    assert constant(0.5, FLOAT32).error == 0
    assert constant(0.1, FLOAT64).error == 0

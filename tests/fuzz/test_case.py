"""Cases: lines that can be pasted, drawn so that everything occurs."""

from math import inf

import pytest

from tests.calls import objectives, policy_data, rows_data
from tests.calls.case import LOSSES, SIMPLEST, Case, parse
from tests.calls.examine import FUNCTIONS
from tests.calls.refusals import WRONG

from .draw import draw

DRAWN = [draw(1, index, float64=True, executed=False) for index in range(6000)]


def test_a_line_says_the_case():
    assert all(parse(repr(case)) == case for case in DRAWN)


def test_infinity_and_nan_are_numbers_of_a_line():
    case = Case("policy_loss", fields={"log_ratio_clamp": (-inf, 10.0)})
    assert parse(repr(case)).fields == {"log_ratio_clamp": (-inf, 10.0)}


@pytest.mark.parametrize("line", ["Case(print(1))", "Case('gae', tokens=len('abc'))", "gae", "1"])
def test_only_literals_are_read(line):
    with pytest.raises((ValueError, SyntaxError)):
        parse(line)


def test_an_unknown_option_is_refused():
    with pytest.raises(TypeError, match="token"):
        Case("gae", token=3)


def test_the_same_number_is_the_same_case():
    again = [draw(1, index, float64=True, executed=False) for index in range(50)]
    assert again == DRAWN[:50]


def test_every_option_and_feature_is_drawn():
    options = {name for case in DRAWN for name in case.options}
    features = {name for case in DRAWN for name in case.features}
    fields = {name for case in DRAWN for name in case.fields}
    assert {case.function for case in DRAWN} == set(FUNCTIONS)
    assert options == set(SIMPLEST)
    assert features >= {*rows_data.FEATURES, *policy_data.FEATURES, "nan-payload"}
    # losses with a teacher are compared with their parts in tests/ops/test_divergence.py
    assert fields == set(objectives.DEFAULTS) - {"surrogate", "convention", "teacher_coef"}


def test_every_objective_of_every_convention_is_drawn():
    found = {(case.convention, case.objective) for case in DRAWN if case.function in LOSSES}
    wanted = {(name, loss) for name, losses in objectives.CONVENTIONS.items() for loss in losses}
    assert found == wanted | {("fastrl", name) for name in objectives.OWN}


def test_every_refusal_can_be_drawn():
    assert {case.wrong for case in DRAWN} == {None, *WRONG}

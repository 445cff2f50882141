"""The word problems of docs/training.md: solved rightly, and held out by numbers."""

import json
import re
import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "word_problems.py"


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    directory = tmp_path_factory.mktemp("problems")
    runpy.run_path(str(SCRIPT))["main"](directory)
    return [
        [json.loads(line) for line in (directory / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "held_out")
    ]


def test_make_runs_the_command_of_the_page():
    root = SCRIPT.parents[1]
    page = (root / "docs" / "training.md").read_text().replace("\\\n", " ")
    made = (root / "Makefile").read_text().replace("\\\n", " ")
    (documented,) = re.findall(r"^fastrl grpo (--model runs/smollm2 .*)", page, re.MULTILINE)
    (of_make,) = re.findall(r"^WORD_PROBLEMS := (.*)", made, re.MULTILINE)
    assert documented.split() == of_make.split()


def numbers(text):
    return tuple(map(int, re.findall(r"\d+", text)))


def kind(question):
    return re.sub(r"\d+|^\w+|books|cards|coins|pens", "", question)


def test_the_solutions_are_right(problems):
    for row in (row for rows in problems for row in rows):
        solution, result = row["answer"].split("\n#### ")
        steps = solution.removesuffix(".").split(". ")
        assert len(steps) == 2
        for step in steps:
            left, right = step.split(" = ")
            assert eval(left) == int(right)
        assert int(result) == int(right)
        assert max(numbers(row["question"] + row["answer"])) <= 100
        assert min(numbers(row["answer"])) >= 0
        assert "-" not in row["answer"].replace(" - ", "")


def test_no_numbers_of_a_held_out_problem_are_trained(problems):
    train, held_out = ({(kind(r["question"]), numbers(r["question"])) for r in p} for p in problems)
    assert len(problems[0]) == 2000
    assert len(problems[1]) == 256
    assert len(held_out) > 200
    assert len({kind for kind, _ in train}) == len({kind for kind, _ in held_out}) == 4
    assert not train & held_out

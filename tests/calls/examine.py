"""One case: call, oracle, comparison."""

import re
import warnings
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from . import policy_call, rows_call, values_call
from .call import Place
from .case import IN_TORCH, Case
from .trial import Difference, NoResultError, Trial

#: How each function is called.
FUNCTIONS = rows_call.FUNCTIONS | policy_call.FUNCTIONS | values_call.FUNCTIONS
COMPILED = ("cpu", "triton", "cuda")
BACKENDS = ("auto", "reference", *COMPILED)


class Verdict(NamedTuple):
    """The outcome of a case: differences if any, decisions in doubt, a refusal."""

    differences: list[Difference]
    doubts: Counter
    refused: bool = False


def place_of(case: Case, backend: str, device: str = "cpu") -> Place:
    """Return where a case runs for a backend that is tested."""
    # plain torch and user functions have no compiled backend
    plain = case.function in IN_TORCH or case.objective.startswith("own")
    return Place("auto" if plain and backend in COMPILED else backend, device)


def examine(case: Case, backend: str, device: str, kind: Callable[..., Trial] = Trial) -> Verdict:
    """Return the differences between a call and its oracle; `kind` makes the trial."""
    trial = kind(case, place_of(case, backend, device))
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            trial.compare(FUNCTIONS[case.function].call(case, trial.place))
    except NoResultError:
        return Verdict(trial.differences, Counter(), refused=True)
    except Exception as error:
        text = next(iter(str(error).splitlines()), "")
        stem = re.sub(r"[\d.\[\](), -]+", " ", text)[:60].strip()  # to tell errors apart
        found = Difference("call", f"raised {type(error).__name__}: {stem}", text)
        trial.differences.insert(0, found)
    return Verdict(trial.differences, trial.doubts.counts)


#: Which function differs in which part and how: failures with one signature are one.
Signature = tuple[str, str, str]


def signatures(case: Case, verdict: Verdict) -> list[Signature]:
    return [(case.function, found.part, found.kind) for found in verdict.differences]

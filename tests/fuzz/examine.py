"""One case: call, oracle, comparison."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from . import advantages_call, linear_call, policy_call, rows_call, values_call
from .case import Case
from .compare import Difference, Got, Part, differences
from .refusals import PLAIN, refusal_differences
from .trial import Trial

Examined = Callable[[Trial], tuple[dict[str, Got], dict[str, Part]]]
EXAMINED: dict[str, Examined] = {
    "token_logprobs": rows_call.examined,
    "token_stats": rows_call.examined,
    "linear_token_logprobs": linear_call.examined_stats,
    "linear_token_stats": linear_call.examined_stats,
    "policy_loss": policy_call.examined_tokens,
    "logits_policy_loss": policy_call.examined_logits,
    "linear_policy_loss": linear_call.examined_loss,
    "value_loss": values_call.examined_value_loss,
    "kl_divergence": values_call.examined_kl,
    "group_advantages": advantages_call.examined_groups,
    "gae": advantages_call.examined_gae,
    "discounted_returns": advantages_call.examined_gae,
    "token_weights": values_call.examined_weights,
    "whiten": values_call.examined_mean,
    "masked_mean": values_call.examined_mean,
    "reduce_metrics": values_call.examined_reduce,
}
COMPILED = ("cpu", "triton", "cuda")
BACKENDS = ("auto", "reference", *COMPILED)


class Verdict(NamedTuple):
    """The outcome of a case: differences if any, decisions in doubt, a refusal."""

    differences: list[Difference]
    doubts: Counter
    refused: bool


def backend_of(case: Case, backend: str) -> str:
    """Return the backend of a call: plain torch and user functions have no compiled one."""
    plain = case.function in PLAIN or case.objective.startswith("own")
    return "auto" if plain and backend in COMPILED else backend


def examine(case: Case, backend: str, device: str) -> Verdict:
    """Return the differences between a call and its oracle."""
    if case.wrong is not None:
        return Verdict(refusal_differences(case, backend), Counter(), refused=True)
    trial = Trial(case, backend_of(case, backend), device)
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            got, want = EXAMINED[case.function](trial)
    except Exception as error:
        name = type(error).__name__
        text = str(error).splitlines()[0] if str(error) else ""
        found = [Difference("call", f"raised {name}: {_stem(text)}", text)]
        return Verdict(found, trial.doubts.counts, refused=False)
    with np.errstate(all="ignore"):
        found = differences(got, want, trial.doubts)
    if trial.changed():
        found.append(Difference("given tensors", "changed", "the call wrote into one of them"))
    return Verdict(found, trial.doubts.counts, refused=False)


def _stem(text: str) -> str:
    """The start of a message without its numbers, to tell one error from another."""
    return re.sub(r"[\d.\[\](), -]+", " ", text)[:60].strip()


def signature(case: Case, difference: Difference) -> tuple[str, str, str]:
    return case.function, difference.part, difference.kind

"""One case: call, oracle, comparison."""

import re
import warnings
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from . import divergence_call, linear_call, policy_call, rows_call, values_call
from .case import IN_TORCH, Case
from .trial import Difference, NoResultError, Trial

EXAMINED: dict[str, Callable[[Trial], None]] = {
    "token_logprobs": rows_call.examine_rows,
    "token_stats": rows_call.examine_rows,
    "linear_token_logprobs": linear_call.examine_linear_stats,
    "linear_token_stats": linear_call.examine_linear_stats,
    "token_divergence": divergence_call.examine_divergence,
    "linear_divergence": divergence_call.examine_linear_divergence,
    "policy_loss": policy_call.examine_policy_loss,
    "logits_policy_loss": policy_call.examine_logits_policy_loss,
    "linear_policy_loss": linear_call.examine_linear_policy_loss,
    "value_loss": values_call.examine_value_loss,
    "kl_divergence": values_call.examine_kl_divergence,
    "group_advantages": values_call.examine_group_advantages,
    "gae": values_call.examine_gae,
    "discounted_returns": values_call.examine_gae,
    "token_weights": values_call.examine_token_weights,
    "whiten": values_call.examine_mean,
    "masked_mean": values_call.examine_mean,
    "reduce_metrics": values_call.examine_reduce_metrics,
}
#: The same statistics of rows, of which some are a teacher's.
BESIDE_A_TEACHER = {"token_stats": "token_divergence", "linear_token_stats": "linear_divergence"}
COMPILED = ("cpu", "triton", "cuda")
BACKENDS = ("auto", "reference", *COMPILED)


class Verdict(NamedTuple):
    """The outcome of a case: differences if any, decisions in doubt, a refusal."""

    differences: list[Difference]
    doubts: Counter
    refused: bool = False


def examine(case: Case, backend: str, device: str, kind: Callable[..., Trial] = Trial) -> Verdict:
    """Return the differences between a call and its oracle; `kind` makes the trial."""
    # plain torch and user functions have no compiled backend
    plain = case.function in IN_TORCH or case.objective.startswith("own")
    name = case.function
    if divergence_call.OF_TEACHER & {*case.outputs}:
        name = BESIDE_A_TEACHER[name]
    trial = kind(case, "auto" if plain and backend in COMPILED else backend, device)
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            EXAMINED[name](trial)
        trial.check_inputs()
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

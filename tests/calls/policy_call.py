"""`policy_loss` and `logits_policy_loss`: arguments and expected results."""

from typing import Any

import numpy as np
from torch import Tensor

import fastrl

from .case import Case
from .oracle.bounded import Bounded, constant, of_results, unbounded
from .oracle.policy import Loss
from .oracle.rows import Rows
from .policy_data import PolicyInputs, entropy_of, logprobs_of, sampler_of
from .rows_data import LogitRows, ids_tensor, logits_of, rows_of, token_options
from .tokens import flat_tensor, token_tensor, tokens_of
from .trial import Trial

#: The upstream gradient of a loss.
UPSTREAM = {"ones": 1.0, "zero": 0.0, "expanded": -0.375, "random": 2.5, "large": 2.0**40}
#: The arguments of `clipped_tokens`.
CLIPPED = ("advantages", "mask", "old_logprobs", "objective", "cu_seqlens")
UPSTREAM |= {"nan": float("nan"), "some-zero": 1e-3, "strided": -1.0, "first": 0.5}


def examine_policy_loss(trial: Trial) -> None:
    case = trial.case
    tokens = tokens_of(case)
    valid, arithmetic = tokens.valid, of_results(case.dtype, case.token_dtype)
    logprobs, entropy = logprobs_of(case, tokens), entropy_of(case, tokens)
    inputs = PolicyInputs(case, tokens, valid, logprobs)
    leaves = {"logprobs": trial.leaf(token_tensor(case, tokens, logprobs, case.dtype))}
    of_valid = None
    if entropy is not None:
        leaves["entropy"] = trial.leaf(token_tensor(case, tokens, entropy, case.token_dtype))
        of_valid = Bounded(entropy[valid], 0.0, arithmetic)
    result = trial.call(**leaves, **inputs.arguments())
    bounded = Bounded(logprobs[valid], 0.0, arithmetic)
    loss = inputs.expected(bounded, of_valid, arithmetic, trial.doubts)
    expect_loss(trial, result, loss.loss, loss.metrics)
    given = {name: inputs.arguments().get(name) for name in CLIPPED}
    clip = fastrl.clipped_tokens(leaves["logprobs"].detach(), **trial.moved(given))
    clips = {"clip_low": loss.clip_low, "clip_high": loss.clip_high}
    want = {name: tokens.placed(x, valid) for name, x in clips.items()}
    trial.expect({"clip_low": clip < 0, "clip_high": clip > 0}, want)
    if trial.backward(leaves, [result.loss], [upstream(case, result.loss)]):
        slopes = {"logprobs": loss.slope}
        if inputs.fields["entropy_coef"]:
            slopes["entropy"] = loss.entropy_slope
        want = {name: tokens.placed(scaled(x, case), valid) for name, x in slopes.items()}
        trial.expect_gradients(leaves, want, UPSTREAM[case.upstream])


def examine_logits_policy_loss(trial: Trial) -> None:
    case = trial.case
    rows = rows_of(case)
    logits, tensor = logits_of(rows)
    oracle = rows.oracle(trial, logits)
    inputs = policy_inputs(trial, rows, oracle)
    leaf = trial.leaf(tensor)
    given = leaf * 1 if case.inplace else leaf  # what is given away is no leaf
    arguments = {**inputs.arguments(), **token_options(rows), **inplace_option(case, "inplace")}
    result = trial.call(given, ids_tensor(rows), **arguments)
    loss = inputs.expected(oracle.logprobs, oracle.entropy, oracle.arithmetic, trial.doubts)
    expect_loss(trial, result, loss.loss, loss.metrics)
    leaves = {"logits": leaf}
    if trial.backward(leaves, [result.loss], [upstream(case, result.loss)]):
        waited_for = UPSTREAM[case.upstream]
        if case.dtype == "float16" and not np.isnan(waited_for):
            waited_for = None  # it would underflow, so it is made when it is asked for
        want = rows.tokens.placed(row_gradient(oracle, loss, case), rows.active)
        trial.expect_gradients(leaves, {"logits": want}, waited_for)


def inplace_option(case: Case, name: str) -> dict[str, bool]:
    return {name: True} if case.inplace else {}


def policy_inputs(trial: Trial, rows: LogitRows, oracle: Rows) -> PolicyInputs:
    """Return the inputs beside the log-probabilities that the oracle makes."""
    logprobs = np.zeros(rows.tokens.total)
    logprobs[rows.active] = oracle.logprobs.value
    inputs = PolicyInputs(rows.case, rows.tokens, rows.active, logprobs)
    if rows.case.sampler is not None:
        inputs.top, inputs.score = sampler_of(trial, rows, oracle, inputs)
    return inputs


def expect_loss(trial: Trial, result: Any, loss: Bounded, metrics: dict[str, Bounded]) -> None:
    trial.expect({"loss": result.loss}, {"loss": loss})
    trial.expect(result.metrics, metrics)


def row_gradient(oracle: Rows, loss: Loss, case: Case) -> Bounded:
    """Return dL/dx of the active rows."""
    nothing = Bounded(np.zeros(oracle.n), 0.0, oracle.arithmetic)
    slopes = (loss.slope, loss.entropy_slope, loss.score_factor)

    def of(slope: Bounded, entropy_slope: Bounded, factor: Bounded) -> Bounded:
        gradient = oracle.gradient(slope, entropy_slope, nothing)
        return gradient if loss.score is None else gradient + loss.score.gradient(factor)

    gradient = of(*(scaled(slope, case) for slope in slopes))
    if UPSTREAM[case.upstream] != 0:
        return gradient
    made = of(*slopes)  # before it is multiplied by 0
    return unbounded(gradient, ~np.isfinite(made.error))


def upstream(case: Case, loss: Tensor) -> Tensor:
    value = np.array([UPSTREAM[case.upstream]])
    return flat_tensor(case, value, str(loss.dtype).removeprefix("torch."))[0]


def scaled(slope: Bounded, case: Case) -> Bounded:
    """Return slope times the upstream gradient of the loss; 0 times NaN is unspecified."""
    return zero_or_lost(slope, slope * constant(UPSTREAM[case.upstream], slope.arithmetic))


def zero_or_lost(factor: Bounded, product: Bounded) -> Bounded:
    """Accept 0 and NaN as the product of 0 and NaN."""
    return unbounded(product, (factor.value == 0) & np.isnan(product.value))

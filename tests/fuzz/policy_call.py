"""`policy_loss` and `logits_policy_loss`: arguments and expected results."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from . import policy_data
from .arithmetic import Arithmetic, of_results
from .bounded import Bounded, constant, unbounded
from .case import Case
from .compare import Got, Part, part
from .logits_data import logits_of
from .oracle.policy import Loss
from .oracle.rows import Rows
from .policy_inputs import PolicyInputs
from .rows_data import ids_tensor, logits_tensor, rows_of, token_options
from .tensors import flat_tensor, token_tensor
from .tokens import tokens_of
from .trial import Trial

#: The upstream gradient of a loss.
UPSTREAM = {"ones": 1.0, "zero": 0.0, "expanded": -0.375, "random": 2.5, "large": 2.0**40}
UPSTREAM |= {"nan": float("nan"), "some-zero": 1e-3, "strided": -1.0, "first": 0.5}


def examined_tokens(trial: Trial) -> tuple[dict[str, Got], dict[str, Part]]:
    """Examine `policy_loss`."""
    case = trial.case
    tokens = tokens_of(case)
    valid, arithmetic = tokens.valid, of_results(case.dtype, case.token_dtype)
    logprobs = policy_data.logprobs_of(case, tokens)
    entropy = policy_data.entropy_of(case, tokens)
    inputs = PolicyInputs(case, tokens, valid, logprobs)
    leaves = {"logprobs": trial.leaf(token_tensor(case, tokens, logprobs, case.dtype))}
    arguments = trial.moved(inputs.arguments())
    of_valid = None
    if entropy is not None:
        leaves["entropy"] = trial.leaf(token_tensor(case, tokens, entropy, case.token_dtype))
        arguments["entropy"] = leaves["entropy"]
        of_valid = Bounded(entropy[valid], 0.0, arithmetic)
    result = trial.call(leaves["logprobs"], *trial.moved(inputs.constants()), **arguments)
    bounded = Bounded(logprobs[valid], 0.0, arithmetic)
    loss = inputs.expected(bounded, of_valid, arithmetic, trial.doubts)
    got, want = loss_parts(result), expected_parts(loss, arithmetic)
    if trial.differentiates(*leaves.values()):
        trial.backward(list(leaves.values()), [result.loss], [upstream(case, result.loss)])
        slopes = {"logprobs": loss.slope}
        if inputs.fields["entropy_coef"]:
            slopes["entropy"] = loss.entropy_slope
        dtypes = {"logprobs": case.dtype, "entropy": case.token_dtype}
        for name, slope in slopes.items():
            full = placed(scaled(slope, case), valid, tokens.shape)
            got[f"grad {name}"] = part(leaves[name].grad)
            want[f"grad {name}"] = Part(full, dtypes[name], UPSTREAM[case.upstream])
    return got, want


def examined_logits(trial: Trial) -> tuple[dict[str, Got], dict[str, Part]]:
    """Examine `logits_policy_loss`."""
    case = trial.case
    rows = rows_of(case)
    tokens, active = rows.tokens, rows.active
    logits = logits_of(case, tokens, rows.ids)
    oracle = Rows(logits[active], rows.ids[active], rows.head(trial), rows.arithmetic)
    trial.doubts.add("unspecified: a row without distribution", oracle.undefined)
    logprobs = np.zeros(tokens.total)
    logprobs[active] = oracle.logprobs.value
    inputs = PolicyInputs(case, tokens, active, logprobs)
    leaf = trial.leaf(logits_tensor(rows, logits))
    arguments = {**inputs.arguments(), **token_options(rows)}
    if case.inplace:
        arguments["inplace"] = True
    given = leaf * 1 if case.inplace else leaf  # what is given away is no leaf
    constants = trial.moved([ids_tensor(rows), *inputs.constants()])
    result = trial.call(given, *constants, **trial.moved(arguments))
    loss = inputs.expected(oracle.logprobs, oracle.entropy, rows.arithmetic, trial.doubts)
    got, want = loss_parts(result), expected_parts(loss, rows.arithmetic)
    if trial.differentiates(leaf):
        trial.backward([leaf], [result.loss], [upstream(case, result.loss)])
        waited_for = UPSTREAM[case.upstream]
        if case.dtype == "float16" and not np.isnan(waited_for):
            waited_for = None  # it would underflow, so it is made when it is asked for
        got["grad logits"] = part(leaf.grad)
        gradient = rows.placed(row_gradient(oracle, loss, case))
        want["grad logits"] = Part(gradient, case.dtype, waited_for)
    return got, want


def row_gradient(oracle: Rows, loss: Loss, case: Case) -> Bounded:
    """Return dL/dx of the active rows."""
    nothing = Bounded(np.zeros(oracle.n), 0.0, oracle.arithmetic)
    slopes = (loss.slope, loss.entropy_slope)
    gradient = oracle.gradient(*(scaled(slope, case) for slope in slopes), nothing)
    if UPSTREAM[case.upstream] != 0:
        return gradient
    made = oracle.gradient(*slopes, nothing)  # before it is multiplied by 0
    return unbounded(gradient, ~np.isfinite(made.error))


def upstream(case: Case, loss: Tensor) -> Tensor:
    value = np.array([UPSTREAM[case.upstream]])
    return flat_tensor(case, value, str(loss.dtype).removeprefix("torch."))[0]


def loss_parts(result: Any) -> dict[str, Got]:
    got = {"loss": part(result.loss)}
    return got | {f"metric {name}": part(value) for name, value in result.metrics.items()}


def expected_parts(loss: Loss, arithmetic: Arithmetic) -> dict[str, Part]:
    want = {"loss": Part(loss.loss, arithmetic.name)}
    return want | {f"metric {name}": Part(value) for name, value in loss.metrics.items()}


def scaled(slope: Bounded, case: Case) -> Bounded:
    """Return slope times the upstream gradient of the loss; 0 times NaN is unspecified."""
    result = slope * constant(UPSTREAM[case.upstream], slope.arithmetic)
    return zero_or_lost(slope, result)


def zero_or_lost(factor: Bounded, product: Bounded) -> Bounded:
    """Accept 0 and NaN as the product of 0 and NaN."""
    lost = (factor.value == 0) & np.isnan(product.value)
    return Bounded(product.value, np.where(lost, np.inf, product.error), product.arithmetic)


def placed(x: Bounded, valid: np.ndarray, shape: tuple[int, ...]) -> Bounded:
    """Return what valid tokens have, among zeros."""
    value, error = np.zeros((2, len(valid), *x.shape[1:]))
    value[valid], error[valid] = x.value, x.error
    shape = (*shape, *x.shape[1:])
    return Bounded(value.reshape(shape), error.reshape(shape), x.arithmetic)

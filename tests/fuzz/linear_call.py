"""The linear forms: arguments and expected results."""

from __future__ import annotations

import dataclasses

import numpy as np
from torch import Tensor

from .bounded import Bounded, unbounded
from .compare import Got, Part, part
from .head_data import HeadData, head_arguments, head_of, oracle_of, tensors_of
from .oracle.head import LinearHead
from .policy_call import UPSTREAM, expected_parts, loss_parts, row_gradient, upstream
from .policy_data import of_tokens
from .policy_inputs import PolicyInputs
from .rows_call import differentiate, parts_of, upstreams_of
from .rows_call import expected_parts as expected_statistics
from .rows_data import LogitRows, ids_tensor, rows_of, token_options
from .tensors import mask_tensor
from .trial import Trial


def examined_stats(trial: Trial) -> tuple[dict[str, Got], dict[str, Part]]:
    """Examine `linear_token_logprobs` and `linear_token_stats`."""
    case = trial.case
    rows = rows_of(case)
    head = head_of(case, rows)
    leaves = _leaves(trial, rows, head)
    arguments = trial.moved({"mask": mask_tensor(case, rows.tokens)})
    arguments |= trial.moved(token_options(rows)) | head_arguments(case, leaves)
    if case.function == "linear_token_stats":
        arguments["outputs"] = case.outputs
    ids = trial.moved(ids_tensor(rows))
    parts = parts_of(trial.call(leaves["hidden"], leaves["weight"], ids, **arguments))
    linear, oracle = oracle_of(trial, rows, head)
    trial.doubts.add("unspecified: a row without distribution", oracle.undefined)
    got = {name: part(x) for name, x in parts.items()}
    want = expected_statistics(rows, oracle)
    moving = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    if trial.differentiates(*moving.values()):
        differentiate(trial, rows, list(moving.values()), parts)
        got |= {f"grad {name}": part(leaf.grad) for name, leaf in moving.items()}
        upstreams = upstreams_of(rows, oracle)
        dx = oracle.gradient(*upstreams)
        want |= _gradient_parts(rows, head, linear, dx, _idle(*upstreams))
    return got, want


def examined_loss(trial: Trial) -> tuple[dict[str, Got], dict[str, Part]]:
    """Examine `linear_policy_loss`."""
    case = trial.case
    rows = rows_of(case)
    head, tokens, active = head_of(case, rows), rows.tokens, rows.active
    linear, oracle = oracle_of(trial, rows, head)
    trial.doubts.add("unspecified: a row without distribution", oracle.undefined)
    logprobs = np.zeros(tokens.total)
    logprobs[active] = oracle.logprobs.value
    inputs = PolicyInputs(case, tokens, active, logprobs)
    leaves = _leaves(trial, rows, head)
    arguments = trial.moved({**inputs.arguments(), **token_options(rows)})
    arguments |= head_arguments(case, leaves)
    if not case.metrics:
        arguments["metrics"] = False
    constants = trial.moved([ids_tensor(rows), *inputs.constants()])
    result = trial.call(leaves["hidden"], leaves["weight"], *constants, **arguments)
    loss = inputs.expected(oracle.logprobs, oracle.entropy, linear.arithmetic, trial.doubts)
    unseen = np.zeros(oracle.n, bool)
    if not case.metrics:  # a row without advantage need not even be projected
        advantages = of_tokens(inputs.advantages, tokens)[active]
        unseen = (advantages == 0) & ~np.isfinite(loss.slope.value)
        trial.doubts.add("unseen rows", unseen)
    got, want = loss_parts(result), expected_parts(loss, linear.arithmetic)
    if not case.metrics:
        want = {"loss": Part(unbounded(loss.loss, unseen.any()), linear.arithmetic.name)}
    moving = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    if trial.differentiates(*moving.values()):
        trial.backward(list(moving.values()), [result.loss], [upstream(case, result.loss)])
        got |= {f"grad {name}": part(leaf.grad) for name, leaf in moving.items()}
        dx = unbounded(row_gradient(oracle, loss, case), unseen[:, None])
        idle = _idle(loss.slope, loss.entropy_slope) & ~unseen
        linear = dataclasses.replace(linear, factor=abs(UPSTREAM[case.upstream]))
        for name, of_loss in _gradient_parts(rows, head, linear, dx, idle).items():
            want[name] = dataclasses.replace(of_loss, waited_for=UPSTREAM[case.upstream])
    return got, want


def _leaves(trial: Trial, rows: LogitRows, head: HeadData) -> dict[str, Tensor]:
    """Return hidden states and parameters, those that are not frozen as leaves."""
    frozen = trial.case.frozen
    tensors = tensors_of(trial.case, rows, head)
    return {name: trial.leaf(tensor, frozen=name in frozen) for name, tensor in tensors.items()}


def _gradient_parts(
    rows: LogitRows, head: HeadData, linear: LinearHead, dx: Bounded, idle: np.ndarray
) -> dict[str, Part]:
    """Return the expected gradients of tensors that are not frozen."""
    # of a row that has no upstream gradient there is none, whatever the row holds: it is left out
    if not rows.case.compact:
        idle = idle & np.isfinite(linear.hidden).all(1)
    dx = Bounded(
        np.where(idle[:, None], 0.0, dx.value),
        np.where(idle[:, None], 0.0, dx.error),
        dx.arithmetic,
    )
    anything = np.isinf(dx.error).any(1, keepdims=True)
    hidden = np.where(anything & ~np.isfinite(linear.hidden), 0.0, linear.hidden)
    found = dataclasses.replace(linear, hidden=hidden).gradients(dx)
    found["hidden"] = rows.placed(found["hidden"])
    return {
        f"grad {name}": Part(value, head.dtypes[name])
        for name, value in found.items()
        if name not in rows.case.frozen
    }


def _idle(*upstreams: Bounded) -> np.ndarray:
    """Return which rows certainly have no upstream gradient."""
    return np.logical_and.reduce([(g.value == 0) & (g.error == 0) for g in upstreams])

"""The linear forms: hidden states and an LM head, arguments and expected results."""

import dataclasses
from typing import Any

import numpy as np
from torch import Tensor

from .case import Case
from .oracle.bounded import Bounded, of_results, unbounded, where
from .oracle.head import LinearHead
from .oracle.rows import Rows
from .oracle.terms import zeros
from .policy_call import UPSTREAM, expect_loss, policy_inputs, row_gradient, upstream
from .rows_call import differentiated, expect_parts, parts_of, row_arguments, upstreams_of
from .rows_data import LogitRows, ids_tensor, lowest_of, noted, rows_of, token_options, wide_tensor
from .tokens import as_held, flat_tensor, laid_out
from .trial import Trial

#: The gradient of the logits enters the GEMMs of two bfloat16 operands as the sum of two bfloat16
#: on the matrix tiles of a CPU, and rounded to bfloat16 on the tensor cores of a GPU.
ENTERING = {"cpu": 2.0**-16, "cuda": 2.0**-8}


def numbers_of(case: Case, rows: LogitRows) -> dict[str, tuple[np.ndarray, str]]:
    """Return hidden states `[N, H]` and parameters with their dtypes, to which they are rounded."""
    random = case.random("head")
    width, vocabulary = case.hidden, case.vocabulary
    weight_dtype = case.dtype if case.weight_dtype == "like" else case.weight_dtype
    lora_dtype = weight_dtype if case.lora_dtype == "like" else case.lora_dtype
    hidden = random.standard_normal((rows.tokens.total, width)) * case.spread
    if case.has("nan-row"):
        hidden[random.random(len(hidden)) < 0.3] = np.nan
    if case.has("ties"):
        hidden = np.round(hidden)
    drawn = {"hidden": (hidden, case.dtype)}
    drawn["weight"] = random.standard_normal((vocabulary, width)) / width**0.5, weight_dtype
    if case.bias:
        bias = random.standard_normal(vocabulary)
        if case.has("inf-some"):
            bias[random.random(vocabulary) < 0.3] = -np.inf
        if case.has("lowest-some"):
            bias[random.random(vocabulary) < 0.3] = lowest_of(weight_dtype, random)
        drawn["bias"] = bias, weight_dtype
    if case.lora:
        drawn["lora_a"] = random.standard_normal((case.lora, width)) / width**0.5, lora_dtype
        b = random.standard_normal((vocabulary, case.lora)) / case.lora**0.5
        drawn["lora_b"] = b, lora_dtype
    return {name: (as_held(values, dtype), dtype) for name, (values, dtype) in drawn.items()}


class LinearCall:
    """The tensors of a linear form, and the oracle of the head and of the rows that it makes."""

    def __init__(self, trial: Trial) -> None:
        self.case = case = trial.case
        self.rows = rows = rows_of(case)
        numbers = numbers_of(case, rows)
        self.tensors: dict[str, Tensor] = {"hidden": wide_tensor(rows, numbers["hidden"][0])}
        for name, (values, dtype) in list(numbers.items())[1:]:
            layout = case.token_layout if name == "weight" else "contiguous"
            self.tensors[name] = laid_out(flat_tensor(case, values, dtype), layout)
        for name in self.tensors.keys() - set(case.frozen):
            self.tensors[name] = trial.leaf(self.tensors[name])
        self.moving = {name: x for name, x in self.tensors.items() if name not in case.frozen}
        held = {name: values for name, (values, _) in numbers.items()}
        weight_dtype = numbers["weight"][1]
        arithmetic = of_results(case.dtype, weight_dtype)
        alike = case.dtype == weight_dtype == "bfloat16"
        self.head = LinearHead(
            held["hidden"][rows.active],
            held["weight"],
            held.get("bias"),
            (held["lora_a"], held["lora_b"], float(case.lora_scale)) if case.lora else None,
            arithmetic,
            ENTERING[trial.device.partition(":")[0]] if alike else 0.0,
        )
        x, error = self.head.logits()
        x, error = rows.kept(x), rows.kept(np.broadcast_to(error, x.shape), 0.0)
        ids = rows.ids[rows.active]
        self.x_error = error
        self.oracle = noted(trial, Rows(x, ids, rows.head(trial), arithmetic, error))

    def made(self, trial: Trial, beside: Any = None, **arguments: Any) -> Any:
        """Return the result of the call, with token ids or a teacher beside the head."""
        case, given = self.case, self.tensors
        if "bias" in given:
            arguments["bias"] = given["bias"]
        if "lora_a" in given:
            arguments["lora"] = (given["lora_a"], given["lora_b"], case.lora_scale)
        for name in ("chunk_tokens", "compact"):
            if name in case.options:
                arguments[name] = getattr(case, name)
        third = ids_tensor(self.rows) if beside is None else beside
        return trial.call(given["hidden"], given["weight"], third, **arguments)

    def gradients(self, dx: Bounded, idle: np.ndarray, factor: float = 1.0) -> dict[str, Bounded]:
        """Return the expected gradients of tensors that are not frozen."""
        # of a row that has no upstream gradient there is none, whatever the row holds: it is left
        # out
        if not self.case.compact:
            idle = idle & np.isfinite(self.head.hidden).all(1)
        dx = where(idle[:, None], zeros(dx), dx)
        anything = np.isinf(dx.error).any(1, keepdims=True)
        hidden = np.where(anything & ~np.isfinite(self.head.hidden), 0.0, self.head.hidden)
        found = dataclasses.replace(self.head, hidden=hidden, factor=factor).gradients(dx)
        found["hidden"] = self.rows.tokens.placed(found["hidden"], self.rows.active)
        return {name: found[name] for name in self.moving}


def examine_linear_stats(trial: Trial) -> None:
    call = LinearCall(trial)
    rows, oracle = call.rows, call.oracle
    parts = parts_of(call.made(trial, **row_arguments(rows)))
    expect_parts(trial, rows, parts, oracle)
    if trial.backward(call.moving, *differentiated(rows, parts)):
        upstreams = upstreams_of(rows, oracle)
        want = call.gradients(oracle.gradient(*upstreams), _idle(*upstreams))
        trial.expect_gradients(call.moving, want)


def examine_linear_policy_loss(trial: Trial) -> None:
    case, call = trial.case, LinearCall(trial)
    oracle, inputs = call.oracle, policy_inputs(trial, call.rows, call.oracle)
    without = {} if case.metrics else {"metrics": False}
    result = call.made(trial, **inputs.arguments(), **token_options(call.rows), **without)
    loss = inputs.expected(oracle.logprobs, oracle.entropy, oracle.arithmetic, trial.doubts)
    unseen = np.zeros(oracle.n, bool)
    if not case.metrics:  # a row without advantage need not even be projected
        advantages = inputs.of_valid(inputs.advantages)
        unseen = (advantages == 0) & ~np.isfinite(loss.slope.value)
        trial.doubts.add("unseen rows", unseen)
    metrics = loss.metrics if case.metrics else {}
    expect_loss(trial, result, unbounded(loss.loss, unseen.any()), metrics)
    if trial.backward(call.moving, [result.loss], [upstream(case, result.loss)]):
        dx = unbounded(row_gradient(oracle, loss, case), unseen[:, None])
        idle = _idle(loss.slope, loss.entropy_slope, loss.score_factor) & ~unseen
        by = UPSTREAM[case.upstream]
        trial.expect_gradients(call.moving, call.gradients(dx, idle, abs(by)), by)


def _idle(*upstreams: Bounded) -> np.ndarray:
    """Return which rows certainly have no upstream gradient."""
    return np.logical_and.reduce([(g.value == 0) & (g.error == 0) for g in upstreams])

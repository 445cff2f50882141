"""`token_divergence`, `linear_divergence`, and statistics of rows beside a teacher's: arguments and
expected results.
"""

from typing import Any

import numpy as np

import fastrl

from .case import DIVERGENCES, Case
from .linear_call import LinearCall
from .oracle.bounded import Bounded, of_results
from .oracle.divergence import Divergence
from .oracle.head import LinearHead
from .oracle.rows import Head, Rows
from .oracle.top_tokens import TopTokens
from .policy_call import inplace_option
from .rows_call import (
    differentiated,
    outputs_of,
    parts_of,
    row_arguments,
    upstream_of,
    upstreams_of,
)
from .rows_data import HEATS, LogitRows, ids_tensor, logits_of, lowest_of, rows_of
from .tokens import MASKED_VALUES, as_held, flat_tensor, token_tensor
from .trial import Trial

#: What a teacher adds to the statistics of a row.
OF_TEACHER = {"divergence", "teacher_entropy", "agrees"}


def examine_divergence(trial: Trial) -> None:
    case = trial.case
    rows = rows_of(case)
    logits, tensor = logits_of(rows)
    leaf = trial.leaf(tensor)
    given = leaf * 1 if case.inplace else leaf
    oracle = rows.oracle(trial, logits)
    teacher, expected = compared_with(trial, rows, logits, oracle)
    inplace = inplace_option(case, "inplace_backward")
    if _is_alone(rows):
        parts = {"divergence": trial.call(given, teacher, **_arguments(rows), **inplace)}
    else:
        options = {**_stats_arguments(rows, teacher), **inplace}
        result = trial.call(given, ids_tensor(rows), function="token_stats", **options)
        parts = parts_of(result)
    trial.expect(parts, _placed(rows, oracle, expected))
    if trial.backward({"logits": leaf}, *differentiated(rows, parts)):
        want = rows.tokens.placed(_gradient(rows, oracle, expected), rows.active)
        trial.expect_gradients({"logits": leaf}, {"logits": want})


def examine_linear_divergence(trial: Trial) -> None:
    call = LinearCall(trial)
    rows, case = call.rows, trial.case
    logits = np.zeros((rows.tokens.total, case.vocabulary))
    logits[rows.active] = call.oracle.x
    teacher, expected = compared_with(trial, rows, logits, call.oracle, call.x_error)
    if _is_alone(rows):
        parts = {"divergence": call.made(trial, teacher, **_arguments(rows))}
    else:
        options = _stats_arguments(rows, teacher)
        parts = parts_of(call.made(trial, function="linear_token_stats", **options))
    trial.expect(parts, _placed(rows, call.oracle, expected))
    if trial.backward(call.moving, *differentiated(rows, parts)):
        statistics = upstreams_of(rows, call.oracle)
        idle = np.logical_and.reduce([_upstream(rows) == 0, *(g.value == 0 for g in statistics)])
        want = call.gradients(_gradient(rows, call.oracle, expected), idle)
        trial.expect_gradients(call.moving, want)


def compared_with(
    trial: Trial, rows: LogitRows, logits: np.ndarray, oracle: Rows, x_error: object = 0.0
) -> tuple[fastrl.Teacher, Divergence | TopTokens]:
    """Return a teacher and the divergence from it."""
    case = trial.case
    if case.teacher != "tokens":
        teacher, of_teacher = teacher_of(trial, rows, logits)
        return teacher, Divergence(oracle, of_teacher, case.beta)
    random, tokens, vocabulary = case.random("teacher"), rows.tokens, case.vocabulary
    z = random.standard_normal((tokens.total, vocabulary)) * min(case.spread, 30.0)
    z = z - z.max(1, keepdims=True, initial=-np.inf)
    logprobs = z - np.log(np.exp(z).sum(1, keepdims=True))
    count = int(random.integers(1, min(vocabulary, 6) + 1))
    by = logprobs if random.random() < 0.6 else random.standard_normal(logprobs.shape)
    ids = np.argsort(-by, 1)[:, :count]
    has_tail = bool(random.random() < 0.8)
    dtype = case.dtype if case.teacher_dtype == "like" else case.teacher_dtype
    logprobs = as_held(np.minimum(np.take_along_axis(logprobs, ids, 1), 0.0), dtype)
    given = ids
    if case.masked_values != "usual":  # they may be anything under the mask
        given = np.where(rows.active[:, None], ids, random.choice([-9, 2**30, vocabulary]))
    of_ids = flat_tensor(case, given, case.ids_dtype).view(*tokens.shape, count)
    teacher = fastrl.Teacher.from_top_k(
        of_ids, _wide(rows, logprobs, dtype), has_tail=has_tail, beta=case.beta
    )
    known = (ids[rows.active], logprobs[rows.active], dtype, has_tail, case.beta)
    return teacher, TopTokens(oracle, rows.head(trial), *known, x_error)


def teacher_of(trial: Trial, rows: LogitRows, logits: np.ndarray) -> tuple[fastrl.Teacher, Rows]:
    """Return a teacher whose logits are like the student's `[N, V]`, or its own; and its rows."""
    case, tokens, active = trial.case, rows.tokens, rows.active
    random = case.random("teacher")
    kind, dtype = case.teacher, case.dtype if case.teacher_dtype == "like" else case.teacher_dtype
    given: Any = case.teacher_temperature  # a float, or per-token
    heat = np.full(tokens.total, given if given != "per-token" else 1.0)
    if given == "per-token":
        heat = as_held(case.random("teacher temperature").choice(HEATS, tokens.total), "float32")
        given = token_tensor(case, tokens, heat, "float32")
    head = Head(heat[active], 1.0, case.teacher_softcap, trial.on_gpu_kernels)
    options = {
        "beta": case.beta,
        "temperature": given,
        "logit_softcap": case.teacher_softcap,
    }
    arithmetic = of_results(case.dtype, *_weights(case))
    if kind == "hidden":
        hidden = as_held(random.standard_normal((tokens.total, 5)), dtype)
        weight = as_held(random.standard_normal((case.vocabulary, 5)), dtype)
        x, error = LinearHead(hidden[active], weight, None, None, arithmetic).logits()
        error = rows.kept(np.broadcast_to(error, x.shape), 0.0)
        states = _wide(rows, hidden, dtype)
        teacher = fastrl.Teacher.from_hidden(states, flat_tensor(case, weight, dtype), **options)
    else:
        own = random.standard_normal((tokens.total, case.vocabulary)) * case.spread
        apart = {"own": None, "near": 1e-3, "same": 0.0}[kind]
        x = own if apart is None else np.where(np.isfinite(logits), logits, 0.0) + apart * own
        banned, theirs = random.random(x.shape) < 0.3, np.isneginf(logits)
        alike = random.random() < 0.8  # else a KL of most of these rows is infinite
        if case.has("inf-some") and kind == "own":
            x[banned & theirs if case.beta == 1 and alike else banned] = -np.inf
        if apart is not None or (case.beta == 0 and alike):
            x[theirs] = -np.inf
        if case.has("lowest-some"):  # often of the same tokens, by other numbers
            low = logits <= np.finfo(np.float16).min
            lowest = random.choice([lowest_of(dtype, random), -np.inf])
            if random.random() < 0.8:
                x[low] = lowest
            elif kind == "own":
                x[banned & low if random.random() < 0.5 else banned] = lowest
        x = as_held(x, dtype)
        teacher = fastrl.Teacher.from_logits(_wide(rows, x, dtype), **options)
        x, error = x[active], 0.0
    return teacher, Rows(rows.kept(x), rows.ids[active], head, arithmetic, error)


def _weights(case: Case) -> tuple[str, ...]:
    linear = case.function.startswith("linear") and case.weight_dtype != "like"
    return (case.weight_dtype,) if linear else ()


def _wide(rows: LogitRows, values: np.ndarray, dtype: str) -> Any:
    case, tokens = rows.case, rows.tokens
    if case.masked_values != "usual":
        values = np.where(rows.active[:, None], values, MASKED_VALUES[case.masked_values])
    return flat_tensor(case, values, dtype).view(*tokens.shape, values.shape[1])


def _arguments(rows: LogitRows) -> dict[str, Any]:
    arguments = row_arguments(rows)
    return {name: x for name, x in arguments.items() if name not in ("ignore_index", "kept")}


def _is_alone(rows: LogitRows) -> bool:
    """Say whether the call is that of the divergence itself, which takes no sets."""
    return rows.case.function in DIVERGENCES and rows.sets is None


def _stats_arguments(rows: LogitRows, teacher: fastrl.Teacher) -> dict[str, Any]:
    return {**row_arguments(rows), "teacher": teacher, "outputs": outputs_of(rows.case)}


def _placed(rows: LogitRows, oracle: Rows, expected: Divergence | TopTokens) -> dict[str, Any]:
    known = {"divergence": expected.divergence}
    if isinstance(expected, Divergence):
        known |= {"agrees": expected.agrees, "teacher_entropy": lambda: expected.teacher.entropy}
    return {
        name: rows.tokens.placed(
            known[name]() if name in known else getattr(oracle, name), rows.active
        )
        for name in outputs_of(rows.case)
    }


def _gradient(rows: LogitRows, oracle: Rows, expected: Divergence | TopTokens) -> Bounded:
    of_teacher = expected.gradient(_upstream(rows))
    if rows.case.function in DIVERGENCES:
        return of_teacher
    return of_teacher + oracle.gradient(*upstreams_of(rows, oracle))


def _upstream(rows: LogitRows) -> np.ndarray:
    given = upstream_of(rows, "divergence")
    return np.zeros(rows.active.sum()) if given is None else given[rows.active]

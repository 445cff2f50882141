"""The functions in plain torch: arguments and expected results."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import policy_data
from .arithmetic import FLOAT32, of_results
from .bounded import Bounded, constant
from .case import Case
from .compare import Got, Part, part
from .functions import mean
from .logits_data import as_held
from .oracle.values import explained_variance, kl_divergence, value_terms, whiten
from .oracle.weights import token_weights
from .policy_call import UPSTREAM, placed, scaled, upstream, zero_or_lost
from .tensors import bounds_tensor, flat_tensor, mask_tensor, token_tensor
from .tokens import tokens_of
from .trial import Trial
from .weighing import group_arguments, normalizer_argument, normalizer_of, weighing_of

METRICS = [
    "policy_loss",
    "kl",
    "kl_old",
    "entropy",
    "ratio_mean",
    "ratio_max",
    "ratio_min",
    "clip_low",
    "clip_high",
    "clip_fraction",
    "active_tokens",
    "zero_grad_fraction",
]


def _drawn(case: Case, what: str, total: int, dtype: str) -> np.ndarray:
    drawn = case.random(what).standard_normal(total) * case.spread
    drawn = np.round(drawn * 8) / 8 if case.values == "grid" else drawn
    if case.has("offset"):
        drawn = drawn + 1000.0
    if case.has("equal"):
        drawn = np.full(total, 0.7)
    return as_held(_not_finite(case, what, drawn), dtype)


def _not_finite(case: Case, what: str, drawn: np.ndarray) -> np.ndarray:
    """Return the numbers with the NaN and infinities of the case among them."""
    for feature, value in ((f"nan-{what}", np.nan), (f"inf-{what}", np.inf)):
        if case.has(feature):
            drawn = np.where(case.random(feature).random(len(drawn)) < 0.2, value, drawn)
    return drawn


def _weight_arguments(case: Case) -> dict[str, Any]:
    tokens = tokens_of(case)
    arguments = dict(case.parameters) | group_arguments(case, tokens)
    if case.normalizer is not None:
        arguments["normalizer"] = normalizer_argument(case)
    if tokens.bounds is not None:
        arguments["cu_seqlens"] = bounds_tensor(case, tokens)
    return arguments


def examined_weights(trial: Trial) -> tuple[dict[str, Got], dict[str, Part]]:
    """Examine `token_weights`."""
    case = trial.case
    tokens = tokens_of(case)
    given = trial.moved([mask_tensor(case, tokens)])
    result = trial.call(*given, **trial.moved(_weight_arguments(case)))
    parameters = dict(case.parameters)
    weighing = weighing_of(case, tokens, tokens.valid, parameters)
    want = token_weights(weighing, parameters["aggregation"], normalizer_of(case), FLOAT32)
    return {"weights": part(result)}, {"weights": Part(want.reshape(*tokens.shape), "float32")}


def examined_value_loss(trial: Trial) -> tuple[dict[str, Got], dict[str, Part]]:
    """Examine `value_loss`."""
    case = trial.case
    tokens = tokens_of(case)
    of_values, of_returns, of_old = case.dtypes
    values = _drawn(case, "values", tokens.total, of_values)
    returns = _drawn(case, "returns", tokens.total, of_returns)
    old = None
    arguments = _weight_arguments(case)
    if "clip" in arguments:
        by = case.random("old").choice([0.0, 0.5, -0.5, 0.25, 1.0, -2.0], tokens.total)
        old = np.where(np.isinf(values), 0.0, values) + by
        old = as_held(_not_finite(case, "old", old), of_old)
        arguments["old_values"] = token_tensor(case, tokens, old, of_old)
    leaf = trial.leaf(token_tensor(case, tokens, values, case.dtype))
    constants = [token_tensor(case, tokens, returns, of_returns), mask_tensor(case, tokens)]
    result = trial.call(leaf, *trial.moved(constants), **trial.moved(arguments))
    arithmetic, valid = of_results(case.dtype), tokens.valid
    parameters = {"aggregation": "token-mean", "loss": "mse", **case.parameters}
    weighing = weighing_of(case, tokens, valid, parameters)
    of_case = normalizer_of(case)
    w = token_weights(weighing, parameters["aggregation"], of_case, arithmetic)[valid]
    v, r = (constant(x[valid], arithmetic) for x in (values, returns))
    before = None if old is None else constant(old[valid], arithmetic)
    value, slope, clipped = value_terms(v, r, before, parameters.get("clip"), parameters["loss"])
    trial.doubts.add("value clip", clipped.doubtful)
    share = Bounded(clipped.yes.astype(float), clipped.doubtful.astype(float), arithmetic)
    n = int(valid.sum())
    averages = {"value_mean": v, "return_mean": r, "clip_fraction": share}
    metrics = {name: mean(x) if n else x.sum() for name, x in averages.items()}
    metrics["explained_variance"] = explained_variance(v, r)
    got = {"loss": part(result.loss)}
    got |= {f"metric {name}": part(x) for name, x in result.metrics.items()}
    want = {"loss": Part((w * value).sum(), arithmetic.name)}
    want |= {f"metric {name}": Part(x) for name, x in metrics.items()}
    if trial.differentiates(leaf):
        trial.backward([leaf], [result.loss], [upstream(case, result.loss)])
        full = scaled(w * slope, case)
        got["grad values"] = part(leaf.grad)
        waited_for = UPSTREAM[case.upstream]
        want["grad values"] = Part(placed(full, valid, tokens.shape), case.dtype, waited_for)
    return got, want


def examined_kl(trial: Trial) -> tuple[dict[str, Got], dict[str, Part]]:
    """Examine `kl_divergence`."""
    case = trial.case
    tokens = tokens_of(case)
    logprobs = policy_data.logprobs_of(case, tokens)
    fields = {"kl_clamp": case.parameters.get("clamp")}
    ref = policy_data.ref_of(case, logprobs, fields)
    leaves = [trial.leaf(token_tensor(case, tokens, logprobs, case.dtype))]
    leaves.append(trial.leaf(token_tensor(case, tokens, ref, case.token_dtype)))
    result = trial.call(*leaves, **case.parameters)
    arithmetic = of_results(case.dtype, case.token_dtype)
    estimator, clamp = case.parameters.get("estimator", "k3"), fields["kl_clamp"]
    bounded = (Bounded(x, 0.0, arithmetic) for x in (logprobs, ref))
    value, *slopes = kl_divergence(*bounded, estimator, clamp)
    got = {"kl": part(result)}
    want = {"kl": Part(value.reshape(*tokens.shape), arithmetic.name)}
    if trial.differentiates(*leaves):
        g = case.random("upstream kl").choice([0.0, 1.0, -0.75], tokens.total)
        given = flat_tensor(case, g, arithmetic.name).view(tokens.shape)
        trial.backward(leaves, [result], [given])
        dtypes = (case.dtype, case.token_dtype)
        for name, leaf, slope, dtype in zip(
            ("logprobs", "ref"), leaves, slopes, dtypes, strict=True
        ):
            asked = Bounded(g, 0.0, arithmetic)
            total = zero_or_lost(asked, slope * asked)
            got[f"grad {name}"] = part(leaf.grad)
            want[f"grad {name}"] = Part(total.reshape(*tokens.shape), dtype)
    return got, want


def examined_mean(trial: Trial) -> tuple[dict[str, Got], dict[str, Part]]:
    """Examine `masked_mean` and `whiten`."""
    case = trial.case
    tokens = tokens_of(case)
    x = _drawn(case, "x", tokens.total, case.dtype)
    leaf = trial.leaf(token_tensor(case, tokens, x, case.dtype))
    arithmetic, valid = of_results(case.dtype), tokens.valid
    result = trial.call(leaf, trial.moved(mask_tensor(case, tokens)), **case.parameters)
    if case.function == "whiten":
        white = whiten(
            Bounded(x[valid], 0.0, arithmetic), shift_mean=case.parameters.get("shift_mean", True)
        )
        return {"x": part(result)}, {"x": Part(placed(white, valid, tokens.shape), arithmetic.name)}
    dim = case.parameters.get("dim")
    selected = Bounded(np.where(valid, x, 0.0).reshape(tokens.shape), 0.0, arithmetic)
    count = valid.reshape(tokens.shape).sum(dim)
    want_mean = selected.sum(dim) / np.maximum(count, 1).astype(float)
    got, want = {"mean": part(result)}, {"mean": Part(want_mean, arithmetic.name)}
    if trial.differentiates(leaf):
        g = np.asarray(case.random("upstream").choice([0.0, 1.0, -0.75], want_mean.shape), float)
        trial.backward([leaf], [result], [torch.tensor(g, dtype=result.dtype)])
        share = Bounded(g, 0.0, arithmetic) / np.maximum(count, 1).astype(float)
        spread = [
            np.broadcast_to(y if dim is None else np.expand_dims(y, dim), tokens.shape)
            for y in (share.value, share.error)
        ]
        inside = valid.reshape(tokens.shape)
        gradient = Bounded(
            np.where(inside, spread[0], 0), np.where(inside, spread[1], 0), arithmetic
        )
        got["grad x"], want["grad x"] = part(leaf.grad), Part(gradient, case.dtype)
    return got, want


def examined_reduce(trial: Trial) -> tuple[dict[str, Got], dict[str, Part]]:
    """Examine `reduce_metrics`; sequences are micro-batches."""
    case = trial.case
    count = max(case.sequences, 1)
    random = case.random("metrics")
    drawn = {name: as_held(np.abs(random.standard_normal(count)), case.dtype) for name in METRICS}
    active = random.integers(0, case.tokens + 1, count).astype(float)
    drawn["active_tokens"] = active
    for name in METRICS:  # a micro-batch without tokens has zeros
        if case.has("nan-metric") and name != "active_tokens":
            broken = case.random(f"nan {name}").random(count) < 0.2
            drawn[name] = np.where(broken, np.nan, drawn[name])
        drawn[name] = np.where(active == 0, 0.0, drawn[name])
    dtype = getattr(torch, case.dtype)
    given: list[dict[str, Tensor]] = [
        {name: torch.tensor(values[i], dtype=dtype) for name, values in drawn.items()}
        for i in range(count)
    ]
    result = trial.call(trial.moved(given[0] if count == 1 else given), **case.parameters)
    arithmetic = of_results(case.dtype)
    total, some = active.sum(), active > 0
    want = {}
    for name, values in drawn.items():
        x = Bounded(values, 0.0, arithmetic)
        added = name == "active_tokens" or (
            name == "policy_loss" and case.parameters.get("policy_loss", "sum") != "mean"
        )
        if added:
            reduced = x.sum()
        elif name in ("ratio_max", "ratio_min"):
            extreme = np.max if name == "ratio_max" else np.min
            reduced = Bounded(extreme(values[some]) if some.any() else 0.0, 0.0, arithmetic)
        else:
            reduced = (x * active).sum() / max(total, 1.0)
        want[name] = Part(reduced, arithmetic.name)
    return {name: part(x) for name, x in result.items()}, want

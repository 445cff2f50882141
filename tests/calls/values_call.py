"""Values, rewards, weights and means: arguments and expected results."""

from typing import Any

import numpy as np
import torch

from fastrl.contract import Metrics
from fastrl.objective.presets import ADVANTAGE_CONVENTIONS

from .case import Case
from .oracle.advantages import gae, group_advantages
from .oracle.bounded import FLOAT32, Bounded, constant, of_results
from .oracle.functions import mean
from .oracle.tokens import token_weights
from .oracle.values import explained_variance, kl_divergence, value_terms, whiten
from .policy_call import UPSTREAM, expect_loss, scaled, upstream, zero_or_lost
from .policy_data import beside, logprobs_of, normalizer_of, weighing_arguments, weighing_of
from .tokens import (
    Tokens,
    as_held,
    bounds_argument,
    flat_tensor,
    laid_out,
    mask_tensor,
    on_grid,
    some,
    token_tensor,
    tokens_of,
)
from .trial import Trial


def _not_finite(case: Case, what: str, drawn: np.ndarray) -> np.ndarray:
    """Return the numbers with the NaN and infinities of the case among them."""
    drawn = some(case, f"nan-{what}", drawn, np.nan, 0.2)
    return some(case, f"inf-{what}", drawn, np.inf, 0.2)


def _drawn(case: Case, what: str, total: int, dtype: str) -> np.ndarray:
    drawn = on_grid(case, case.random(what).standard_normal(total) * case.spread, 8)
    drawn = drawn + 1000.0 if case.has("offset") else drawn
    drawn = np.full(total, 0.7) if case.has("equal") else drawn
    return as_held(_not_finite(case, what, drawn), dtype)


def _rewards(case: Case, total: int, of_group: np.ndarray | None = None) -> np.ndarray:
    random = case.random("rewards")
    drawn = random.standard_normal(total) * case.spread
    if case.values == "grid":  # as graders give them: few values, so groups of equal ones
        drawn = random.choice([0.0, 1.0, 0.5, -1.0], total)
    drawn = drawn + 1000.0 if case.has("offset") else drawn
    if case.has("equal-groups"):
        drawn = of_group * 0.1 + 0.7
    if case.has("zero-groups"):
        drawn = np.where(of_group % 2 == 0, 0.0, drawn)
    return as_held(_not_finite(case, "rewards", drawn), case.dtype)


def examine_group_advantages(trial: Trial) -> None:
    """Sequences are groups, tokens their size."""
    case = trial.case
    groups, size = case.sequences, case.tokens
    total = groups * size
    shape = (total,) if case.layout == "packed" else (groups, size)
    arguments: dict[str, Any] = dict(case.parameters)
    names = np.repeat(np.arange(groups), size)
    if case.groups == "ids":
        names = case.random("groups").integers(-groups, groups + 1, total)
        ids = torch.tensor(names).to(getattr(torch, case.ids_dtype))
        arguments["group_ids"] = laid_out(ids.view(shape), case.token_layout)
    elif case.layout == "packed":
        arguments["group_size"] = size
    convention = case.parameters.get("convention", "fastrl")
    if case.groups is None and size == 1:  # which is refused without
        arguments.setdefault("singleton", ADVANTAGE_CONVENTIONS[convention][2])
    tokens, rewards = tokens_of(case), _rewards(case, total, names)
    if case.parameters.get("scale") == "mean":  # which negative rewards are refused for
        rewards = np.where(tokens.valid, np.abs(rewards), rewards)
    result = trial.call(
        token_tensor(case, tokens, rewards, case.dtype),
        mask=mask_tensor(case, tokens),
        **arguments,
    )
    usual = ("correction", "eps", "singleton")
    options = {"baseline": "mean", "scale": "group"}
    options |= dict(zip(usual, ADVANTAGE_CONVENTIONS[convention], strict=True)) | case.parameters
    on_gpu = "triton" if trial.backend == "triton" else "cuda"
    kernels = on_gpu if trial.on_gpu_kernels else "cpu"
    arithmetic = of_results(case.dtype)
    inside = tokens.valid & ~np.isnan(rewards) if convention == "trl" else tokens.valid
    want = group_advantages(rewards[inside], names[inside], options, arithmetic, kernels)
    trial.expect(result._asdict(), {name: tokens.placed(x, inside) for name, x in want.items()})


def examine_gae(trial: Trial) -> None:
    """Examine `gae` or `discounted_returns`."""
    case = trial.case
    tokens, dtypes, parameters = tokens_of(case), case.dtypes, case.parameters
    with_values = case.function == "gae"
    rewards, values = _rewards(case, tokens.total), np.zeros(tokens.total)
    inputs = [token_tensor(case, tokens, rewards, case.dtype)]
    if with_values:
        drawn = np.round(case.random("values").standard_normal(tokens.total) * 8) / 8
        values = as_held(drawn, dtypes[1])
        inputs.append(token_tensor(case, tokens, values, dtypes[1]))
    arguments = {name: parameters[name] for name in ("gamma", "lam") if name in parameters}
    flags = {}
    for name in ("terminated", "truncated"):
        flags[name] = np.zeros(tokens.total, bool)
        if name in parameters:
            flags[name] = case.random(name).random(tokens.total) < parameters[name]
            tensor = torch.tensor(flags[name]).to(getattr(torch, case.mask_dtype))
            arguments[name] = laid_out(tensor.view(tokens.shape), case.token_layout)
    following = None
    if "bootstrap" in parameters:
        following, arguments["bootstrap_values"] = _following(case, tokens)
    arguments |= bounds_argument(case, tokens)
    result = trial.call(*inputs, mask_tensor(case, tokens), **arguments)
    made, returns = gae(
        rewards,
        values,
        tokens.sequence,
        tokens.valid,
        flags,
        following,
        parameters.get("gamma", 1.0),
        parameters.get("lam", 0.95) if with_values else 1.0,
        of_results(*dtypes[: len(inputs)]),
    )
    want = {"advantages": made, "returns": returns} if with_values else {"returns": made}
    got = result._asdict() if with_values else {"returns": result}
    trial.expect(got, {name: x.reshape(tokens.shape) for name, x in want.items()})


def _following(case: Case, tokens: Tokens) -> tuple[Any, Any]:
    """Return the values after each token, if it is the last or truncated, and the argument."""
    by_token = case.parameters["bootstrap"] == "token"
    total, dtype = tokens.total if by_token else tokens.count, case.dtypes[2]
    drawn = np.round(case.random("bootstrap").standard_normal(total) * 8) / 4
    drawn = as_held(drawn, dtype)
    # [B] is taken for per-token values where the two shapes are the same
    of_tokens = by_token or tokens.shape == (tokens.count,)
    per_token = drawn if of_tokens else drawn[tokens.sequence]
    truncated = per_token if of_tokens else np.full(tokens.total, np.nan)
    make = token_tensor if by_token else lambda case, _, *given: flat_tensor(case, *given)
    return np.stack([per_token, truncated], 1), make(case, tokens, drawn, dtype)


def examine_token_weights(trial: Trial) -> None:
    case = trial.case
    tokens = tokens_of(case)
    arguments = case.parameters | weighing_arguments(case, tokens)
    result = trial.call(mask_tensor(case, tokens), **arguments)
    weighing = weighing_of(case, tokens, tokens.valid, case.parameters)
    aggregation = case.parameters["aggregation"]
    want = token_weights(weighing, aggregation, normalizer_of(case), FLOAT32)
    trial.expect({"weights": result}, {"weights": want.reshape(tokens.shape)})


def examine_value_loss(trial: Trial) -> None:
    case = trial.case
    tokens = tokens_of(case)
    of_values, of_returns, of_old = case.dtypes
    values = _drawn(case, "values", tokens.total, of_values)
    returns = _drawn(case, "returns", tokens.total, of_returns)
    arithmetic, valid = of_results(case.dtype), tokens.valid
    before = None
    arguments = case.parameters | weighing_arguments(case, tokens)
    if "clip" in arguments:
        by = case.random("old").choice([0.0, 0.5, -0.5, 0.25, 1.0, -2.0], tokens.total)
        old = _not_finite(case, "old", np.where(np.isinf(values), 0.0, values) + by)
        old = as_held(old, of_old)
        arguments["old_values"] = token_tensor(case, tokens, old, of_old)
        before = constant(old[valid], arithmetic)
    leaf = trial.leaf(token_tensor(case, tokens, values, of_values))
    given = token_tensor(case, tokens, returns, of_returns)
    result = trial.call(leaf, given, mask_tensor(case, tokens), **arguments)
    parameters = {"aggregation": "token-mean", "loss": "mse", **case.parameters}
    weighing = weighing_of(case, tokens, valid, parameters)
    aggregation = parameters["aggregation"]
    w = token_weights(weighing, aggregation, normalizer_of(case), arithmetic)[valid]
    v, r = (constant(x[valid], arithmetic) for x in (values, returns))
    value, slope, clipped = value_terms(v, r, before, parameters.get("clip"), parameters["loss"])
    trial.doubts.add("value clip", clipped.doubtful)
    share = Bounded(clipped.yes.astype(float), clipped.doubtful.astype(float), arithmetic)
    averages = {"value_mean": v, "return_mean": r, "clip_fraction": share}
    metrics = {name: mean(x) if valid.any() else x.sum() for name, x in averages.items()}
    metrics["explained_variance"] = explained_variance(v, r)
    expect_loss(trial, result, (w * value).sum(), metrics)
    if trial.backward({"values": leaf}, [result.loss], [upstream(case, result.loss)]):
        want = tokens.placed(scaled(w * slope, case), valid)
        trial.expect_gradients({"values": leaf}, {"values": want}, UPSTREAM[case.upstream])


def _asked(case: Case, what: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return an upstream gradient of a result of this shape."""
    return np.asarray(case.random(what).choice([0.0, 1.0, -0.75], shape), float)


def examine_kl_divergence(trial: Trial) -> None:
    case = trial.case
    tokens = tokens_of(case)
    estimator, clamp = case.parameters.get("estimator", "k3"), case.parameters.get("clamp")
    logprobs = logprobs_of(case, tokens)
    ref = beside(case, "ref", logprobs, {"kl_clamp": clamp})
    leaves = {"logprobs": trial.leaf(token_tensor(case, tokens, logprobs, case.dtype))}
    leaves["ref"] = trial.leaf(token_tensor(case, tokens, ref, case.token_dtype))
    result = trial.call(*leaves.values(), **case.parameters)
    arithmetic = of_results(case.dtype, case.token_dtype)
    bounded = (Bounded(x, 0.0, arithmetic) for x in (logprobs, ref))
    value, *slopes = kl_divergence(*bounded, estimator, clamp)
    trial.expect({"kl": result}, {"kl": value.reshape(tokens.shape)})
    g = _asked(case, "upstream kl", (tokens.total,))
    given = flat_tensor(case, g, arithmetic.name).view(tokens.shape)
    if trial.backward(leaves, [result], [given]):
        asked = Bounded(g, 0.0, arithmetic)
        totals = [zero_or_lost(asked, slope * asked).reshape(tokens.shape) for slope in slopes]
        trial.expect_gradients(leaves, dict(zip(leaves, totals, strict=True)))


def examine_mean(trial: Trial) -> None:
    """Examine `masked_mean` and `whiten`."""
    case = trial.case
    tokens = tokens_of(case)
    x = _drawn(case, "x", tokens.total, case.dtype)
    leaf = trial.leaf(token_tensor(case, tokens, x, case.dtype))
    arithmetic, valid = of_results(case.dtype), tokens.valid
    result = trial.call(leaf, mask_tensor(case, tokens), **case.parameters)
    if case.function == "whiten":
        shift_mean = case.parameters.get("shift_mean", True)
        white = whiten(Bounded(x[valid], 0.0, arithmetic), shift_mean=shift_mean)
        trial.expect({"x": result}, {"x": tokens.placed(white, valid)})
        return
    dim, inside = case.parameters.get("dim"), valid.reshape(tokens.shape)
    selected = Bounded(np.where(inside, x.reshape(tokens.shape), 0.0), 0.0, arithmetic)
    count = np.maximum(inside.sum(dim), 1).astype(float)
    want = selected.sum(dim) / count
    trial.expect({"mean": result}, {"mean": want})
    g = _asked(case, "upstream", want.shape)
    if trial.backward({"x": leaf}, [result], [torch.tensor(g, dtype=result.dtype)]):
        share = Bounded(g, 0.0, arithmetic) / count
        share = share if dim is None else share.map(lambda y: np.expand_dims(y, dim))
        gradient = share.map(lambda y: np.where(inside, y, 0))
        trial.expect_gradients({"x": leaf}, {"x": gradient})


def examine_reduce_metrics(trial: Trial) -> None:
    """Sequences are micro-batches."""
    case = trial.case
    count, arithmetic = max(case.sequences, 1), of_results(case.dtype)
    random = case.random("metrics")
    drawn = {
        name: as_held(np.abs(random.standard_normal(count)), case.dtype) for name in Metrics._fields
    }
    active = random.integers(0, case.tokens + 1, count).astype(float)
    some_tokens = active > 0
    for name in Metrics._fields:  # a micro-batch without tokens has zeros
        if case.has("nan-metric"):
            broken = case.random(f"nan {name}").random(count) < 0.2
            drawn[name] = np.where(broken, np.nan, drawn[name])
        drawn[name] = np.where(some_tokens, drawn[name], 0.0)
    drawn["active_tokens"] = active
    dtype = getattr(torch, case.dtype)
    given = [
        {name: torch.tensor(values[i], dtype=dtype) for name, values in drawn.items()}
        for i in range(count)
    ]
    result = trial.call(given[0] if count == 1 else given, **case.parameters)
    added = {"active_tokens"}
    if case.parameters.get("policy_loss", "sum") != "mean":
        added.add("policy_loss")
    want = {}
    for name, values in drawn.items():
        x = Bounded(values, 0.0, arithmetic)
        if name in added:
            want[name] = x.sum()
        elif name in ("ratio_max", "ratio_min"):
            extreme = np.max if name == "ratio_max" else np.min
            value = extreme(values[some_tokens]) if some_tokens.any() else 0.0
            want[name] = Bounded(value, 0.0, arithmetic)
        else:
            want[name] = (x * active).sum() / max(active.sum(), 1.0)
    trial.expect(result, want)

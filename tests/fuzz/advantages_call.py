"""`group_advantages`, `gae` and `discounted_returns`: arguments and expected results."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .arithmetic import of_results
from .bounded import Bounded
from .case import Case
from .compare import Got, Part, part
from .logits_data import as_held
from .oracle.advantages import gae, group_advantages
from .tensors import bounds_tensor, flat_tensor, laid_out, mask_tensor, token_tensor
from .tokens import Tokens, tokens_of
from .trial import Trial

#: eps and singleton by convention
CONVENTIONS = {
    "fastrl": (1e-4, "zero"),
    "trl": (1e-4, "zero"),
    "verl": (1e-6, "raw"),
    "openrlhf": (1e-9, "zero"),
}


def _rewards(case: Case, total: int, of_group: np.ndarray | None = None) -> np.ndarray:
    random = case.random("rewards")
    drawn = random.standard_normal(total) * case.spread
    if case.values == "grid":  # as graders give them: few values, so groups of equal ones
        drawn = random.choice([0.0, 1.0, 0.5, -1.0], total)
    if case.has("offset"):
        drawn = drawn + 1000.0
    if case.has("equal-groups") and of_group is not None:
        drawn = of_group * 0.1 + 0.7
    if case.has("zero-groups") and of_group is not None:
        drawn = np.where(of_group % 2 == 0, 0.0, drawn)
    for feature, value in (("nan-rewards", np.nan), ("inf-rewards", np.inf)):
        if case.has(feature):
            drawn = np.where(case.random(feature).random(total) < 0.2, value, drawn)
    return as_held(drawn, case.dtype)


def examined_groups(trial: Trial) -> tuple[dict[str, Got], dict[str, Part]]:
    """Examine `group_advantages`; sequences are groups, tokens their size."""
    case = trial.case
    groups, size = case.sequences, case.tokens
    total = groups * size
    given = dict(case.parameters)
    if case.groups == "ids":
        names = case.random("groups").integers(-groups, groups + 1, total)
        arguments: dict[str, Any] = {"group_ids": names}
    else:
        names = np.repeat(np.arange(groups), size)
        arguments = {"group_size": size} if case.layout == "packed" else {}
    rewards = _rewards(case, total, names)
    shape = (total,) if case.layout == "packed" else (groups, size)
    if "group_ids" in arguments:
        ids = torch.from_numpy(names).to(getattr(torch, case.ids_dtype))
        arguments["group_ids"] = laid_out(ids.view(shape), case.token_layout)
    tensor = laid_out(flat_tensor(case, rewards, case.dtype).view(shape), case.token_layout)
    result = trial.call(trial.moved(tensor), **trial.moved(arguments), **given)
    eps, singleton = CONVENTIONS[given.pop("convention", "fastrl")]
    usual = {"baseline": "mean", "scale": "group", "correction": 1.0}
    options = {**usual, "eps": eps, "singleton": singleton, **given}
    arithmetic = of_results(case.dtype)
    want = group_advantages(rewards, names, options, arithmetic)
    return (
        {name: part(x) for name, x in result._asdict().items()},
        {name: _part(x, shape, arithmetic.name) for name, x in want.items()},
    )


def _part(x: object, shape: tuple[int, ...], dtype: str) -> Part:
    if isinstance(x, Bounded):
        return Part(x.reshape(*shape), dtype)
    return Part(x.reshape(shape), "bool")


def examined_gae(trial: Trial) -> tuple[dict[str, Got], dict[str, Part]]:
    """Examine `gae` or `discounted_returns`."""
    case = trial.case
    tokens = tokens_of(case)
    dtypes = case.dtypes
    rewards = _rewards(case, tokens.total)
    values = as_held(
        np.round(case.random("values").standard_normal(tokens.total) * 8) / 8, dtypes[1]
    )
    parameters = dict(case.parameters)
    flags, arguments = (
        {},
        {name: parameters[name] for name in ("gamma", "lam") if name in parameters},
    )
    for name in ("terminated", "truncated"):
        flags[name] = np.zeros(tokens.total, bool)
        if name in parameters:
            flags[name] = case.random(name).random(tokens.total) < parameters[name]
            tensor = torch.from_numpy(flags[name]).to(getattr(torch, case.mask_dtype))
            arguments[name] = laid_out(tensor.view(tokens.shape), case.token_layout)
    following, bootstrap = _following(case, tokens, parameters.get("bootstrap"))
    if bootstrap is not None:
        arguments["bootstrap_values"] = bootstrap
    if tokens.bounds is not None:
        arguments["cu_seqlens"] = bounds_tensor(case, tokens)
    inputs = [token_tensor(case, tokens, rewards, case.dtype)]
    with_values = case.function == "gae"
    if with_values:
        inputs.append(token_tensor(case, tokens, values, dtypes[1]))
    inputs.append(mask_tensor(case, tokens))
    result = trial.call(*trial.moved(inputs), **trial.moved(arguments))
    arithmetic = of_results(*dtypes[: len(inputs) - 1])
    made, returns = gae(
        rewards,
        values if with_values else np.zeros(tokens.total),
        tokens.sequence,
        tokens.valid,
        flags,
        following,
        parameters.get("gamma", 1.0),
        parameters.get("lam", 0.95) if with_values else 1.0,
        arithmetic,
    )
    shape = tokens.shape
    if not with_values:
        want = {"returns": Part(made.reshape(*shape), arithmetic.name)}
        return {"returns": part(result)}, want
    got = {name: part(x) for name, x in result._asdict().items()}
    want = {"advantages": made, "returns": returns}
    return got, {name: Part(x.reshape(*shape), arithmetic.name) for name, x in want.items()}


def _following(case: Case, tokens: Tokens, kind: str | None) -> tuple[Any, Any]:
    """Return the values after each token, if it is the last or truncated, and the argument."""
    if kind is None:
        return None, None
    random = case.random("bootstrap")
    total = tokens.total if kind == "token" else tokens.count
    dtype = case.dtypes[2]
    drawn = as_held(np.round(random.standard_normal(total) * 8) / 4, dtype)
    # [B] is taken for per-token values where the two shapes are the same
    of_tokens = kind == "token" or tokens.shape == (tokens.count,)
    per_token = drawn if of_tokens else drawn[tokens.sequence]
    truncated = per_token if of_tokens else np.full(tokens.total, np.nan)
    if kind == "token":
        tensor = token_tensor(case, tokens, drawn, dtype)
    else:
        tensor = flat_tensor(case, drawn, dtype)
    return np.stack([per_token, truncated], 1), tensor

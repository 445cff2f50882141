"""Values, rewards, weights and means: arguments and expected results."""

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastrl.contract import Metrics
from fastrl.objective.presets import ADVANTAGE_CONVENTIONS

from .call import Call, Function, LossCall, Place, zero_or_lost
from .case import Case
from .oracle.advantages import gae, group_advantages
from .oracle.bounded import FLOAT32, Bounded, Decision, constant, of_results
from .oracle.functions import mean
from .oracle.tokens import token_weights
from .oracle.values import explained_variance, kl_divergence, value_terms, whiten
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


class GroupAdvantagesCall(Call):
    """Sequences are groups, tokens their size."""

    def __init__(self, case: Case, place: Place) -> None:
        super().__init__(case, place)
        groups, size = case.sequences, case.tokens
        total = groups * size
        shape = (total,) if case.layout == "packed" else (groups, size)
        arguments: dict[str, Any] = dict(case.parameters)
        self.names = np.repeat(np.arange(groups), size)
        if case.groups == "ids":
            self.names = case.random("groups").integers(-groups, groups + 1, total)
            ids = torch.tensor(self.names).to(getattr(torch, case.ids_dtype))
            arguments["group_ids"] = laid_out(ids.view(shape), case.token_layout)
        elif case.layout == "packed":
            arguments["group_size"] = size
        self.convention = case.parameters.get("convention", "fastrl")
        if case.groups is None and size == 1:  # which is refused without
            arguments.setdefault("singleton", ADVANTAGE_CONVENTIONS[self.convention][2])
        self.tokens, rewards = tokens_of(case), _rewards(case, total, self.names)
        if case.parameters.get("scale") == "mean":  # which negative rewards are refused for
            rewards = np.where(self.tokens.valid, np.abs(rewards), rewards)
        self.rewards = rewards
        given = token_tensor(case, self.tokens, rewards, case.dtype)
        self.given = {"rewards": given, "mask": mask_tensor(case, self.tokens), **arguments}

    def expected(self) -> dict[str, Bounded | Decision]:
        case, place, tokens = self.case, self.place, self.tokens
        usual = ("correction", "eps", "singleton")
        options = {"baseline": "mean", "scale": "group"}
        of_convention = ADVANTAGE_CONVENTIONS[self.convention]
        options |= dict(zip(usual, of_convention, strict=True)) | case.parameters
        on_gpu = "triton" if place.backend == "triton" else "cuda"
        kernels = on_gpu if place.on_gpu_kernels else "cpu"
        inside = tokens.valid
        if self.convention == "trl":
            inside = inside & ~np.isnan(self.rewards)
        drawn = self.rewards[inside], self.names[inside]
        want = group_advantages(*drawn, options, of_results(case.dtype), kernels)
        return {name: tokens.placed(x, inside) for name, x in want.items()}


class ScanCall(Call):
    """A call of `gae` or `discounted_returns`."""

    def __init__(self, case: Case, place: Place) -> None:
        super().__init__(case, place)
        self.tokens = tokens = tokens_of(case)
        dtypes, parameters = case.dtypes, case.parameters
        self.rewards, self.values = _rewards(case, tokens.total), np.zeros(tokens.total)
        self.given = {"rewards": token_tensor(case, tokens, self.rewards, case.dtype)}
        self.with_values = case.function == "gae"
        if self.with_values:
            drawn = np.round(case.random("values").standard_normal(tokens.total) * 8) / 8
            self.values = as_held(drawn, dtypes[1])
            self.given["values"] = token_tensor(case, tokens, self.values, dtypes[1])
        self.given["mask"] = mask_tensor(case, tokens)
        self.given |= {name: parameters[name] for name in ("gamma", "lam") if name in parameters}
        self.flags = {}
        for name in ("terminated", "truncated"):
            self.flags[name] = np.zeros(tokens.total, bool)
            if name in parameters:
                self.flags[name] = case.random(name).random(tokens.total) < parameters[name]
                tensor = torch.tensor(self.flags[name]).to(getattr(torch, case.mask_dtype))
                self.given[name] = laid_out(tensor.view(tokens.shape), case.token_layout)
        self.following = None
        if "bootstrap" in parameters:
            self.following, self.given["bootstrap_values"] = _following(case, tokens)
        self.given |= bounds_argument(case, tokens)

    def results(self, result: Any) -> dict[str, Tensor | None]:
        return result._asdict() if self.with_values else {"returns": result}

    def expected(self) -> dict[str, Bounded | Decision]:
        parameters, tokens = self.case.parameters, self.tokens
        made, returns = gae(
            self.rewards,
            self.values,
            tokens.sequence,
            tokens.valid,
            self.flags,
            self.following,
            parameters.get("gamma", 1.0),
            parameters.get("lam", 0.95) if self.with_values else 1.0,
            of_results(*self.case.dtypes[: 1 + self.with_values]),
        )
        want = {"advantages": made, "returns": returns} if self.with_values else {"returns": made}
        return {name: x.reshape(tokens.shape) for name, x in want.items()}


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


class TokenWeightsCall(Call):
    def __init__(self, case: Case, place: Place) -> None:
        super().__init__(case, place)
        self.tokens = tokens = tokens_of(case)
        self.given = {"mask": mask_tensor(case, tokens), **case.parameters}
        self.given |= weighing_arguments(case, tokens)

    def expected(self) -> dict[str, Bounded | Decision]:
        case, tokens = self.case, self.tokens
        weighing = weighing_of(case, tokens, tokens.valid, case.parameters)
        aggregation = case.parameters["aggregation"]
        want = token_weights(weighing, aggregation, normalizer_of(case), FLOAT32)
        return {"result": want.reshape(tokens.shape)}


class ValueLossCall(LossCall):
    leaves = ("values",)

    def __init__(self, case: Case, place: Place) -> None:
        super().__init__(case, place)
        self.waited_for = self.asked
        self.tokens = tokens = tokens_of(case)
        of_values, of_returns, of_old = case.dtypes
        self.values = _drawn(case, "values", tokens.total, of_values)
        self.returns = _drawn(case, "returns", tokens.total, of_returns)
        self.old = None
        arguments = case.parameters | weighing_arguments(case, tokens)
        if "clip" in arguments:
            by = case.random("old").choice([0.0, 0.5, -0.5, 0.25, 1.0, -2.0], tokens.total)
            near = np.where(np.isinf(self.values), 0.0, self.values)
            self.old = as_held(_not_finite(case, "old", near + by), of_old)
            arguments["old_values"] = token_tensor(case, tokens, self.old, of_old)
        self.given = {
            "values": token_tensor(case, tokens, self.values, of_values),
            "returns": token_tensor(case, tokens, self.returns, of_returns),
            "mask": mask_tensor(case, tokens),
            **arguments,
        }

    @functools.cached_property
    def weights(self) -> Bounded:
        case, tokens = self.case, self.tokens
        parameters = {"aggregation": "token-mean", **case.parameters}
        weighing = weighing_of(case, tokens, tokens.valid, parameters)
        aggregation, arithmetic = parameters["aggregation"], of_results(case.dtype)
        of_all = token_weights(weighing, aggregation, normalizer_of(case), arithmetic)
        return of_all[tokens.valid]

    def expected(self) -> dict[str, Bounded | Decision]:
        parameters, valid = self.case.parameters, self.tokens.valid
        v, r, before = (
            None if x is None else constant(x[valid], self.weights.arithmetic)
            for x in (self.values, self.returns, self.old)
        )
        kind = parameters.get("loss", "mse")
        value, self.slope, clipped = value_terms(v, r, before, parameters.get("clip"), kind)
        self.doubts.add("value clip", clipped.doubtful)
        share = Bounded(clipped.yes.astype(float), clipped.doubtful.astype(float), v.arithmetic)
        averages = {"value_mean": v, "return_mean": r, "clip_fraction": share}
        metrics = {name: mean(x) if valid.any() else x.sum() for name, x in averages.items()}
        metrics["explained_variance"] = explained_variance(v, r)
        return {"loss": (self.weights * value).sum(), **metrics}

    def gradients(self) -> dict[str, Bounded]:
        slope = self.scaled(self.weights * self.slope)
        return {"values": self.tokens.placed(slope, self.tokens.valid)}


def _asked(case: Case, what: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return an upstream gradient of a result of this shape."""
    return np.asarray(case.random(what).choice([0.0, 1.0, -0.75], shape), float)


class KLCall(Call):
    leaves = ("logprobs", "ref_logprobs")

    def __init__(self, case: Case, place: Place) -> None:
        super().__init__(case, place)
        self.tokens = tokens = tokens_of(case)
        logprobs = logprobs_of(case, tokens)
        ref = beside(case, "ref", logprobs, {"kl_clamp": case.parameters.get("clamp")})
        dtypes = case.dtype, case.token_dtype
        self.arithmetic = of_results(*dtypes)
        self.numbers = [Bounded(x, 0.0, self.arithmetic) for x in (logprobs, ref)]
        for name, x, dtype in zip(self.leaves, (logprobs, ref), dtypes, strict=True):
            self.given[name] = token_tensor(case, tokens, x, dtype)
        self.given |= case.parameters

    def expected(self) -> dict[str, Bounded | Decision]:
        estimator, clamp = (self.case.parameters.get(name) for name in ("estimator", "clamp"))
        value, *self.slopes = kl_divergence(*self.numbers, estimator or "k3", clamp)
        return {"result": value.reshape(self.tokens.shape)}

    def upstream(self, results: dict[str, Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
        self.asked = _asked(self.case, "upstream kl", (self.tokens.total,))
        given = flat_tensor(self.case, self.asked, self.arithmetic.name).view(self.tokens.shape)
        return [results["result"]], [given]

    def gradients(self) -> dict[str, Bounded]:
        asked = Bounded(self.asked, 0.0, self.arithmetic)
        made = (zero_or_lost(asked, slope * asked) for slope in self.slopes)
        return {
            name: x.reshape(self.tokens.shape) for name, x in zip(self.leaves, made, strict=True)
        }


class MeanCall(Call):
    """A call of `masked_mean` or `whiten`."""

    leaves = ("x",)

    def __init__(self, case: Case, place: Place) -> None:
        super().__init__(case, place)
        self.tokens = tokens = tokens_of(case)
        self.x = _drawn(case, "x", tokens.total, case.dtype)
        self.given["x"] = token_tensor(case, tokens, self.x, case.dtype)
        self.given |= {"mask": mask_tensor(case, tokens), **case.parameters}
        self.dim, self.inside = case.parameters.get("dim"), tokens.valid.reshape(tokens.shape)

    def expected(self) -> dict[str, Bounded | Decision]:
        selected = Bounded(
            np.where(self.inside, self.x.reshape(self.tokens.shape), 0.0),
            0.0,
            of_results(self.case.dtype),
        )
        return {"result": selected.sum(self.dim) / self.count}

    @property
    def count(self) -> np.ndarray:
        return np.maximum(self.inside.sum(self.dim), 1).astype(float)

    def upstream(self, results: dict[str, Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
        self.asked = _asked(self.case, "upstream", self.count.shape)
        result = results["result"]
        return [result], [torch.tensor(self.asked, dtype=result.dtype)]

    def gradients(self) -> dict[str, Bounded]:
        share = Bounded(self.asked, 0.0, of_results(self.case.dtype)) / self.count
        if self.dim is not None:
            share = share.map(lambda y: np.expand_dims(y, self.dim))
        return {"x": share.map(lambda y: np.where(self.inside, y, 0))}


class WhitenCall(MeanCall):
    differentiable = False

    def expected(self) -> dict[str, Bounded | Decision]:
        valid, shift_mean = self.tokens.valid, self.case.parameters.get("shift_mean", True)
        inside = Bounded(self.x[valid], 0.0, of_results(self.case.dtype))
        return {"result": self.tokens.placed(whiten(inside, shift_mean=shift_mean), valid)}

    def upstream(self, results: dict[str, Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
        return [], []


class ReduceMetricsCall(Call):
    """Sequences are micro-batches."""

    def __init__(self, case: Case, place: Place) -> None:
        super().__init__(case, place)
        count, random = max(case.sequences, 1), case.random("metrics")
        self.drawn = {
            name: as_held(np.abs(random.standard_normal(count)), case.dtype)
            for name in Metrics._fields
        }
        self.active = random.integers(0, case.tokens + 1, count).astype(float)
        for name in Metrics._fields:  # a micro-batch without tokens has zeros
            if case.has("nan-metric"):
                broken = case.random(f"nan {name}").random(count) < 0.2
                self.drawn[name] = np.where(broken, np.nan, self.drawn[name])
            self.drawn[name] = np.where(self.active > 0, self.drawn[name], 0.0)
        self.drawn["active_tokens"] = self.active
        dtype = getattr(torch, case.dtype)
        parts = [
            {name: torch.tensor(values[i], dtype=dtype) for name, values in self.drawn.items()}
            for i in range(count)
        ]
        self.given = {"metrics": parts[0] if count == 1 else parts, **case.parameters}

    def results(self, result: Any) -> dict[str, Tensor | None]:
        return result

    def expected(self) -> dict[str, Bounded | Decision]:
        added = {"active_tokens"}
        if self.case.parameters.get("policy_loss", "sum") != "mean":
            added.add("policy_loss")
        want, some_tokens = {}, self.active > 0
        for name, values in self.drawn.items():
            x = Bounded(values, 0.0, of_results(self.case.dtype))
            if name in added:
                want[name] = x.sum()
            elif name in ("ratio_max", "ratio_min"):
                extreme = np.max if name == "ratio_max" else np.min
                value = extreme(values[some_tokens]) if some_tokens.any() else 0.0
                want[name] = Bounded(value, 0.0, x.arithmetic)
            else:
                want[name] = (x * self.active).sum() / max(self.active.sum(), 1.0)
        return want


FUNCTIONS = {
    "value_loss": Function(ValueLossCall, 2),
    "kl_divergence": Function(KLCall, 2),
    "group_advantages": Function(GroupAdvantagesCall, 3),
    "gae": Function(ScanCall, 2),
    "discounted_returns": Function(ScanCall, 1),
    "token_weights": Function(TokenWeightsCall, 1),
    "whiten": Function(WhitenCall, 1),
    "masked_mean": Function(MeanCall, 1),
    "reduce_metrics": Function(ReduceMetricsCall, 1),
}

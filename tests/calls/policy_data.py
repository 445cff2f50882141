"""The inputs of a loss per token, besides logits: their numbers, as tensors, and for the oracle.

Log-probabilities on a grid of 1/64 have exact differences in float32 (and, if small, in 16 bits),
so that a log ratio can be exactly on a bound; `bounds_of` lists the bounds of the objective.
"""

from math import inf, isfinite, log, log1p, nan, sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastrl import TopKLogprobs

from .case import Case
from .objectives import objective_fields, objective_of, own_term
from .oracle.bounded import Bounded, Doubts
from .oracle.centering import Centering
from .oracle.policy import Loss, policy_loss
from .oracle.rows import Rows
from .oracle.tokens import Tokens as ValidTokens
from .oracle.tokens import Weighing, term_weights
from .rows_data import LogitRows
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
)

GRID = 64.0
FEATURES = (
    "logprob-inf",  # banned now, not when it was sampled
    "old-inf",
    "both-inf",
    "ref-inf",
    "ref-both-inf",
    "rollout-inf",
    "rollout-both-inf",
    "nan-logprob",
    "nan-old",
    "nan-ref",
    "nan-rollout",
    "nan-entropy",
    "nan-advantages",
    "inf-advantages",
    "large-advantages",
    "tiny-advantages",
    "zero-advantages",
    "equal-advantages",
    "negative-advantages",
)


def logprobs_of(case: Case, tokens: Tokens) -> np.ndarray:
    """Return the log-probabilities of a case without logits, rounded to its dtype."""
    drawn = -np.abs(case.random("logprobs").standard_normal(tokens.total)) * 3
    drawn = on_grid(case, drawn, GRID)
    if {case.old, case.ref, case.rollout} & {"bounds", "far", "huge"}:  # others may be far above
        drawn = np.where(case.random("low logprobs").random(len(drawn)) < 0.3, drawn - 90, drawn)
    for feature, value in (("logprob-inf", -inf), ("both-inf", -inf), ("nan-logprob", nan)):
        drawn = some(case, feature, drawn, value)
    if case.has("ref-both-inf") or case.has("rollout-both-inf"):
        banned = case.random("both-inf everywhere").random(len(drawn)) < 0.4
        drawn = np.where(banned, -inf, drawn)
    return as_held(drawn, case.dtype)


def bounds_of(name: str, fields: dict) -> list[float]:
    """Return the log ratios of this tensor at which behavior changes."""
    if name == "ref":  # ref - logprob
        clamp = fields["kl_clamp"]
        around = [] if clamp is None else [clamp, -clamp, sqrt(2 * clamp), -sqrt(2 * clamp)]
        return [0.0, 80.0, -80.0, 40.0, -40.0, 17.0, 30.0, *around]
    if name == "rollout":  # old - rollout
        corrections, threshold = fields["rollout_correction"], fields["off_policy_threshold"]
        found = [0.0, 80.0, -80.0]
        for one in corrections or ():
            bounds = [x for x in (one["low"], one["high"]) if isfinite(x)]
            if one["estimator"] == "ratio":
                found += [log(x) for x in bounds if x > 0]
            else:
                found += [-x for x in bounds] + [sqrt(2 * x) for x in bounds if x > 0]
        return found if threshold is None else [*found, threshold, -threshold]
    clamp = fields["log_ratio_clamp"]
    clamps = clamp if isinstance(clamp, tuple) else (clamp, -clamp) if clamp else ()
    low, high = fields["clip_low"], fields["clip_high"]
    found = [0.0, 80.0, -80.0, 40.0, -40.0, low, -low]
    found += [high, -high, log1p(max(high, -0.99))] if isfinite(high) else []
    found += [x for x in clamps if isfinite(x)]
    region = fields["trust_region"]
    found += [] if region is None else [sqrt(region["high"]), -sqrt(region["high"])]
    found += [log1p(-low)] if low < 1 else []
    found += [log(x) for x in (fields["dual_clip"], fields["delta"]) if x]
    return found


def beside(case: Case, name: str, logprobs: np.ndarray, fields: dict) -> np.ndarray | None:
    """Return old, ref or rollout log-probabilities close to these, or infinite, or NaN."""
    kind, random, n = getattr(case, name), case.random(name), len(logprobs)
    if kind is None:
        return None
    normal = random.standard_normal(n)
    if kind == "equal":
        by = np.zeros(n)
    elif kind == "bounds":
        at = random.choice(bounds_of(name, fields), n)
        by = np.where(random.random(n) < 0.7, at, on_grid(case, at + normal / 8, GRID))
    else:
        by = on_grid(case, normal * {"near": 0.15, "far": 5.0, "huge": 60.0}[kind], GRID)
    finite = np.isfinite(logprobs)
    near, by = np.where(finite, logprobs, -2.5), by if name == "ref" else -by
    values = np.where(near + by > 0, near - np.abs(by), near + by)  # above 0 they are refused
    both = "both-inf" if name == "old" else f"{name}-both-inf"
    together = ~finite & (case.random(both).random(n) < 0.7)
    values = np.where(together & (case.has(both) or case.has("inf-chosen")), -inf, values)
    values = some(case, f"{name}-inf", values, -inf)
    return as_held(some(case, f"nan-{name}", values, nan), case.token_dtype)


def entropy_of(case: Case, tokens: Tokens) -> np.ndarray | None:
    if not case.entropy:
        return None
    drawn = case.random("entropy").standard_normal(tokens.total) * 2
    drawn = np.abs(on_grid(case, drawn, GRID))
    return as_held(some(case, "nan-entropy", drawn, nan), case.token_dtype)


def advantages_of(case: Case, count: int) -> np.ndarray:
    random = case.random("advantages")
    drawn = np.round(random.standard_normal(count) * GRID) / GRID
    drawn = np.where(random.random(count) < 0.3, random.choice([-1.0, 0.0, 1.0], count), drawn)
    if case.has("equal-advantages"):
        drawn = np.full(count, random.choice([-1.5, -1.0, 0.5, 1.0]))
    if case.has("zero-advantages"):
        drawn = np.where(random.random(count) < 0.8, 0.0, drawn)
    if case.has("negative-advantages"):
        drawn = -np.abs(drawn)
    drawn = drawn * (2.0**100 if case.has("large-advantages") else 1)
    drawn = drawn * (2.0**-100 if case.has("tiny-advantages") else 1)
    drawn = some(case, "nan-advantages", drawn, nan)
    return as_held(some(case, "inf-advantages", drawn, inf), case.token_dtype)


class PolicyInputs:
    """The numbers of every token besides logits, and how they are passed."""

    def __init__(self, case: Case, tokens: Tokens, valid: np.ndarray, logprobs: np.ndarray) -> None:
        self.case, self.tokens, self.valid = case, tokens, valid
        self.fields = objective_fields(case)
        counts = {"token": tokens.total, "sequence": tokens.count}
        self.advantages = advantages_of(case, counts[case.advantages])
        self.policy_weights = None
        if case.policy_weights is not None:
            known, count = [0.0, 0.5, 1.0, 1.25, 3.0], counts[case.policy_weights]
            drawn = case.random("policy weights").choice(known, count)
            self.policy_weights = as_held(drawn, case.token_dtype)
        self.old = beside(case, "old", logprobs, self.fields)
        self.ref = beside(case, "ref", logprobs, self.fields)
        sampled = logprobs if self.old is None else self.old
        self.rollout = beside(case, "rollout", sampled, self.fields)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that all policy losses share, as tensors."""
        case, tokens = self.case, self.tokens
        given: dict[str, Any] = {
            "advantages": self._tensor(self.advantages, case.advantages),
            "mask": mask_tensor(case, tokens),
            "objective": objective_of(case),
            **weighing_arguments(case, tokens),
        }
        for name in ("old", "ref", "rollout"):
            values = getattr(self, name)
            if values is not None:
                given[f"{name}_logprobs"] = self._tensor(values, "token")
        if self.policy_weights is not None:
            given["policy_weights"] = self._tensor(self.policy_weights, case.policy_weights)
        return given

    def _tensor(self, values: np.ndarray, level: str) -> Tensor:
        if level == "token":
            return token_tensor(self.case, self.tokens, values, self.case.token_dtype)
        return flat_tensor(self.case, values, self.case.token_dtype)

    def of_valid(self, values: np.ndarray) -> np.ndarray:
        """Return values per sequence or per token of the valid tokens."""
        tokens = self.tokens
        per_token = values if len(values) == tokens.total else values[tokens.sequence]
        return per_token[self.valid]

    def expected(
        self,
        logprobs: Bounded,
        entropy: Bounded | None,
        doubts: Doubts,
        score: Centering | None = None,
    ) -> Loss:
        """Return the loss of log-probabilities and entropies of the valid tokens."""
        arithmetic = logprobs.arithmetic
        names = ("advantages", "old", "ref", "rollout", "policy_weights")
        held = {name: getattr(self, name) for name in names}
        inputs = ValidTokens(
            logprobs=logprobs,
            entropy=entropy,
            sequence=self.tokens.sequence[self.valid],
            count=self.tokens.count,
            **{
                name: None if x is None else Bounded(self.of_valid(x), 0.0, arithmetic)
                for name, x in held.items()
            },
        )
        weighing = weighing_of(self.case, self.tokens, self.valid, self.fields)
        normalizers = {term: normalizer_of(self.case, term) for term in ("policy", "kl", "entropy")}
        weights = term_weights(weighing, self.fields, normalizers, arithmetic)
        function = own_term(self.case)
        return policy_loss(inputs, self.fields, weights, doubts, function, score)


def weighing_arguments(case: Case, tokens: Tokens) -> dict[str, Any]:
    """Return normalizer, groups and bounds of sequences as they are given."""
    given: dict[str, Any] = bounds_argument(case, tokens)
    if case.groups == "ids":
        ids = torch.tensor(_groups_of(case, tokens))
        given["group_ids"] = ids.to(getattr(torch, case.groups_dtype))
    elif case.groups is not None:
        given["group_size"] = case.groups
    if isinstance(case.normalizer, dict):
        given["normalizer"] = {name: _given(x) for name, x in case.normalizer.items()}
    elif case.normalizer is not None:
        given["normalizer"] = _given(case.normalizer)
    return given


def _given(number: float | tuple[float, ...]) -> float | Tensor:
    """A number in a tuple is given as a tensor."""
    return torch.tensor(number[0]) if isinstance(number, tuple) else number


def _groups_of(case: Case, tokens: Tokens) -> np.ndarray | None:
    if case.groups == "ids":
        far = 2**31 - 1 if case.groups_dtype == "int32" else 2**40
        return case.random("groups").choice([7, -3, 0, far], tokens.count)
    return None if case.groups is None else np.arange(tokens.count) // case.groups


def normalizer_of(case: Case, term: str = "policy") -> float | None:
    """Return the number that the oracle gets."""
    given = case.normalizer
    given = given.get(term) if isinstance(given, dict) else given
    return given[0] if isinstance(given, tuple) else given


def weighing_of(case: Case, tokens: Tokens, valid: np.ndarray, options: dict) -> Weighing:
    """Return what weighs the tokens; `options` has length_norm and count_empty."""
    return Weighing(
        valid=valid,
        sequence=tokens.sequence,
        count=tokens.count,
        width=0 if tokens.packed else tokens.shape[1],
        groups=_groups_of(case, tokens),
        length_norm=options.get("length_norm"),
        count_empty=options.get("count_empty", False),
    )


#: How far log q is from log p.
APART = {"equal": 0.0, "near": 0.15, "bounds": 0.15, "far": 2.0, "own": 2.0, "tail": 1.0}


def sampler_of(
    rows: LogitRows, oracle: Rows, inputs: PolicyInputs
) -> tuple[TopKLogprobs, np.ndarray, np.ndarray]:
    """Return the tokens of a sampler as they are given, their ids and log-probabilities."""
    case, tokens, active, vocabulary = rows.case, rows.tokens, rows.active, rows.case.vocabulary
    random, weights = case.random("sampler"), weights_of(inputs)
    whole = vocabulary <= 130 and (case.sampler == "tail" or random.random() < 0.2)
    count = vocabulary if whole else int(random.integers(1, min(vocabulary, 6) + 1))
    known = np.where(np.isfinite(oracle.log_p), oracle.log_p, -5.0).clip(-1e4)
    log_p = random.standard_normal((tokens.total, vocabulary))
    log_p[active] = known
    log_q = log_p * (case.sampler not in ("own", "tail"))
    log_q = log_q + APART[case.sampler] * random.standard_normal(log_p.shape)
    if random.random() < 0.4:  # q is 0
        log_q[random.random(log_q.shape) < 0.15] = -inf
    log_q = log_q - np.logaddexp.reduce(log_q, 1, keepdims=True).clip(-1e6)
    by = log_q if random.random() < 0.7 else random.standard_normal(log_q.shape)
    by = log_p if case.sampler == "tail" else by
    ids = np.argsort(-by, 1)[:, :count]
    log_q = np.take_along_axis(log_q, ids, 1)
    if case.sampler == "bounds":
        bounds = [x for one in weights for x in (one["low"], one["high"]) if x > 0 and isfinite(x)]
        apart = random.choice([log(x) for x in bounds] or [0.0], log_q.shape)
        on_bounds = np.take_along_axis(log_p, ids, 1) - apart
        log_q = np.where(random.random(log_q.shape) < 0.6, on_bounds, log_q)
    total = np.logaddexp.reduce(log_q, 1, keepdims=True)
    log_q = as_held(np.minimum(log_q - np.maximum(total, 0.0), 0.0), case.sampler_dtype)
    absent = random.random(log_q.shape) < random.choice([0.0, 0.2])
    if case.sampler == "tail":  # the fewest that leave next to nothing to the policy
        others = np.cumsum(np.exp(np.take_along_axis(log_p, ids, 1))[:, ::-1], 1)[:, ::-1]
        absent |= others < 10.0 ** -random.integers(1, 6)
    absent |= (random.random(len(log_q)) < 0.15)[:, None]
    ids = np.where(absent, -1, ids)
    log_q = np.where(absent, random.choice([-inf, nan, 0.0], log_q.shape), log_q)
    if case.masked_values != "usual":  # they may be anything under the mask
        ids = np.where(tokens.valid[:, None], ids, random.choice([-9, 2**30, vocabulary]))
        log_q = np.where(tokens.valid[:, None], log_q, random.choice([nan, 5.0, inf]))
    shape = tokens.shape if random.random() < 0.6 else (tokens.total,)
    top = TopKLogprobs(
        laid_out(flat_tensor(case, ids, case.ids_dtype).view(*shape, count), case.token_layout),
        laid_out(
            flat_tensor(case, log_q, case.sampler_dtype).view(*shape, count), case.logits_layout
        ),
    )
    return top, ids, log_q


def weights_of(inputs: PolicyInputs) -> list[dict]:
    """Return the corrections by which tokens of the sampler are weighed."""
    fields = inputs.fields
    if fields["surrogate"] == "cispo" and inputs.old is not None:  # by the bounded ratio
        clamp = fields["log_ratio_clamp"]
        ends = clamp if isinstance(clamp, tuple) else (-(clamp or inf), clamp or inf)
        low, high = np.clip(np.exp(ends), 1 - fields["clip_low"], 1 + fields["clip_high"])
        return [{"kind": "truncate", "estimator": "ratio", "low": low, "high": high}]
    return [one for one in fields["rollout_correction"] or () if one["level"] == "token"]

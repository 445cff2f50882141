"""`policy_loss` and `logits_policy_loss`: what a case gives them, and what they should give."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

import fastrl

from . import policy_data
from .arithmetic import Arithmetic, of_results
from .bounded import Bounded, Doubts, constant
from .case import Case
from .compare import Part
from .logits_data import logits_of
from .objectives import fields_of, objective_of
from .oracle.policy import Loss, policy_loss
from .oracle.rows import Rows
from .oracle.valid_tokens import Tokens as ValidTokens
from .own_objectives import OWN
from .rows_call import ids_tensor, logits_tensor, part, rows_of, token_options
from .tensors import bounds_tensor, flat_tensor, mask_tensor, token_tensor
from .tokens import Tokens, tokens_of
from .weighing import group_arguments, normalizer_argument, weights_of_terms

UPSTREAM = {"ones": 1.0, "zero": 0.0, "expanded": -0.375, "random": 2.5, "large": 2.0**40}
UPSTREAM |= {"nan": float("nan"), "some-zero": 1e-3, "strided": -1.0, "first": 0.5}


class PolicyInputs:
    """The numbers of every token besides logits, and how they are given."""

    def __init__(self, case: Case, tokens: Tokens, valid: np.ndarray, logprobs: np.ndarray) -> None:
        self.case, self.tokens, self.valid = case, tokens, valid
        self.fields = fields_of(case)
        self.advantages = policy_data.advantages_of(case, tokens)
        self.policy_weights = policy_data.policy_weights_of(case, tokens)
        self.old = policy_data.old_of(case, logprobs, self.fields)
        self.ref = policy_data.ref_of(case, logprobs, self.fields)
        sampled = logprobs if self.old is None else self.old
        self.rollout = policy_data.rollout_of(case, sampled, self.fields)

    def arguments(self) -> dict[str, Any]:
        """Return what all policy losses take by keyword, as tensors."""
        case, tokens = self.case, self.tokens
        given: dict[str, Any] = {"objective": objective_of(case)}
        for name in ("old", "ref", "rollout"):
            values = getattr(self, name)
            if values is not None:
                given[f"{name}_logprobs"] = token_tensor(case, tokens, values, case.token_dtype)
        if self.policy_weights is not None:
            given["policy_weights"] = self._of_level(self.policy_weights, case.policy_weights)
        if case.normalizer is not None:
            given["normalizer"] = normalizer_argument(case)
        given |= group_arguments(case, tokens)
        if tokens.bounds is not None:
            given["cu_seqlens"] = bounds_tensor(tokens)
        return given

    def advantages_tensor(self) -> Tensor:
        return self._of_level(self.advantages, self.case.advantages)

    def _of_level(self, values: np.ndarray, level: str) -> Tensor:
        if level == "token":
            return token_tensor(self.case, self.tokens, values, self.case.token_dtype)
        return flat_tensor(self.case, values, self.case.token_dtype)

    def expected(
        self,
        logprobs: Bounded,
        entropy: Bounded | None,
        arithmetic: Arithmetic,
        doubts: Doubts,
    ) -> Loss:
        """Return the loss of log-probabilities and entropies of the valid tokens."""
        tokens, valid = self.tokens, self.valid

        def bounded(values: np.ndarray | None) -> Bounded | None:
            if values is None:
                return None
            return Bounded(policy_data.of_tokens(values, tokens)[valid], 0.0, arithmetic)

        inputs = ValidTokens(
            logprobs=logprobs,
            advantages=bounded(self.advantages),
            sequence=tokens.sequence[valid],
            count=tokens.count,
            old=bounded(self.old),
            ref=bounded(self.ref),
            rollout=bounded(self.rollout),
            entropy=entropy,
            policy_weights=bounded(self.policy_weights),
        )
        weights = weights_of_terms(self.case, tokens, valid, self.fields, arithmetic)
        own = OWN.get(self.case.objective)
        return policy_loss(inputs, self.fields, weights, doubts, own and own.oracle)


def upstream(case: Case, loss: Tensor) -> Tensor:
    value = torch.tensor(UPSTREAM[case.upstream], dtype=loss.dtype)
    return value if case.upstream != "nan" else flat_tensor(case, value.numpy()[None], "float32")[0]


def upstream_factor(case: Case, arithmetic: Arithmetic) -> Bounded:
    return constant(UPSTREAM[case.upstream], arithmetic)


def loss_parts(result: Any) -> dict[str, Any]:
    got = {"loss": part(result.loss)}
    return got | {f"metric {name}": part(value) for name, value in result.metrics.items()}


def expected_parts(loss: Loss, arithmetic: Arithmetic) -> dict[str, Part]:
    want = {"loss": Part(loss.loss, arithmetic.name)}
    return want | {f"metric {name}": Part(value) for name, value in loss.metrics.items()}


def scaled(slope: Bounded, by: Bounded, where_nothing: np.ndarray) -> Bounded:
    """Return slope times the upstream gradient; a token without slope keeps 0 or gets NaN."""
    result = slope * by
    error = np.where(where_nothing & np.isnan(result.value), np.inf, result.error)
    return Bounded(result.value, error, result.arithmetic)


def placed(x: Bounded, valid: np.ndarray, shape: tuple[int, ...]) -> Bounded:
    """Return what valid tokens have, among zeros."""
    value, error = np.zeros((2, len(valid), *x.shape[1:]))
    value[valid], error[valid] = x.value, x.error
    shape = (*shape, *x.shape[1:])
    return Bounded(value.reshape(shape), error.reshape(shape), x.arithmetic)


def examined_tokens(case: Case, backend: str, device: str, doubts: Doubts) -> tuple[dict, dict]:
    """Examine `policy_loss`."""
    tokens = tokens_of(case)
    arithmetic = of_results(case.dtype, case.token_dtype)
    logprobs = policy_data.logprobs_of(case, tokens)
    entropy = policy_data.entropy_of(case, tokens)
    inputs = PolicyInputs(case, tokens, tokens.valid, logprobs)
    leaf = token_tensor(case, tokens, logprobs, case.dtype).to(device)
    leaf.requires_grad_(case.mode == "grad")
    arguments = inputs.arguments()
    if entropy is not None:
        given = token_tensor(case, tokens, entropy, case.token_dtype)
        arguments["entropy"] = given.to(device).requires_grad_(case.mode == "grad")
    arguments = moved(arguments, device)
    result = fastrl.policy_loss(
        leaf,
        inputs.advantages_tensor().to(device),
        mask_tensor(case, tokens).to(device),
        backend=backend,
        **arguments,
    )
    got = loss_parts(result)
    valid = tokens.valid
    of_valid = None if entropy is None else Bounded(entropy[valid], 0.0, arithmetic)
    loss = inputs.expected(Bounded(logprobs[valid], 0.0, arithmetic), of_valid, arithmetic, doubts)
    want = expected_parts(loss, arithmetic)
    if case.mode == "grad":
        result.loss.backward(upstream(case, result.loss).to(device))
        by = upstream_factor(case, arithmetic)
        got["grad logprobs"] = part(leaf.grad)
        slope = scaled(loss.slope, by, loss.slope.value == 0)
        waited_for = UPSTREAM[case.upstream]
        want["grad logprobs"] = Part(placed(slope, valid, tokens.shape), case.dtype, waited_for)
        if inputs.fields["entropy_coef"]:
            got["grad entropy"] = part(arguments["entropy"].grad)
            slope = scaled(loss.entropy_slope, by, loss.entropy_slope.value == 0)
            full = placed(slope, valid, tokens.shape)
            want["grad entropy"] = Part(full, case.token_dtype, waited_for)
    return got, want


def moved(arguments: dict[str, Any], device: str) -> dict[str, Any]:
    return {
        name: value.to(device).detach().requires_grad_(value.requires_grad)
        if isinstance(value, Tensor)
        else value
        for name, value in arguments.items()
    }


def examined_logits(case: Case, backend: str, device: str, doubts: Doubts) -> tuple[dict, dict]:
    """Examine `logits_policy_loss`."""
    rows = rows_of(case)
    tokens, active = rows.tokens, rows.active
    logits = logits_of(case, tokens, rows.ids)
    oracle = Rows(logits[active], rows.ids[active], rows.head, rows.arithmetic)
    logprobs = np.zeros(tokens.total)
    logprobs[active] = oracle.logprobs.value
    inputs = PolicyInputs(case, tokens, active, logprobs)
    given = logits_tensor(rows, logits).to(device)
    leaf = given.requires_grad_(case.mode == "grad")
    arguments = moved({**inputs.arguments(), **token_options(rows)}, device)
    if case.inplace:
        arguments["inplace"] = True
        given = given * 1  # no leaf
    with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
        result = fastrl.logits_policy_loss(
            given,
            ids_tensor(rows).to(device),
            inputs.advantages_tensor().to(device),
            mask_tensor(case, tokens).to(device),
            backend=backend,
            **arguments,
        )
    got = loss_parts(result)
    doubts.add("unsaid: a row without distribution", oracle.undefined)
    loss = inputs.expected(oracle.logprobs, oracle.entropy, rows.arithmetic, doubts)
    want = expected_parts(loss, rows.arithmetic)
    if case.mode == "grad":
        result.loss.backward(upstream(case, result.loss).to(device))
        by = upstream_factor(case, rows.arithmetic)
        nothing = Bounded(np.zeros(int(active.sum())), 0.0, rows.arithmetic)
        slope = scaled(loss.slope, by, loss.slope.value == 0)
        entropy_slope = scaled(loss.entropy_slope, by, loss.entropy_slope.value == 0)
        gradient = oracle.gradient(slope, entropy_slope, nothing)
        got["grad logits"] = part(leaf.grad)
        # a gradient in float16 would underflow: it is made when it is asked for
        waited_for = UPSTREAM[case.upstream]
        if case.dtype == "float16" and not np.isnan(waited_for):
            waited_for = None
        want["grad logits"] = Part(rows.placed(gradient), case.dtype, waited_for)
    return got, want

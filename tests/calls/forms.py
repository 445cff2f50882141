"""Rows as logits, and as hidden states with an LM head: tensors, logits, and gradients of these."""

import dataclasses
import functools
from typing import Any

import numpy as np
from torch import Tensor

from .call import Place
from .case import Case
from .oracle.bounded import Bounded, Doubts, of_results, where
from .oracle.head import ON_TILES, Entering, LinearHead, on_tensor_cores
from .oracle.rows import Rows
from .oracle.terms import zeros
from .rows_data import LogitRows, logits_of, lowest_of, rows_of, wide_tensor
from .tokens import as_held, flat_tensor, laid_out


def multiplied(
    case: Case, place: Place, hidden: np.ndarray, weight: np.ndarray, *dtypes: str
) -> tuple[np.ndarray, np.ndarray, Entering]:
    """Return what a GEMM multiplies, and what its products round.

    Products on a GPU are in the dtype of autocast, or in that of both operands if it has 16 bits.
    """
    on_gpu = place.device.startswith("cuda") and place.on_gpu_kernels
    alike = dtypes[0] if len({*dtypes}) == 1 and dtypes[0] in ("bfloat16", "float16") else None
    operand = case.autocast or alike
    if not on_gpu or operand is None or "float64" in dtypes:
        return hidden, weight, ON_TILES if alike == "bfloat16" else Entering()
    if case.kept is not None and case.autocast is not None:
        return hidden, weight, on_tensor_cores(operand, perhaps=True)
    return as_held(hidden, operand), as_held(weight, operand), on_tensor_cores(operand)


class OfLogits:
    """Rows of logits `[N, V]`."""

    x_error: object = 0.0

    def __init__(self, case: Case, place: Place, doubts: Doubts) -> None:
        self.case, self.place, self.doubts, self.rows = case, place, doubts, rows_of(case)
        self.logits, tensor = logits_of(self.rows)
        self.tensors: dict[str, Any] = {"logits": tensor}
        self.leaves: tuple[str, ...] = ("logits",)

    @functools.cached_property
    def oracle(self) -> Rows:
        """The active rows."""
        rows, arithmetic = self.rows, of_results(self.case.dtype)
        x, ids = rows.kept(self.logits[rows.active]), rows.ids[rows.active]
        return self._noted(Rows(x, ids, rows.head(self.place), arithmetic))

    def _noted(self, oracle: Rows) -> Rows:
        self.doubts.add("unspecified: a row without distribution", oracle.undefined)
        return oracle

    def options(self, inplace: str) -> dict[str, Any]:
        """Return options of the form; `inplace` is the name of the one for work in place."""
        return {inplace: True} if self.case.inplace else {}

    def through(self, dx: Bounded, idle: np.ndarray, factor: float = 1.0) -> dict[str, Bounded]:
        """Return the gradients of the leaves, of dL/dx of the active rows.

        `idle` are rows without an upstream gradient, `factor` multiplies gradients once made.
        """
        return {"logits": self.rows.tokens.placed(dx, self.rows.active)}


class OfHidden(OfLogits):
    """Hidden states and an LM head."""

    def __init__(self, case: Case, place: Place, doubts: Doubts) -> None:
        self.case, self.place, self.doubts, self.rows = case, place, doubts, rows_of(case)
        self.numbers = numbers_of(case, self.rows)
        self.tensors: dict[str, Tensor] = {
            "hidden": wide_tensor(self.rows, self.numbers["hidden"][0])
        }
        for name, (values, dtype) in list(self.numbers.items())[1:]:
            layout = case.token_layout if name == "weight" else "contiguous"
            self.tensors[name] = laid_out(flat_tensor(case, values, dtype), layout)
        self.leaves = tuple(name for name in self.tensors if name not in case.frozen)

    @functools.cached_property
    def head(self) -> LinearHead:
        case, held = self.case, {name: values for name, (values, _) in self.numbers.items()}
        weight_dtype = self.numbers["weight"][1]
        dtypes, hidden = (case.dtype, weight_dtype), held["hidden"][self.rows.active]
        hidden, weight, entering = multiplied(case, self.place, hidden, held["weight"], *dtypes)
        return LinearHead(
            hidden,
            weight,
            held.get("bias"),
            (held["lora_a"], held["lora_b"], float(case.lora_scale)) if case.lora else None,
            of_results(*dtypes),
            entering,
        )

    @functools.cached_property
    def oracle(self) -> Rows:
        rows = self.rows
        x, error = self.head.logits()
        x, self.x_error = rows.kept(x), rows.kept(np.broadcast_to(error, x.shape), 0.0)
        ids, head = rows.ids[rows.active], rows.head(self.place)
        return self._noted(Rows(x, ids, head, self.head.arithmetic, self.x_error))

    @functools.cached_property
    def logits(self) -> np.ndarray:
        made = np.zeros((self.rows.tokens.total, self.case.vocabulary))
        made[self.rows.active] = self.oracle.x
        return made

    def options(self, inplace: str) -> dict[str, Any]:
        names = ("chunk_tokens", "compact")
        return {name: getattr(self.case, name) for name in names if name in self.case.options}

    def through(self, dx: Bounded, idle: np.ndarray, factor: float = 1.0) -> dict[str, Bounded]:
        # of a row that has no upstream gradient there is none, whatever the row holds: it is left
        # out
        if not self.case.compact:
            idle = idle & np.isfinite(self.head.hidden).all(1)
        dx = where(idle[:, None], zeros(dx), dx)
        anything = np.isinf(dx.error).any(1, keepdims=True)
        hidden = np.where(anything & ~np.isfinite(self.head.hidden), 0.0, self.head.hidden)
        found = dataclasses.replace(self.head, hidden=hidden, factor=factor).gradients(dx)
        found["hidden"] = self.rows.tokens.placed(found["hidden"], self.rows.active)
        return {name: found[name] for name in self.leaves}


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


def form_of(case: Case, place: Place, doubts: Doubts) -> OfLogits:
    """Return the form that the function of a case takes."""
    return (OfHidden if case.function.startswith("linear") else OfLogits)(case, place, doubts)


def joined_lora(case: Case, given: dict[str, Any]) -> dict[str, Any]:
    """Return arguments with both factors of an adapter and its scale in one."""
    if "lora_a" not in given:
        return given
    others = {name: x for name, x in given.items() if name not in ("lora_a", "lora_b")}
    return {**others, "lora": (given["lora_a"], given["lora_b"], case.lora_scale)}

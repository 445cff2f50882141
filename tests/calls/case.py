"""A case: a function and plain values that describe a call of it.

`repr` omits options with their simplest value, and is the line to paste:

    python -m tests.fuzz "Case('token_stats', vocabulary=4097, features=('inf-block',))"
"""

from __future__ import annotations

import ast
import inspect
import zlib
from typing import Any

import numpy as np

import fastrl

_CALLED = {name: getattr(fastrl, name) for name in fastrl.__all__}
#: What each function takes.
SIGNATURES = {
    name: inspect.signature(call).parameters
    for name, call in _CALLED.items()
    if inspect.isfunction(call)
}
LOSSES = ("policy_loss", "logits_policy_loss", "linear_policy_loss")
WITH_OBJECTIVE = (*LOSSES, "clipped_tokens")
WITH_LOGITS, LINEAR = (
    tuple(name for name, taken in SIGNATURES.items() if argument in taken)
    for argument in ("logits", "hidden")
)
DIVERGENCES = ("token_divergence", "linear_divergence")
#: Functions that have no compiled backend.
IN_TORCH = ("value_loss", "kl_divergence", "token_weights", "whiten", "masked_mean")
IN_TORCH += ("clipped_tokens",)

#: The options of a case, with the simplest value of each.
SIMPLEST: dict[str, Any] = {
    "seed": 0,
    "mode": "grad",  # or no-grad, inference
    "threads": 1,
    "twice": False,  # whether the backward runs twice
    "constants": "usual",  # or of-inference: made in inference mode
    "wrong": None,  # or a name in `refusals.WRONG`: what is illegal about the call
    # tokens
    "sequences": 1,
    "tokens": 1,  # per sequence; of packed sequences the longest
    "layout": "padded",  # or packed (one sequence), cut (by cu_seqlens), 0-d, 3-d
    "bounds_dtype": "int32",  # of cu_seqlens
    "mask": "all",
    "mask_dtype": "bool",
    "masked_values": "usual",
    "token_layout": "contiguous",
    "dtype": "float32",
    "token_dtype": "float32",  # of advantages, old log-probabilities and so on
    "features": (),
    # rows of logits
    "vocabulary": 2,
    "spread": 1.0,
    "logits_layout": "contiguous",
    "ids_dtype": "int64",
    "temperature": 1.0,  # a float, or 0-d, per-token, per-sequence, per-sequence-column
    "temperature_dtype": "float32",  # of a tensor
    "logit_scale": 1.0,
    "logit_softcap": None,
    "ignore_index": -100,
    "outputs": ("logprobs",),
    "upstream": "ones",
    "kept": None,  # or how many tokens of the vocabulary a row has kept: one, few, ragged, all
    "inplace": False,
    "autocast": None,  # or the dtype of it
    # a teacher
    "beta": 1.0,
    # its logits are near the student's, the same, or of hidden states; or K tokens are known
    "teacher": "own",
    "teacher_dtype": "like",
    "teacher_temperature": 1.0,  # a float, or per-token
    "teacher_softcap": None,
    # linear forms
    "hidden": 1,
    "weight_dtype": "like",
    "bias": False,
    "lora": 0,
    "lora_dtype": "like",  # the weight
    "lora_scale": 1,
    "chunk_tokens": None,
    "compact": True,
    "metrics": True,
    "frozen": (),
    # the policy loss
    "objective": "ppo",
    "convention": "fastrl",
    "fields": {},
    "old": None,  # None or how the old log-probabilities are drawn
    "ref": None,
    "rollout": None,
    "entropy": False,
    "advantages": "token",
    "policy_weights": None,
    "values": "grid",
    "normalizer": None,
    "groups": None,
    "groups_dtype": "int64",  # of the ids of sequences
    "sampler": None,  # or how the sampler's distribution is drawn: score centering
    "sampler_dtype": "float32",
    # values, advantages, means
    "second_dtype": "like",  # of the values of gae, the returns of value_loss
    "third_dtype": "like",  # of bootstrap and old values
    "parameters": {},
}


class Case:
    """A function and options; one that is not given has its simplest value."""

    def __init__(self, function: str, **options: Any) -> None:
        unknown = set(options) - set(SIMPLEST)
        if unknown:
            raise TypeError(f"a case has no {', '.join(sorted(unknown))}")
        self.function = function
        self.options = {name: value for name, value in options.items() if value != SIMPLEST[name]}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in SIMPLEST:
            raise AttributeError(name)
        return self.options.get(name, SIMPLEST[name])

    def __repr__(self) -> str:
        given = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"Case({self.function!r}{given})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Case) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    @property
    def dtypes(self) -> tuple[str, str, str]:
        """The options for dtypes, which may differ between arguments."""
        others = (self.second_dtype, self.third_dtype)
        return self.dtype, *(self.dtype if name == "like" else name for name in others)

    def changed(self, **options: Any) -> Case:
        return Case(self.function, **{**self.options, **options})

    def has(self, feature: str) -> bool:
        return feature in self.features

    def random(self, what: str) -> np.random.Generator:
        """Return the random numbers of one part, which do not change with the other parts."""
        return np.random.default_rng([self.seed, zlib.crc32(what.encode())])


def parse(line: str) -> Case:
    """Return the case of a pasted line; only literals are evaluated."""
    call = _Numbers().visit(ast.parse(line.strip(), mode="eval")).body
    if not isinstance(call, ast.Call) or getattr(call.func, "id", None) != "Case":
        raise ValueError(f"a line like Case('gae', tokens=3) is expected, got {line!r}")
    options = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    return Case(*map(ast.literal_eval, call.args), **options)


class _Numbers(ast.NodeTransformer):
    """inf and nan, whose repr is a name, as numbers."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(float(node.id)) if node.id in ("inf", "nan") else node

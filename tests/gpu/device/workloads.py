"""Calls of cases on any device, to be made again and again; whether they are right says `examine`.

works = [of_case(case, device) for case in small()]
results = works[0].run(backend)
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import fastrl
from tests.calls.call import Call, Place
from tests.calls.case import Case
from tests.calls.examine import FUNCTIONS, examine
from tests.calls.trial import Trial


@dataclasses.dataclass
class Workload:
    """A call; gradients are those of the sum of all results along the leaves.

    Attributes:
        call: what a case calls.
        given: its arguments by name, on the device.
    """

    call: Call
    given: dict[str, Any]

    def run(self, backend: str, *, compiled: Callable[..., Any] | None = None) -> list[Tensor]:
        """Return all results and the gradients; the inputs stay as they are."""
        case, leaves = self.call.case, self.call.leaves if self.call.differentiable else ()
        new = {name: self.given[name].detach().requires_grad_() for name in leaves}
        # what is given away is no leaf
        passed = {name: x * 1 for name, x in new.items()} if case.inplace else new
        function = compiled or getattr(fastrl, self.call.function)
        with self.autocast():
            result = function(**self.call.arguments({**self.given, **passed}), backend=backend)
        found = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        total = [x.float().sum() for x in found if x.requires_grad]
        gradients = torch.autograd.grad(sum(total), [*new.values()]) if total else ()
        return [*(x.detach() for x in found), *gradients]

    def autocast(self) -> torch.autocast:
        dtype, device = self.call.case.autocast, self.tensors()[0].device.type
        return torch.autocast(device, dtype and getattr(torch, dtype), enabled=dtype is not None)

    def tensors(self) -> list[Tensor]:
        """Return the tensors among the arguments."""
        return [x for x in tree_leaves(self.given) if isinstance(x, Tensor)]


def of_case(case: Case, device: str) -> Workload:
    """Return the call that a case makes."""
    place = Place("reference", device)
    call = FUNCTIONS[case.function].call(case, place)
    return Workload(call, Trial(case, place).moved(call.given))


def assert_right(case: Case, backend: str, device: str) -> None:
    """Compare a case with the oracle."""
    found = examine(case, backend, device)
    assert not found.refused, case
    assert not found.differences, f"{case}: {'; '.join(map(str, found.differences))}"


TOKENS = {"mask": "ragged", "masked_values": "1e30"}  # NaN would not be equal to itself
KL = {"kl_coef": 0.1, "entropy_coef": 0.02}
LOSS = {**TOKENS, "old": "near", "ref": "near", "fields": KL}
OBJECTIVES = ("ppo", "grpo", "gspo", "gmpo", "cispo", "sapo", "reinforce")
ENDS = {"terminated": 1e-3, "truncated": 1e-3}


def of_tokens(sequences: int, tokens: int, **more: Any) -> Iterator[Case]:
    """All calls on log-probabilities, rewards or values."""
    size = {"sequences": sequences, "tokens": tokens, **more}
    for layout in ("padded", "cut"):
        for name in OBJECTIVES:
            own = {"objective": name, "entropy": True, "layout": layout}
            yield Case("policy_loss", **size, **LOSS, **own)
        for bootstrap in ({}, {"bootstrap": "sequence"}, {**ENDS, "bootstrap": "token"}):
            parameters = {"gamma": 0.999, "lam": 0.97, **bootstrap}
            yield Case("gae", **size, **TOKENS, layout=layout, parameters=parameters)
    for groups in (None, "ids"):
        for scale in ("group", "batch", "none"):
            own = {"scale": scale, "singleton": "zero"}
            yield Case("group_advantages", **size, groups=groups, parameters=own)


def of_logits(sequences: int, tokens: int, vocabulary: int, **more: Any) -> Iterator[Case]:
    """All calls on logits."""
    size = {"sequences": sequences, "tokens": tokens, "vocabulary": vocabulary, "spread": 3.0}
    size |= {"logits_layout": "sliced", "temperature": 0.7, **more}
    outputs = ("logprobs", "entropy", "logsumexp")
    yield Case("token_stats", **size, **TOKENS, outputs=outputs)
    yield Case("token_stats", **size, **TOKENS, outputs=outputs, logit_softcap=10.0)
    for name in OBJECTIVES:
        yield Case("logits_policy_loss", **size, **LOSS, objective=name)
    yield Case("logits_policy_loss", **size, **LOSS, inplace=True)


#: Dtypes of hidden states and weight, and of autocast.
PRECISIONS = {
    "bf16": {"dtype": "bfloat16"},
    "fp16": {"dtype": "float16"},
    "fp32": {},
    "bf16 states, fp32 weights": {"dtype": "bfloat16", "weight_dtype": "float32"},
    "fp32 under bf16": {"autocast": "bfloat16"},
    "fp32 weights under bf16": {
        "dtype": "bfloat16",
        "weight_dtype": "float32",
        "autocast": "bfloat16",
    },
    "fp32 under fp16": {"autocast": "float16"},
    "fp32 weights under fp16": {
        "dtype": "float16",
        "weight_dtype": "float32",
        "autocast": "float16",
    },
}
OF_HIDDEN = {**TOKENS, "sequences": 4, "tokens": 50, "hidden": 128, "vocabulary": 4096}


def of_hidden(precision: str, **more: Any) -> list[Case]:
    """Both calls on hidden states, in chunks."""
    options = {**OF_HIDDEN, "mask": "holes", **PRECISIONS[precision], "chunk_tokens": 70, **more}
    outputs = ("logprobs", "entropy")
    loss = {"old": "near", "ref": "near", "fields": KL}
    return [
        Case("linear_policy_loss", **options, **loss),
        Case("linear_token_stats", **options, outputs=outputs),
    ]


def small() -> list[Case]:
    """A few calls of each kind."""
    return [*of_tokens(3, 17), *of_logits(2, 3, 1001)]


@contextlib.contextmanager
def made_by(name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Let cases of a function call what `wrap` makes of it."""
    own = getattr(fastrl, name)
    setattr(fastrl, name, wrap(own))
    try:
        yield
    finally:
        setattr(fastrl, name, own)


def assert_right_compiled(case: Case, backend: str, device: str, options: dict[str, Any]) -> None:
    """Compare a compiled call on several inputs with the oracle: eagerly, recorded, replayed."""
    torch._dynamo.reset()
    with (
        made_by(case.function, lambda own: torch.compile(own, **options)),
        torch._dynamo.config.patch(error_on_recompile=True),
    ):
        for seed in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            assert_right(case.changed(seed=seed), backend, device)

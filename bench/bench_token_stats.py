"""Log-probability of one token per row of logits, forward only."""

from __future__ import annotations

from collections.abc import Callable

import torch
from logits import eager_logprobs, logprob_error, make_inputs, torch_forms
from shapes import LOGITS, Logits
from timing import Case, Inputs, Provider, pedantic

import fastrl


def cases(selection: str) -> list[Case]:
    dtypes = (torch.float32, torch.bfloat16)
    return [_case(shape, dtype) for shape in LOGITS[selection] for dtype in dtypes]


def _case(shape: Logits, dtype: torch.dtype) -> Case:
    logits = torch.empty(shape.sequences, shape.tokens, shape.vocab, dtype=dtype)
    return Case(
        op="token_stats",
        work="log-probability, forward",
        shape=f"{shape.sequences * shape.tokens} x {shape.vocab}",
        dtype=dtype,
        bytes_moved=logits.nbytes,
        inputs=lambda seed: make_inputs(shape, dtype, seed),
        providers=[
            _fastrl("cpu"),
            _fastrl("reference"),
            *(_torch(*form) for form in torch_forms(eager_logprobs, dtype)),
            Provider("copy", "floor", lambda inputs: logits.copy_(inputs["logits"])),
        ],
        error=logprob_error,
    )


def _fastrl(backend: str) -> Provider:
    def run(inputs: Inputs) -> torch.Tensor:
        return fastrl.token_logprobs(inputs["logits"], inputs["token_ids"], backend=backend)

    return Provider(f"fastrl {backend}", f"fastrl {backend}", run)


def _torch(name: str, kind: str, function: Callable[..., torch.Tensor]) -> Provider:
    return Provider(name, kind, lambda inputs: function(inputs["logits"], inputs["token_ids"]))


def test_token_stats(benchmark, case, provider):
    pedantic(benchmark, case, provider)

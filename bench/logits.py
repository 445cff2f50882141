"""Realistic logits, and log-probability and GRPO loss from them as trainers compute it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from shapes import Logits
from timing import Inputs

STD = 3.0
ROWS_AT_ONCE = 16  # rows that float64 is computed for at a time, to hold little memory


def make_inputs(shape: Logits, dtype: torch.dtype, seed: int) -> Inputs:
    """Normal logits with one raised target per row; its probability ranges from 0.01 to 0.99."""
    generator = torch.Generator().manual_seed(seed)
    rows = (shape.sequences, shape.tokens)
    logits = torch.empty(*rows, shape.vocab, dtype=dtype).normal_(0, STD, generator=generator)
    token_ids = torch.randint(shape.vocab, rows, generator=generator)
    raised = raised_logits(shape.vocab, rows, generator)
    logits.scatter_(-1, token_ids[..., None], raised[..., None].to(dtype))
    inputs = {"logits": logits, "token_ids": token_ids}
    return inputs | sampled(exact_logprobs(inputs), generator)


def raised_logits(vocab: int, rows: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """Logits whose token has a log-odds between -4.6 and 4.6 among normal ones."""
    log_odds = (torch.rand(rows, generator=generator) * 2 - 1) * 4.6
    return math.log(vocab) + STD**2 / 2 + log_odds


def sampled(logprobs: torch.Tensor, generator: torch.Generator) -> Inputs:
    """What comes with a rollout: advantages, a mask, slightly older log-probabilities."""
    return {
        "advantages": torch.randn(logprobs.shape[0], 1, generator=generator),
        "mask": torch.ones_like(logprobs, dtype=torch.bool),  # nothing that could be left out
        "old_logprobs": logprobs.float() + 0.1 * torch.randn(logprobs.shape, generator=generator),
    }


def eager_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, token_ids[..., None]).squeeze(-1)


def eager_loss_sum(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    advantages: torch.Tensor,
    old_logprobs: torch.Tensor,
    mask: torch.Tensor,
) -> torch.Tensor:
    """The clipped loss summed over tokens, from logits, as trainers write it."""
    ratio = (eager_logprobs(logits, token_ids) - old_logprobs).exp()
    bounded = ratio.clamp(0.8, 1.2)
    return -(torch.minimum(ratio * advantages, bounded * advantages) * mask).sum()


def torch_forms(
    function: Callable[..., torch.Tensor], dtype: torch.dtype
) -> Iterator[tuple[str, str, Callable[..., torch.Tensor]]]:
    """Name, kind, function: eager and compiled; 16-bit logits as they are and cast to float32."""

    def upcast(logits: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return function(logits.float(), *rest)

    narrow = str(dtype).removeprefix("torch.")
    forms = {f" in {narrow}": function, " in float32": upcast}
    if dtype == torch.float32:
        forms = {"": function}
    for name, form in forms.items():
        yield f"eager{name}", "eager", form
        yield f"torch.compile{name}", "compile", torch.compile(form)


def exact_logprobs(inputs: Inputs) -> torch.Tensor:
    rows = zip(_in_rows(inputs["logits"]), _in_rows(inputs["token_ids"]), strict=True)
    exact = [eager_logprobs(logits.double(), token_ids) for logits, token_ids in rows]
    return torch.cat(exact).view(inputs["token_ids"].shape)


def logprob_error(answer: torch.Tensor, inputs: Inputs) -> float:
    """Largest error relative to the log-probability's size, or to 1 where that is larger."""
    exact = exact_logprobs(inputs)
    return float(((answer.double() - exact).abs() / exact.abs().clamp(min=1)).max())


def gradient_error(answer: torch.Tensor, inputs: Inputs) -> float:
    """Largest error of the token-mean loss's gradient, relative to its largest element."""
    shape = inputs["token_ids"].shape
    names = ("token_ids", "advantages", "old_logprobs", "mask")
    per_token = [_in_rows(inputs[name].expand(shape)) for name in names]
    tokens = inputs["mask"].sum()
    worst = largest = 0.0
    for logits, gradient, *rest in zip(
        _in_rows(inputs["logits"]), _in_rows(answer), *per_token, strict=True
    ):
        leaf = logits.double().requires_grad_()
        (exact,) = torch.autograd.grad(eager_loss_sum(leaf, *rest) / tokens, leaf)
        worst = max(worst, float((gradient - exact).abs().max()))
        largest = max(largest, float(exact.abs().max()))
    return worst / largest


def _in_rows(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.flatten(0, 1).split(ROWS_AT_ONCE)

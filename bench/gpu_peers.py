"""Other libraries that do the same work, each called as its documentation says.

One that is not installed, or whose call raises, is a row with that reason.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
from timing import Inputs, Provider

#: What pip calls those that take part.
DISTRIBUTIONS = ("trl", "liger-kernel", "torchrl", "cut-cross-entropy", "verl")
Logprobs = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class AbsentError(ImportError):
    """A peer is not installed."""


def peer(
    name: str,
    module: str,
    run: Callable[[Inputs], Any],
    prepare: Callable[[Inputs], Inputs] | None = None,
) -> Provider:
    """Return a provider whose module may be missing."""

    def checked(inputs: Inputs) -> Any:
        if importlib.util.find_spec(module) is None:
            raise AbsentError(f"{module} is not installed")
        return run(inputs)

    if prepare is None:
        return Provider(name, "peer", checked)

    def prepared(inputs: Inputs) -> Inputs:
        return prepare(inputs) if importlib.util.find_spec(module) else inputs

    return Provider(name, "peer", checked, prepared)


def trl_stats(
    logits: torch.Tensor, token_ids: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies from TRL's Triton kernel, with its backward."""
    from trl.kernels.logprob_entropy import selective_log_softmax_and_entropy

    return selective_log_softmax_and_entropy(logits, token_ids, 1.0, mask)


def liger_inputs(inputs: Inputs) -> Inputs:
    """Liger takes one more position and ignores its logits; it writes the gradient over them."""
    return {**inputs, "logits": torch.nn.functional.pad(inputs["logits"], (0, 0, 0, 1))}


def liger_loss_gradient(inputs: Inputs) -> torch.Tensor:
    """The gradient of the token mean of Liger's losses, which come one per token."""
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    logits, mask = inputs["logits"].requires_grad_(), inputs["mask"]
    losses = triton_grpo_loss(
        logits, inputs["old_logprobs"], None, inputs["token_ids"], inputs["advantages"][:, 0],
        mask.int(), temperature=1.0, beta=0.0, eps_low=0.2, eps_high=0.2, inplace=True,
    )  # fmt: skip
    ((losses[0] * mask).sum() / mask.sum()).backward()
    return logits.grad[:, :-1]


def liger_linear_loss(hidden, weight, token_ids, advantages, old_logprobs, mask) -> torch.Tensor:
    """Liger's chunked GRPO from hidden states; `bnpo` is the mean over the batch's tokens."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(
        beta=0.0, use_ref_model=False, epsilon_low=0.2, epsilon_high=0.2, loss_type="bnpo"
    )
    found = loss(
        hidden, weight, token_ids, mask.int(), advantages[:, 0], old_per_token_logps=old_logprobs
    )
    return found[0]


def linear_logprob_peers() -> Iterator[tuple[str, str, Logprobs]]:
    """Yield name, module and a function from hidden `[N, H]`, weight and ids to logprobs `[N]`."""
    yield "TRL chunked", "trl", _trl_chunked
    yield "cut-cross-entropy", "cut_cross_entropy", _cut_cross_entropy
    yield "verl linear_cross_entropy", "verl", _verl
    yield "torch linear_cross_entropy", "torch", _torch


def _trl_chunked(hidden, weight, token_ids):
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    tile = 32768  # TRL's default
    return ChunkedLogProbFunction.apply(hidden, weight, None, token_ids, 1.0, tile, None, 1.0, ())[
        0
    ]


def _cut_cross_entropy(hidden, weight, token_ids):
    from cut_cross_entropy import linear_cross_entropy

    return -linear_cross_entropy(hidden, weight, token_ids, reduction="none")


def _verl(hidden, weight, token_ids):
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    # temperature and reduction; versions before 0.5 take the reduction alone
    return linear_cross_entropy(hidden, weight, token_ids, 1.0, "none")[0]


def _torch(hidden, weight, token_ids):
    if not hasattr(torch.nn.functional, "linear_cross_entropy"):
        raise AbsentError(f"torch {torch.__version__} has no linear_cross_entropy")
    options = torch.nn.LinearCrossEntropyOptions()
    return -torch.nn.functional.linear_cross_entropy(
        hidden, weight, token_ids, reduction="none", options=options
    )

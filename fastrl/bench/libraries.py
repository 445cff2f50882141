"""What other libraries have of the operators, called as their documentation says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastrl.bench.case import Inputs
from fastrl.bench.error import clipped, masked_mean
from fastrl.bench.peers import Peer, imported

_TILE = 32768  # TRL's default
_DIVERGENCE = ("hidden", "weight", "teacher_hidden", "teacher_weight", "mask", "token_ids")


def _ids(f: Any, x: Inputs) -> Any:
    return f(x["logits"], x["token_ids"])


def _linear(call: Callable[[Any, Tensor, Tensor, Tensor], Any]) -> Callable[[Any, Inputs], Any]:
    """Return a call that takes hidden states, head and ids without the axis of sequences."""
    return lambda f, x: call(f, x["hidden"].flatten(0, 1), x["weight"], x["token_ids"].flatten())


def _of_torch(function: Any, x: Tensor, head: Tensor, ids: Tensor) -> Any:
    options = imported("torch", "torch.nn:LinearCrossEntropyOptions")()
    return -function(x, head, ids, reduction="none", options=options)


#: Log-probabilities of ids.
LOGITS = (
    Peer("trl", "trl.trainer.utils:selective_log_softmax", _ids),
    Peer("verl", "verl.utils.torch_functional:logprobs_from_logits",
         lambda f, x: f(x["logits"], x["token_ids"], inplace_backward=False)),
    Peer("unsloth", "unsloth_zoo.rl_replacements:chunked_selective_log_softmax", _ids),
    Peer("quack", "quack.cross_entropy:cross_entropy",
         lambda f, x: -f(x["logits"].flatten(0, -2), x["token_ids"].flatten(), reduction="none"),
         on_gpu=True),
)  # fmt: skip
LINEAR = (
    Peer("trl", "trl.kernels.chunked_logprob:ChunkedLogProbFunction",
         _linear(lambda f, *x: f.apply(x[0], x[1], None, x[2], 1.0, _TILE, None, 1.0, ())[0])),
    Peer("unsloth", "unsloth_zoo.rl_replacements:grpo_chunked_hidden_states_logprobs",
         _linear(lambda f, x, head, ids: f(x[None], head, ids[None]))),
    Peer("cut-cross-entropy", "cut_cross_entropy:linear_cross_entropy",
         _linear(lambda f, x, head, ids: -f(x, head, ids, reduction="none")), on_gpu=True),
    Peer("quack", "quack.linear_cross_entropy:linear_cross_entropy_func",
         _linear(lambda f, x, head, ids: -f(x, head, None, ids, reduction="none")), on_gpu=True),
    Peer("verl", "verl.utils.kernel.linear_cross_entropy:linear_cross_entropy",
         _linear(lambda f, x, head, ids: f(x, head, ids, 1.0, "none")[0]), on_gpu=True),
    Peer("torch", "torch.nn.functional:linear_cross_entropy", _linear(_of_torch)),  # from 2.13
)  # fmt: skip


def _loss_of(one: Peer) -> Peer:
    def call(function: Any, inputs: Inputs) -> Tensor:
        logprobs = one.call(function, inputs).view(inputs["token_ids"].shape)
        return masked_mean(clipped(logprobs, inputs), inputs)

    return one._replace(call=call)


def _padded(inputs: Inputs) -> Inputs:
    """Append the position that Liger takes and ignores."""
    return {**inputs, "logits": torch.nn.functional.pad(inputs["logits"], (0, 0, 0, 1))}


def _liger(function: Any, inputs: Inputs) -> Tensor:
    losses = function(
        inputs["logits"], inputs["old_logprobs"], None, inputs["token_ids"],
        inputs["sequence_advantages"], inputs["mask"].int(), temperature=1.0, beta=0.0,
        eps_low=0.2, eps_high=0.2, inplace=True,
    )  # fmt: skip
    return masked_mean(losses[0], inputs)


def _liger_gradient(loss: Tensor, inputs: Inputs) -> tuple[Tensor, ...]:
    return (torch.autograd.grad(loss, inputs["logits"])[0][:, :-1],)


def _liger_linear(kind: Any, inputs: Inputs) -> Any:
    loss = kind(beta=0.0, use_ref_model=False, loss_type="bnpo")  # the mean over all tokens
    names = ("hidden", "weight", "token_ids", "mask", "sequence_advantages")
    hidden, weight, ids, mask, advantages = (inputs[name] for name in names)
    old = inputs["old_logprobs"]
    return loss(hidden, weight, ids, mask.int(), advantages, old_per_token_logps=old)[0]


STATS = (Peer("trl", "trl.trainer.utils:selective_log_softmax_and_entropy", _ids),)
#: Liger writes the gradient over the logits.
LIGER = Peer(
    "liger", "liger_kernel.transformers.grpo_loss:triton_grpo_loss", _liger, on_gpu=True,
    suffix=" in place", backward=_liger_gradient, prepare=_padded,
)  # fmt: skip
LOGITS_LOSS = tuple(map(_loss_of, LOGITS))
LINEAR_LOSS = (
    *map(_loss_of, LINEAR),
    Peer("liger", "liger_kernel.chunked_loss:LigerFusedLinearGRPOLoss", _liger_linear),
)


def divergence(beta: float) -> tuple[Peer, ...]:
    """Return the mean divergence from a teacher, from hidden states and heads."""

    def trl(function: Any, inputs: Inputs) -> Any:
        hidden, weight, states, head, mask, _ = (inputs[name] for name in _DIVERGENCE)
        return function(hidden, states, weight, head, mask, beta)[0]

    def liger(kind: Any, inputs: Inputs) -> Any:
        loss = kind(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=beta)
        hidden, weight, states, head, _, ids = (inputs[name] for name in _DIVERGENCE)
        return loss(hidden.flatten(0, 1), weight, states.flatten(0, 1), head, ids.flatten())

    return (
        Peer("trl", "trl.trainer.distillation_trainer:_chunked_divergence_loss", trl),
        Peer("liger", "liger_kernel.chunked_loss:LigerFusedLinearJSDLoss", liger),
    )


def gae(gamma: float, lam: float) -> tuple[Peer, ...]:
    """Return torchrl's advantages; an episode ends at the last token of the mask."""

    def prepare(inputs: Inputs) -> Inputs:
        mask = inputs["mask"]
        following = torch.nn.functional.pad(mask[:, 1:], (0, 1))
        values = torch.nn.functional.pad(inputs["values"][:, 1:], (0, 1))
        return inputs | {"done": (mask & ~following)[..., None], "next": values[..., None]}

    def call(function: Any, inputs: Inputs) -> Any:
        values, rewards = inputs["values"][..., None], inputs["rewards"][..., None]
        following, done = inputs["next"], inputs["done"]
        found = function(gamma, lam, values, following, rewards, done, done)[0][..., 0]
        return found * inputs["mask"]

    source = "torchrl.objectives.value.functional:vec_generalized_advantage_estimate"
    return (Peer("torchrl", source, call, prepare=prepare),)

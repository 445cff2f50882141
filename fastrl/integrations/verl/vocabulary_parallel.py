"""verl's functions of logits whose vocabulary is split over Megatron's tensor-parallel ranks.

`logits` are this rank's part `[..., V / ranks]`. Token ids and results refer to the whole
vocabulary and are the same on every rank. The group is Megatron's, which verl has set up. Only the
backward of `vocab_parallel_log_probs_from_logits` overwrites logits, and only float32 ones.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

import fastrl
from fastrl.integrations.replacing import named
from fastrl.integrations.verl.logits import may_overwrite, rows, statistic

_MODULE = "verl.utils.megatron.tensor_parallel"


def vocab_parallel_log_probs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Return log softmax(logits)[label], fp32 and in the shape of `labels`, by `token_logprobs`.

    A label of -100 gives 0. Any other label outside the vocabulary is an error, where Megatron
    returns a value.

    The backward writes the gradient over fp32 logits. The forward of Megatron's loss, which verl
    uses, already overwrites them, so nothing else can need them. It copies 16-bit logits.
    """
    part = rows("logits", logits)
    return fastrl.token_logprobs(
        part,
        labels.reshape(part.shape[:-1]),
        inplace_backward=part.dtype == torch.float32 and may_overwrite(part),
        vocab_group=_group(),
    ).reshape(logits.shape[:-1])


def vocab_parallel_entropy(vocab_parallel_logits: Tensor) -> Tensor:
    """Return -sum p log p over the whole vocabulary, fp32, with a gradient, by `token_stats`."""
    return statistic("entropy", "vocab_parallel_logits", vocab_parallel_logits, _group())


def vocab_parallel_entropy_with_chunking(
    vocab_parallel_logits: Tensor, chunk_size: int = 2048
) -> Tensor:
    """Return `vocab_parallel_entropy`, which needs no chunking."""
    del chunk_size
    return vocab_parallel_entropy(vocab_parallel_logits)


def vocab_parallel_sum_pi_squared(vocab_parallel_logits: Tensor) -> Tensor:
    """Return sum p^2 over the whole vocabulary, fp32, without a gradient, by `token_stats`.

    verl only weights baselines with it.
    """
    return statistic("sum_sq_probs", "vocab_parallel_logits", vocab_parallel_logits, _group())


def _group() -> Any:
    return importlib.import_module(_MODULE).mpu.get_tensor_model_parallel_group()


#: verl's module imports Megatron, which only the workers of its Megatron engines need.
REPLACEMENTS = named(
    _MODULE,
    vocab_parallel_log_probs_from_logits,
    vocab_parallel_entropy,
    vocab_parallel_entropy_with_chunking,
    vocab_parallel_sum_pi_squared,
    optional=True,
    when_imported=True,
)

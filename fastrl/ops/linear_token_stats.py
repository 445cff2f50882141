"""Log-probabilities of tokens from hidden states and the LM head, a chunk of logits at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from fastrl.backend import Backend
from fastrl.ops._rows.autograd import differentiable_stats
from fastrl.ops._rows.hidden_inputs import checked_inputs, chunk_options, hidden_inputs
from fastrl.ops._rows.statistics import TokenStats, checked_outputs, requested
from fastrl.ops._vocabulary_parts.agreement import ranks_agree
from fastrl.ops.kept_tokens import KeptTokens
from fastrl.ops.teacher import Teacher

Lora = tuple[Tensor, Tensor, float]


@ranks_agree
def linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    *,
    bias: Tensor | None = None,
    lora: Lora | None = None,
    chunk_tokens: int | None = None,
    compact: bool = True,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    mask: Tensor | None = None,
    ignore_index: int = -100,
    kept: KeptTokens | None = None,
    vocab_group: torch.distributed.ProcessGroup | None = None,
    reduce_hidden_gradient: bool = True,
    backend: Backend = "auto",
) -> Tensor:
    """Return `token_logprobs` of hidden @ weight^T + bias, without storing all logits at once.

    Rows are projected to fp32 logits a chunk at a time, and again in the backward, as in Liger
    (arXiv 2410.10989) and Cut Cross-Entropy (arXiv 2411.09009). The forward takes 2NHV
    floating-point operations, the backward 6NHV, or 4NHV with a frozen head. Masked rows are left
    out of all GEMMs, and rows whose upstream gradient is 0 are left out of the GEMMs in the
    backward.

    On a GPU, two 16-bit operands are multiplied in their dtype on tensor cores, and under autocast
    all operands in its dtype (before sm_80 in fp32). Logits, their statistics and all sums remain
    fp32. The gradient of the logits is rounded to bfloat16 for its GEMMs, and so are fp16 operands
    and LoRA's factors in these GEMMs. The gradient of an fp32 weight remains fp32. On a CPU
    autocast has no effect.

    Args:
        hidden: last hidden states, `[B, T, H]` or packed `[N, H]`.
        weight: the LM head, `[V, H]` like the weight of an `nn.Linear`. An FSDP2 shard is gathered.
            A DTensor that is split over a mesh of the one dimension `tp` is a part of the
            vocabulary, as with `vocab_group`.
        token_ids: integers `[B, T]` or `[N]`: the token that each position predicts. For `hidden`
            of all positions of `ids` pass `hidden[:, :-1]` with `ids[:, 1:]`.
        bias: the bias of the head, `[V]`, or None.
        lora: (A `[r, H]`, B `[V, r]`, scale), added to the head as scale * B A, or None.
        chunk_tokens: the number of rows in a chunk; None chooses it by vocabulary and device. On a
            GPU a chunk's logits and hidden states then take at most 512 MiB, or as much as the
            bfloat16 copy of the weight's gradient, which is made after they are freed.
        compact: skip rows without effect, which on a GPU takes one synchronization.
        temperature: divides logits: a number or a tensor `[]`, `[B]`, `[B, 1]`, `[B, T]`, `[N]`.
        logit_scale: multiplies the logits; above 0 (Cohere, Granite).
        logit_softcap: the c of c * tanh(x / c), which bounds scaled logits x (Gemma 2), or None.
        mask: 0/1, the shape of `token_ids`; masked rows give 0, even if they contain NaN.
        ignore_index: tokens with this id are masked, too.
        kept: the tokens from which each token was sampled, or None; see `KeptTokens`. Only the
            logits of the K kept tokens are computed, from their rows of the weight, with K/V of the
            floating-point operations. A row that kept a large part of the vocabulary (on a GPU with
            16-bit operands V/256 tokens) is projected to all V logits. Rows are processed in the
            order of their K, for which a GPU synchronizes even without `compact`.
        vocab_group: the ranks over which the vocabulary is split, or None. Weight, bias and B are
            then this rank's part, in the order that `token_logprobs` describes; hidden states and A
            are the same on every rank. Two chunks of `chunk_tokens` / 2 rows exist at once: one is
            projected while the ranks exchange five numbers per row of the other. The gradient of A
            is summed over the ranks.
        reduce_hidden_gradient: sum the gradient of the hidden states over `vocab_group`. False
            leaves the sum to the layer that computed them (column-parallel, or a reduce-scatter of
            sequence parallelism).
        backend: `auto`, or the backend for the chunks.

    Returns:
        Log-probabilities in nats, fp32, the shape of `token_ids`. fp32 GEMMs are torch's, which
        round their operands if `torch.set_float32_matmul_precision` is below "highest".

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has the wrong shape or value, ZeRO-3 has partitioned the weight, or
            the backend cannot do the call.

    Examples:
        >>> import torch, fastrl
        >>> hidden, weight = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 0.0], [2.0, 0.0]])
        >>> fastrl.linear_token_logprobs(hidden, weight, torch.tensor([1])).exp()
        tensor([0.8808])
    """
    stats = linear_token_stats(
        hidden,
        weight,
        token_ids,
        outputs=("logprobs",),
        bias=bias,
        lora=lora,
        chunk_tokens=chunk_tokens,
        compact=compact,
        temperature=temperature,
        logit_scale=logit_scale,
        logit_softcap=logit_softcap,
        mask=mask,
        ignore_index=ignore_index,
        kept=kept,
        vocab_group=vocab_group,
        reduce_hidden_gradient=reduce_hidden_gradient,
        backend=backend,
    )
    return cast("Tensor", stats.logprobs)


@ranks_agree
def linear_token_stats(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    *,
    outputs: Sequence[str] = ("logprobs", "entropy"),
    bias: Tensor | None = None,
    lora: Lora | None = None,
    chunk_tokens: int | None = None,
    compact: bool = True,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    mask: Tensor | None = None,
    ignore_index: int = -100,
    kept: KeptTokens | None = None,
    teacher: Teacher | None = None,
    vocab_group: torch.distributed.ProcessGroup | None = None,
    reduce_hidden_gradient: bool = True,
    backend: Backend = "auto",
) -> TokenStats:
    """Return `token_stats` of hidden @ weight^T + bias, without storing all logits at once.

    `token_stats` has the formulas. `linear_token_logprobs` has the costs, the precision and the
    sources (arXiv 2410.10989, arXiv 2411.09009).

    Args:
        hidden: last hidden states, `[B, T, H]` or packed `[N, H]`.
        weight: the LM head, `[V, H]` like the weight of an `nn.Linear`.
        token_ids: integers `[B, T]` or `[N]`: the token that each position predicts. For `hidden`
            of all positions of `ids` pass `hidden[:, :-1]` with `ids[:, 1:]`.
        outputs: the fields of `TokenStats` to return; the others are None.
        bias: the bias of the head, `[V]`, or None.
        lora: (A `[r, H]`, B `[V, r]`, scale), added to the head as scale * B A, or None.
        chunk_tokens: the number of rows in a chunk; None chooses it by vocabulary and device.
        compact: skip rows without effect, which on a GPU takes one synchronization.
        temperature: divides logits: a number or a tensor `[]`, `[B]`, `[B, 1]`, `[B, T]`, `[N]`.
        logit_scale: multiplies the logits; above 0 (Cohere, Granite).
        logit_softcap: the c of c * tanh(x / c), which bounds scaled logits x (Gemma 2), or None.
        mask: 0/1, the shape of `token_ids`; masked rows give 0, even if they contain NaN.
        ignore_index: tokens with this id are masked, too.
        kept: the tokens from which each token was sampled, or None; see `KeptTokens`.
        teacher: the distributions to compare with, or None; see `Teacher`. It is needed for the
            outputs `divergence`, `teacher_entropy` and `agrees`.
        vocab_group: the ranks over which the vocabulary is split, or None. Weight, bias and B are
            then this rank's part; see `linear_token_logprobs`.
        reduce_hidden_gradient: sum the gradient of the hidden states over `vocab_group`. False
            leaves the sum to the layer that computed them.
        backend: `auto`, or the backend for the chunks.

    Returns:
        The statistics in nats, as a `TokenStats`. Each is fp32 (`is_top1` and `agrees` are bool),
        has the shape of `token_ids` and is 0 at masked rows.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has the wrong shape or value, ZeRO-3 has partitioned the weight, or
            the backend cannot do the call.

    Examples:
        >>> import torch, fastrl
        >>> hidden, weight = torch.ones(1, 2), torch.zeros(4, 2)
        >>> stats = fastrl.linear_token_stats(hidden, weight, torch.tensor([1]))
        >>> round(stats.entropy.item(), 4)
        1.3863
    """
    checked_outputs(outputs, teacher)
    checked = checked_inputs(
        hidden,
        weight,
        token_ids,
        bias,
        lora,
        mask,
        temperature,
        logit_scale,
        logit_softcap,
        ignore_index,
        vocab_group,
        reduce_hidden_gradient,
        kept,
        teacher,
    )
    options = chunk_options(chunk_tokens, compact, backend, checked)
    inputs = hidden_inputs(
        checked,
        options,
        vocab_group,
        with_entropy="entropy" in outputs,
        with_sum_sq_probs="sum_sq_probs" in outputs,
    )
    stats, _ = differentiable_stats(inputs, *inputs.source.trainable())
    return requested(stats, outputs, token_ids.shape)

"""Log-probabilities, entropies and other statistics of tokens from logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from fastrl.backend import Backend, resolve
from fastrl.checks import flag
from fastrl.ops._row_checks import as_rows, refuse_unsafe_inplace
from fastrl.ops._rows.given_inputs import parts_of_logits, split_logits, stats_of_logits
from fastrl.ops._rows.statistics import TokenStats as TokenStats
from fastrl.ops._rows.statistics import checked_outputs, requested
from fastrl.ops._vocabulary_parts.agreement import ranks_agree
from fastrl.ops.kept_tokens import KeptTokens, kept_arguments
from fastrl.ops.teacher import (
    Teacher,
    refuse_shared_memory,
    teacher_arguments,
    with_operand_dtype,
)


@ranks_agree
def token_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    mask: Tensor | None = None,
    ignore_index: int = -100,
    inplace_backward: bool = False,
    kept: KeptTokens | None = None,
    vocab_group: torch.distributed.ProcessGroup | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Return the log-probability of each token, computed from logits.

        log p_y = log softmax(z)_y   with   z = softcap(logit_scale * logits) / temperature
        d log p_y / dz_j = [j = y] - p_j

    Replaces TRL's `selective_log_softmax(logits, index)` and verl's
    `logprobs_from_logits(logits, labels)`. The logits are the only tensor of their size that is
    kept for the backward.

    Args:
        logits: `[B, T, V]` or packed `[N, V]`, with any batch strides; fp32, bf16, fp16 (fp64:
            reference).
        token_ids: integers `[B, T]` or `[N]`: the token that each position predicts. For
            `logits = model(ids).logits` pass `logits[:, :-1]` with `ids[:, 1:]`.
        temperature: divides logits: a number or a tensor `[]`, `[B]`, `[B, 1]`, `[B, T]`, `[N]`.
        logit_scale: multiplies the logits; above 0 (Cohere, Granite).
        logit_softcap: the c of c * tanh(x / c), which bounds scaled logits x (Gemma 2), or None.
            Temperature, scale, softcap and their quotients must be in [1e-30, 1e30] (not checked
            for a tensor on a GPU).
        mask: 0/1, the shape of `token_ids`; masked rows give 0, even if they contain NaN.
        ignore_index: tokens with this id are masked, too.
        inplace_backward: let the backward overwrite the logits with their gradient, which saves a
            tensor of their size. The logits cannot be used afterwards. A gradient through another
            use raises. The reference backend never overwrites them.
        kept: the tokens from which each token was sampled, or None; see `KeptTokens`. Only the
            logits of kept tokens are read, and the gradient of the others is 0.
        vocab_group: the ranks over which the vocabulary is split, or None. The logits are then this
            rank's columns. The parts are in rank order and may differ in size; token ids count from
            the start of the whole vocabulary. All values per token must be the same on every rank,
            and so are the results, bit for bit. A DTensor of logits that is split in its last
            dimension over a mesh of the one dimension `tp` needs no `vocab_group`.
        backend: `auto`, or the backend to use. `cuda` refuses a float temperature below 1e-6 times
            the scale (or 2 softcap). It treats a row with no z above -6.9e8, or in fp16 with no
            logit above -65504, as if all its logits were -inf; a logit that low gets no gradient.
            `triton` returns NaN for a row with another token's logit above 2.3e38.

    Returns:
        Log-probabilities in nats, fp32, the shape of `token_ids`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has the wrong shape or value, or the backend cannot do the call.

    Examples:
        >>> import torch, fastrl
        >>> logits = torch.tensor([[0.0, 0.0], [2.0, 0.0]]).log_softmax(-1)
        >>> fastrl.token_logprobs(logits, torch.tensor([1, 0])).exp()
        tensor([0.5000, 0.8808])
    """
    stats = token_stats(
        logits,
        token_ids,
        outputs=("logprobs",),
        temperature=temperature,
        logit_scale=logit_scale,
        logit_softcap=logit_softcap,
        mask=mask,
        ignore_index=ignore_index,
        inplace_backward=inplace_backward,
        kept=kept,
        vocab_group=vocab_group,
        backend=backend,
    )
    return cast("Tensor", stats.logprobs)


@ranks_agree
def token_stats(
    logits: Tensor,
    token_ids: Tensor,
    *,
    outputs: Sequence[str] = ("logprobs", "entropy"),
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    mask: Tensor | None = None,
    ignore_index: int = -100,
    inplace_backward: bool = False,
    kept: KeptTokens | None = None,
    teacher: Teacher | None = None,
    vocab_group: torch.distributed.ProcessGroup | None = None,
    backend: Backend = "auto",
) -> TokenStats:
    """Return log-probability, entropy and other statistics of each row in one pass over the logits.

    With z = softcap(logit_scale * logits) / temperature and p = softmax(z):

        logprobs = log p_y                   d logprobs/dz_j = [j = y] - p_j
        entropy = H = -sum_j p_j log p_j     dH/dz_j = -p_j (log p_j + H)
        logsumexp = log sum_j exp z_j        d logsumexp/dz_j = p_j
        sum_sq_probs = sum_j p_j^2           no gradient
        is_top1 = (no z_j is above z_y)      no gradient

    Replaces `entropy_from_logits` of TRL and verl, and verl's
    `calculate_sum_pi_squared_from_logits`.

    Args:
        logits: `[B, T, V]` or packed `[N, V]`, with any batch strides; fp32, bf16, fp16 (fp64:
            reference).
        token_ids: integers `[B, T]` or `[N]`: the token that each position predicts. For
            `logits = model(ids).logits` pass `logits[:, :-1]` with `ids[:, 1:]`.
        outputs: the fields of `TokenStats` to return; the others are None.
        temperature: divides logits: a number or a tensor `[]`, `[B]`, `[B, 1]`, `[B, T]`, `[N]`.
        logit_scale: multiplies the logits; above 0 (Cohere, Granite).
        logit_softcap: the c of c * tanh(x / c), which bounds scaled logits x (Gemma 2), or None.
        mask: 0/1, the shape of `token_ids`; masked rows give 0, even if they contain NaN.
        ignore_index: tokens with this id are masked, too.
        inplace_backward: let the backward overwrite the logits with their gradient, which saves a
            tensor of their size. The logits cannot be used afterwards.
        kept: the tokens from which each token was sampled, or None; see `KeptTokens`.
        teacher: the distributions to compare with, or None; see `Teacher`. It is needed for the
            outputs `divergence`, `teacher_entropy` and `agrees`.
        vocab_group: the ranks over which the vocabulary is split, or None. The logits are then this
            rank's columns; see `token_logprobs`.
        backend: `auto`, or the backend to use.

    Returns:
        The statistics in nats, as a `TokenStats`. Each is fp32 (`is_top1` and `agrees` are bool),
        has the shape of `token_ids` and is 0 at masked rows.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has the wrong shape or value, or the backend cannot do the call.

    Examples:
        >>> import torch, fastrl
        >>> logits = torch.tensor([[0.0, float("-inf"), 0.0]])
        >>> stats = fastrl.token_stats(logits, torch.tensor([0]))
        >>> round(stats.logprobs.item(), 4), round(stats.entropy.item(), 4)
        (-0.6931, 0.6931)
    """
    checked_outputs(outputs, teacher)
    logits, agreement = split_logits(logits, vocab_group, "inplace_backward", inplace_backward)
    padded, rows = as_rows(
        logits,
        token_ids,
        mask,
        temperature,
        logit_scale,
        logit_softcap,
        ignore_index,
        # a part without columns is refused on all ranks
        vocabulary=None if agreement is None else 1,
    )
    if flag("inplace_backward", inplace_backward):
        refuse_unsafe_inplace("inplace_backward", logits)
    sets = kept_arguments(kept, rows.token_ids)
    checked_teacher = teacher_arguments(teacher, rows, padded, logits.shape[-1], agreement, kept)
    if inplace_backward:
        refuse_shared_memory(padded, checked_teacher)
    chosen = resolve(backend, logits.device, logits.dtype)
    parts = parts_of_logits(padded, rows, agreement, chosen)
    stats, _ = stats_of_logits(
        padded,
        rows,
        parts,
        chosen,
        with_entropy="entropy" in outputs,
        with_sum_sq_probs="sum_sq_probs" in outputs,
        kept=sets,
        teacher=with_operand_dtype(checked_teacher, chosen),
        overwrite=inplace_backward,
    )
    return requested(stats, outputs, token_ids.shape)

"""The divergence of a student's distributions from a teacher's, from logits or hidden states."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from fastrl.backend import Backend
from fastrl.checks import floating
from fastrl.ops._vocabulary_parts.agreement import ranks_agree
from fastrl.ops.linear_token_stats import Lora, linear_token_stats
from fastrl.ops.teacher import Teacher
from fastrl.ops.token_stats import token_stats


@ranks_agree
def token_divergence(
    logits: Tensor,
    teacher: Teacher,
    *,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    mask: Tensor | None = None,
    inplace_backward: bool = False,
    vocab_group: torch.distributed.ProcessGroup | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Return the divergence of a student's distribution from a teacher's at each token.

    `Teacher` defines the divergence D (Agarwal et al. 2023, arXiv 2306.13649; TRL's `GKDTrainer`).
    With the student's distribution q = softmax(z), the teacher's distribution p and the mixture
    m = (1 - beta) q + beta p, its gradient is

        dD/dz_j = d_j - q_j sum_k d_k
        d_j = q_j - p_j                      (beta = 0)
        d_j = q_j log(q_j / p_j)             (beta = 1)
        d_j = (1 - beta) q_j log(q_j / m_j)  (else)

    Equal rows give exactly 0, and no row gives less. For log-probabilities from the same pass call
    `token_stats(..., outputs=("logprobs", "divergence"), teacher=teacher)`.

    Args:
        logits: the student's logits, `[B, T, V]` or packed `[N, V]`, with any batch strides; fp32,
            bf16, fp16 (fp64: reference).
        teacher: the distributions to compare with: hidden states and head, logits, or the
            log-probabilities of some tokens; see `Teacher`.
        temperature: divides logits: a number or a tensor `[]`, `[B]`, `[B, 1]`, `[B, T]`, `[N]`.
            The teacher has its own.
        logit_scale: multiplies the logits; above 0 (Cohere, Granite).
        logit_softcap: the c of c * tanh(x / c), which bounds scaled logits x (Gemma 2), or None.
        mask: 0/1, `[B, T]` or `[N]`; masked rows give 0, even if they contain NaN.
        inplace_backward: let the backward overwrite the logits with their gradient, which saves a
            tensor of their size. The logits cannot be used afterwards.
        vocab_group: the ranks over which the vocabulary is split, or None. The logits are then this
            rank's columns. The teacher's logits or head are split in the same way; see
            `token_logprobs`.
        backend: `auto`, or the backend to use.

    Returns:
        Divergences in nats, fp32, `[B, T]` or `[N]`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has the wrong shape or value, or the backend cannot do the call.

    Examples:
        >>> import torch, fastrl
        >>> logits = torch.tensor([[2.0, 0.0]])
        >>> fastrl.token_divergence(logits, fastrl.Teacher.from_logits(torch.zeros(1, 2)))
        tensor([0.3278])
    """
    stats = token_stats(
        logits,
        _no_tokens("logits", logits),
        outputs=("divergence",),
        temperature=temperature,
        logit_scale=logit_scale,
        logit_softcap=logit_softcap,
        mask=mask,
        inplace_backward=inplace_backward,
        teacher=teacher,
        vocab_group=vocab_group,
        backend=backend,
    )
    return cast("Tensor", stats.divergence)


@ranks_agree
def linear_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher: Teacher,
    *,
    bias: Tensor | None = None,
    lora: Lora | None = None,
    chunk_tokens: int | None = None,
    compact: bool = True,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    mask: Tensor | None = None,
    vocab_group: torch.distributed.ProcessGroup | None = None,
    reduce_hidden_gradient: bool = True,
    backend: Backend = "auto",
) -> Tensor:
    """Return `token_divergence` of hidden @ weight^T + bias, without storing all logits at once.

    `Teacher` defines the divergence (Agarwal et al. 2023, arXiv 2306.13649). Student and teacher
    are projected a chunk at a time, and again in the backward. If the teacher has H' hidden
    features, the forward takes 2NV(H + H') floating-point operations, and the backward 4NVH more
    than the forward (2NVH more with a frozen head). If the divergence is the loss or a term of it,
    `linear_policy_loss(..., teacher=teacher)` computes it in one pass.

    Args:
        hidden: the student's last hidden states, `[B, T, H]` or packed `[N, H]`.
        weight: the student's LM head, `[V, H]` like the weight of an `nn.Linear`.
        teacher: the distributions to compare with: hidden states and head, logits, or the
            log-probabilities of some tokens; see `Teacher`.
        bias: the bias of the head, `[V]`, or None.
        lora: (A `[r, H]`, B `[V, r]`, scale), added to the head as scale * B A, or None.
        chunk_tokens: the number of rows in a chunk; None chooses it by vocabulary and device.
        compact: skip rows without effect, which on a GPU takes one synchronization.
        temperature: divides logits: a number or a tensor `[]`, `[B]`, `[B, 1]`, `[B, T]`, `[N]`.
            The teacher has its own.
        logit_scale: multiplies the logits; above 0 (Cohere, Granite).
        logit_softcap: the c of c * tanh(x / c), which bounds scaled logits x (Gemma 2), or None.
        mask: 0/1, `[B, T]` or `[N]`; masked rows give 0 and cost nothing.
        vocab_group: the ranks over which the vocabulary is split, or None. Weight, bias and B are
            then this rank's part. The teacher's logits or head are split in the same way; see
            `linear_token_logprobs`.
        reduce_hidden_gradient: sum the gradient of the hidden states over `vocab_group`. False
            leaves the sum to the layer that computed them.
        backend: `auto`, or the backend for the chunks.

    Returns:
        Divergences in nats, fp32, `[B, T]` or `[N]`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has the wrong shape or value, ZeRO-3 has partitioned a weight, or
            the backend cannot do the call.

    Examples:
        >>> import torch, fastrl
        >>> hidden, weight = torch.ones(1, 3), torch.zeros(2, 3)
        >>> teacher = fastrl.Teacher.from_hidden(
        ...     torch.ones(1, 2), torch.tensor([[2.0, 0.0], [0, 0]])
        ... )
        >>> fastrl.linear_divergence(hidden, weight, teacher)
        tensor([0.4338])
    """
    stats = linear_token_stats(
        hidden,
        weight,
        _no_tokens("hidden", hidden),
        outputs=("divergence",),
        bias=bias,
        lora=lora,
        chunk_tokens=chunk_tokens,
        compact=compact,
        temperature=temperature,
        logit_scale=logit_scale,
        logit_softcap=logit_softcap,
        mask=mask,
        teacher=teacher,
        vocab_group=vocab_group,
        reduce_hidden_gradient=reduce_hidden_gradient,
        backend=backend,
    )
    return cast("Tensor", stats.divergence)


def _no_tokens(name: str, inputs: object) -> Tensor:
    """Return arbitrary token ids, one per row: the divergence does not depend on them."""
    x = floating(name, inputs) if not hasattr(inputs, "full_tensor") else cast("Tensor", inputs)
    if x.dim() not in (2, 3):
        raise ValueError(f"{name} must have two or three dimensions, got {tuple(x.shape)}")
    return torch.zeros(x.shape[:-1], dtype=torch.int64, device=x.device)

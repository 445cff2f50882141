"""The policy loss from hidden states and the LM head, a chunk of logits at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.backend import Backend
from fastrl.checks import flag, tensor
from fastrl.objective import Objective, TokenLoss, as_objective
from fastrl.objective.presets import Preset
from fastrl.ops._companions.sampler_arguments import sampler_arguments
from fastrl.ops._loss.inputs import loss_inputs, unsupported_reason
from fastrl.ops._loss.term_weights import Normalizer
from fastrl.ops._rows.autograd import differentiable_stats
from fastrl.ops._rows.hidden_inputs import checked_inputs, chunk_options, hidden_inputs
from fastrl.ops._rows.losses import loss_in_one_pass, loss_of_stats
from fastrl.ops._vocabulary_parts.agreement import ranks_agree
from fastrl.ops.kept_tokens import KeptTokens
from fastrl.ops.linear_token_stats import Lora
from fastrl.ops.policy_loss import PolicyLoss
from fastrl.ops.teacher import Teacher
from fastrl.ops.top_k_logprobs import TopKLogprobs
from fastrl.tracing import is_traced


@ranks_agree
def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    advantages: Tensor | None,
    mask: Tensor,
    *,
    bias: Tensor | None = None,
    lora: Lora | None = None,
    chunk_tokens: int | None = None,
    compact: bool = True,
    metrics: bool = True,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    ignore_index: int = -100,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    rollout_top_k: TopKLogprobs | None = None,
    policy_weights: Tensor | None = None,
    objective: Preset | Objective | TokenLoss = "grpo",
    normalizer: Normalizer | None = None,
    group_size: int | None = None,
    group_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    kept: KeptTokens | None = None,
    teacher: Teacher | None = None,
    vocab_group: torch.distributed.ProcessGroup | None = None,
    reduce_hidden_gradient: bool = True,
    backend: Backend = "auto",
) -> PolicyLoss:
    """Return `logits_policy_loss` of hidden @ weight^T + bias, without storing all logits at once.

    `policy_loss` (PPO, arXiv 1707.06347, and its variants) defines the loss, and
    `linear_token_stats` the log-probabilities and entropies. Logits exist for a chunk of rows at a
    time, as in Liger (arXiv 2410.10989). At token level, the loss and all gradients take one pass
    over the chunks: 6NHV floating-point operations, 4NHV with a frozen head, 2NHV without
    gradients. Masked rows are left out of all GEMMs. Rows with advantage or weight 0 are left out
    of the GEMMs for gradients, and on a CPU clipped rows, too, unless there is a teacher or the
    vocabulary is split. `linear_token_logprobs` states the precision of the GEMMs.

    The backward leaves the gradients as they are if the upstream factor is 1. Any other factor, a
    compiled graph or a retained graph costs another read and write of the gradients, so pass a
    constant, such as the number of accumulated micro-batches, to `normalizer` instead of dividing
    the loss. Objectives that depend on all current log-probabilities or entropies (sequence-level
    ratios, masks, a rollout correction on policy), and Python functions under `torch.compile`, take
    two passes (8NHV) in the same memory.

    Args:
        hidden: last hidden states, `[B, T, H]` or packed `[N, H]`.
        weight: the LM head, `[V, H]` like the weight of an `nn.Linear`. A DTensor is gathered, or
            is a part of the vocabulary; see `linear_token_logprobs`.
        token_ids: integers `[B, T]` or `[N]`: the token that each position predicts. For `hidden`
            of all positions of `ids` pass `hidden[:, :-1]` with `ids[:, 1:]`.
        advantages: one per sequence, `[B]` (packed `[S]`, with `cu_seqlens`), or one per token,
            `[B, T]` (packed `[N]`, which takes precedence if S = N). None for distillation alone,
            with `teacher_coef`.
        mask: 0/1, the shape of `token_ids`; masked tokens have no effect, even if they are NaN.
        bias: the bias of the head, `[V]`, or None.
        lora: (A `[r, H]`, B `[V, r]`, scale), added to the head as scale * B A, or None.
        chunk_tokens: the number of rows in a chunk; None chooses it by vocabulary and device.
        compact: skip rows without effect, which on a GPU takes one synchronization.
        metrics: whether to compute metrics. Without them, and if one pass is enough, rows with
            advantage or weight 0 are not projected unless the KL or entropy term needs them, and
            NaN in such rows has no effect.
        temperature: divides logits: a number or a tensor `[]`, `[B]`, `[B, 1]`, `[B, T]`, `[N]`.
        logit_scale: multiplies the logits; above 0 (Cohere, Granite).
        logit_softcap: the c of c * tanh(x / c), which bounds scaled logits x (Gemma 2), or None.
        ignore_index: tokens with this id are masked, too.
        old_logprobs: log-probabilities under the old policy, the denominator of the ratio, in the
            shape of `mask`; None means on policy, with ratio 1.
        ref_logprobs: log-probabilities under the reference policy, in the shape of `mask`; needed
            if `kl_coef > 0`, and refused if it is None.
        rollout_logprobs: log-probabilities from the engine that sampled the tokens, in the shape of
            `mask`; for `rollout_correction` and `off_policy_threshold`.
        rollout_top_k: the most likely tokens of the sampler, for `objective.score_centering`, or
            None; see `TopKLogprobs`.
        policy_weights: constant factors in the policy term alone, such as importance weights or
            masks, in any shape that `advantages` may have.
        objective: the name of a preset, an `Objective`, or a function
            `(logprobs, old_logprobs, ref_logprobs, advantages) -> loss per token`. A function is
            called with one chunk of tokens at a time, `[1, C]`, so it must treat tokens
            independently.
        normalizer: the global denominator from `global_normalizer`, a number or a tensor of one
            element; None counts this call alone. If the objective has separate aggregations for KL
            or entropy, a mapping with the keys `"policy"`, `"kl"` and `"entropy"`.
        group_size: for `prompt-mean`: the number of consecutive sequences for the same prompt.
        group_ids: for `prompt-mean`: integers `[B]` (packed `[S]`), the prompt of each sequence.
        cu_seqlens: integers `[S + 1]`, the bounds of packed sequences, from 0 to N.
        kept: the tokens from which each token was sampled, or None; see `KeptTokens`.
        teacher: the distributions to compare with, or None; see `Teacher`. It is the teacher of
            `objective.teacher_coef`, or the reference policy of `kl_estimator="exact"`. Its head
            takes 2NHV more operations; the policy is not projected a second time.
        vocab_group: the ranks over which the vocabulary is split, or None. Weight, bias and B are
            then this rank's part; see `linear_token_logprobs`.
        reduce_hidden_gradient: sum the gradient of the hidden states over `vocab_group`. False
            leaves the sum to the layer that computed them.
        backend: `auto`, or the backend for the chunks. A function as objective needs `auto` or
            `reference`: PyTorch evaluates it, on log-probabilities from the fastest backend.

    Returns:
        The loss, a scalar, with its metrics, as a `PolicyLoss`. Log-probabilities and entropies are
        in nats; the metric `entropy` is exact.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has the wrong shape or value, is missing, or has no effect, or
            ZeRO-3 has partitioned the weight.

    Examples:
        >>> import torch, fastrl
        >>> hidden = torch.ones(1, 2, 3, requires_grad=True)
        >>> weight = torch.zeros(4, 3, requires_grad=True)
        >>> result = fastrl.linear_policy_loss(
        ...     hidden, weight, torch.tensor([[0, 3]]), torch.tensor([1.0]), torch.tensor([[1, 1]])
        ... )
        >>> result.loss.backward()
        >>> weight.grad[:, 0]  # -A (onehot - p) / tokens, summed over the two tokens
        tensor([-0.2500,  0.2500,  0.2500, -0.2500])
    """
    chosen = as_objective(objective)
    checked = checked_inputs(
        hidden,
        weight,
        token_ids,
        bias,
        lora,
        tensor("mask", mask),
        temperature,
        logit_scale,
        logit_softcap,
        ignore_index,
        vocab_group,
        reduce_hidden_gradient,
        kept,
        teacher,
    )
    unsupported = unsupported_reason(chosen)
    options = chunk_options(chunk_tokens, compact, backend, checked, unsupported)
    inputs = loss_inputs(
        token_ids,
        checked.active.reshape(token_ids.shape),
        advantages,
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
        rollout_logprobs=rollout_logprobs,
        policy_weights=policy_weights,
        objective=chosen,
        normalizer=normalizer,
        group_size=group_size,
        group_ids=group_ids,
        cu_seqlens=cu_seqlens,
        dtype=checked.head.dtype,
        backend="reference" if unsupported else options.backend,
        teacher=checked.teacher,
        with_sampler=True,
    )
    sampler = sampler_arguments(rollout_top_k, chosen, old_logprobs, checked.rows.token_ids)
    flag("metrics", metrics)
    rows = hidden_inputs(checked, options, vocab_group, sampler=sampler)
    # a trace would record the loop over chunks with the row order of this call
    unrolled = callable(chosen.surrogate) and is_traced(checked.hidden)
    if inputs.tokenwise() and not unrolled:
        return loss_in_one_pass(rows, inputs, token_ids.shape, metrics=metrics)
    stats, centered = differentiable_stats(rows, *rows.source.trainable())
    result = loss_of_stats(stats, inputs, token_ids.shape, centered)
    return result if metrics else result._replace(metrics={})

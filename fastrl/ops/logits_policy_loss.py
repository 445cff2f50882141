"""The policy loss from logits, with its gradient in the same pass."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.backend import Backend, resolve
from fastrl.checks import flag, tensor
from fastrl.contract import RowArguments
from fastrl.library import called, operators
from fastrl.objective import Objective, TokenLoss, as_objective
from fastrl.objective.presets import Preset
from fastrl.ops._autograd.known_gradient import (
    alias_before_overwriting,
    mark_overwritten,
    with_gradients,
)
from fastrl.ops._companions.sampler_arguments import sampler_arguments
from fastrl.ops._loss.inputs import LossInputs, loss_inputs, unsupported_reason
from fastrl.ops._loss.term_weights import Normalizer
from fastrl.ops._row_checks import as_rows, refuse_unsafe_inplace
from fastrl.ops._rows.given_inputs import (
    given_inputs,
    parts_of_logits,
    split_logits,
    stats_of_logits,
    with_unit_vocabulary_stride,
)
from fastrl.ops._rows.losses import loss_in_one_pass, loss_of_stats
from fastrl.ops._vocabulary_parts.agreement import ranks_agree
from fastrl.ops.kept_tokens import KeptTokens, kept_arguments
from fastrl.ops.policy_loss import PolicyLoss, policy_loss_result
from fastrl.ops.teacher import (
    Teacher,
    refuse_shared_memory,
    teacher_arguments,
    with_operand_dtype,
)
from fastrl.ops.top_k_logprobs import TopKLogprobs
from fastrl.tracing import refuse_transforms


@ranks_agree
def logits_policy_loss(
    logits: Tensor,
    token_ids: Tensor,
    advantages: Tensor | None,
    mask: Tensor,
    *,
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
    inplace: bool = False,
    kept: KeptTokens | None = None,
    teacher: Teacher | None = None,
    vocab_group: torch.distributed.ProcessGroup | None = None,
    backend: Backend = "auto",
) -> PolicyLoss:
    """Return `policy_loss` of the log-probabilities of tokens under logits.

    `policy_loss` (PPO, arXiv 1707.06347, and its variants) defines the loss, and `token_stats` the
    log-probabilities and entropies. The only other tensors of the size of the logits are their
    gradient and, with `kept`, a copy of the kept columns. For objectives at token level each row is
    read once, and its gradient is written once, while the row is still in cache; a teacher or a
    split vocabulary takes more reads. With c_t = dL/dlogprob_t and
    z = softcap(logit_scale * logits) / temperature:

        dL/dz_j = c_t ([j = y] - p_j) + entropy_coef w_t p_j (log p_j + H)

    The backward leaves the gradient as it is if the upstream factor is 1. Any other factor, a
    compiled graph or a retained graph costs another read and write of the gradient, so pass a
    constant, such as the number of accumulated micro-batches, to `normalizer` instead of dividing
    the loss. With fp16 logits, sequence-level ratios, masks of the objective or a Python function,
    the backward reads the logits a second time.

    Args:
        logits: `[B, T, V]` or packed `[N, V]`, with any batch strides; fp32, bf16, fp16 (fp64:
            reference).
        token_ids: integers `[B, T]` or `[N]`: the token that each position predicts. For
            `logits = model(ids).logits` pass `logits[:, :-1]` with `ids[:, 1:]`.
        advantages: one per sequence, `[B]` (packed `[S]`, with `cu_seqlens`), or one per token,
            `[B, T]` (packed `[N]`, which takes precedence if S = N). None for distillation alone,
            with `teacher_coef`.
        mask: 0/1, the shape of `token_ids`; masked tokens have no effect, even if they are NaN.
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
            None; see `TopKLogprobs`. The logits are then read twice.
        policy_weights: constant factors in the policy term alone, such as importance weights or
            masks, in any shape that `advantages` may have.
        objective: the name of a preset, an `Objective`, or a function
            `(logprobs, old_logprobs, ref_logprobs, advantages) -> loss per token`.
        normalizer: the global denominator from `global_normalizer`, a number or a tensor of one
            element; None counts this call alone. If the objective has separate aggregations for KL
            or entropy, a mapping with the keys `"policy"`, `"kl"` and `"entropy"`.
        group_size: for `prompt-mean`: the number of consecutive sequences for the same prompt.
        group_ids: for `prompt-mean`: integers `[B]` (packed `[S]`), the prompt of each sequence.
        cu_seqlens: integers `[S + 1]`, the bounds of packed sequences, from 0 to N.
        inplace: let the gradient overwrite the logits, which saves a tensor of their size. The
            logits cannot be used afterwards: a gradient through another use raises. The reference
            backend never overwrites them.
        kept: the tokens from which each token was sampled, or None; see `KeptTokens`. Only their
            logits are read, and the gradient of the others is 0.
        teacher: the distributions to compare with, or None; see `Teacher`. It is the teacher of
            `objective.teacher_coef`, or the reference policy of `kl_estimator="exact"`.
        vocab_group: the ranks over which the vocabulary is split, or None. The logits are then this
            rank's columns; see `token_logprobs`. The logits are read twice, for the statistics and
            for the gradient; in between the ranks exchange a few numbers per row.
        backend: `auto`, or the backend to use. A function as objective needs `auto` or `reference`:
            PyTorch evaluates it, on log-probabilities from the fastest backend.

    Returns:
        The loss, a scalar, with its metrics, as a `PolicyLoss`. Log-probabilities and entropies are
        in nats; the metric `entropy` is exact.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has the wrong shape or value, is missing, or has no effect.

    Examples:
        >>> import torch, fastrl
        >>> logits = torch.zeros(1, 2, 4, requires_grad=True)
        >>> result = fastrl.logits_policy_loss(
        ...     logits, torch.tensor([[0, 3]]), torch.tensor([1.0]), torch.tensor([[1, 1]])
        ... )
        >>> result.loss.backward()
        >>> logits.grad[0, 0]  # -A (onehot - p) / tokens
        tensor([-0.3750,  0.1250,  0.1250,  0.1250])
    """
    refuse_transforms("logits_policy_loss")
    logits, agreement = split_logits(logits, vocab_group, "inplace", inplace)
    padded, rows = as_rows(
        logits,
        token_ids,
        tensor("mask", mask),
        temperature,
        logit_scale,
        logit_softcap,
        ignore_index,
        vocabulary=None if agreement is None else 1,
    )
    sets = kept_arguments(kept, rows.token_ids)
    checked_teacher = teacher_arguments(teacher, rows, padded, logits.shape[-1], agreement, kept)
    chosen = as_objective(objective)
    unsupported = unsupported_reason(chosen)
    row_backend = resolve(backend, logits.device, logits.dtype, unsupported, partial=True)
    inputs = loss_inputs(
        token_ids,
        mask,
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
        dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32,
        backend="reference" if unsupported else row_backend,
        token_ids=rows.token_ids,
        ignore_index=rows.ignore_index,
        teacher=checked_teacher,
        with_sampler=True,
    )
    sampler = sampler_arguments(rollout_top_k, chosen, old_logprobs, rows.token_ids)
    rows = rows._replace(mask=inputs.active)
    if flag("inplace", inplace):
        refuse_unsafe_inplace("inplace", logits)
        refuse_shared_memory(padded, checked_teacher)
    parts = parts_of_logits(padded, rows, agreement, row_backend)
    checked_teacher = with_operand_dtype(checked_teacher, row_backend)
    if row_backend != "reference" and _in_one_pass(logits, inputs):
        if kept is None and teacher is None and not (sampler.given() or parts.split()):
            return _in_one_kernel(logits, padded, rows, inplace=inplace, inputs=inputs)
        call = given_inputs(
            padded,
            rows,
            parts,
            row_backend,
            with_entropy=True,
            kept=sets,
            teacher=checked_teacher,
            sampler=sampler,
        )
        # another layout is copied, and a compiled graph never writes in place
        in_place = inplace and call.source.logits is padded and not torch.compiler.is_compiling()
        overwritten = logits if in_place else None
        return loss_in_one_pass(call, inputs, token_ids.shape, overwritten=overwritten)
    stats, centered = stats_of_logits(
        padded,
        rows,
        parts,
        row_backend,
        with_entropy=True,
        kept=sets,
        teacher=checked_teacher,
        sampler=sampler,
        overwrite=inplace,
        save_probs=True,
    )
    return loss_of_stats(stats, inputs, token_ids.shape, centered)


def _in_one_pass(logits: Tensor, inputs: LossInputs) -> bool:
    """Return whether loss and gradient can be computed in a single pass over the rows."""
    return (
        torch.is_grad_enabled()
        and logits.requires_grad
        # an fp16 gradient must be scaled before it is rounded, hence in the backward
        and logits.dtype != torch.float16
        and not callable(inputs.objective.surrogate)
        and inputs.tokenwise()
    )


def _in_one_kernel(
    original: Tensor, padded: Tensor, rows: RowArguments, *, inplace: bool, inputs: LossInputs
) -> PolicyLoss:
    logits = with_unit_vocabulary_stride(padded)
    constants = inputs.corrected_arguments(inputs.arguments.advantages, None)  # reads neither
    arguments = (*rows, *constants, *inputs.objective.arguments.flat())
    run = operators(inputs.backend)
    if inplace and logits is padded and not torch.compiler.is_compiling():
        target = alias_before_overwriting(logits)
        logprobs, entropy = called(run.logits_policy_loss_fwd_, logits.detach(), *arguments, False)
        mark_overwritten(original)
        grad_logits = target.detach()
    else:
        target = logits
        logprobs, entropy, grad_logits = called(
            run.logits_policy_loss_fwd, logits.detach(), *arguments
        )
    loss, _, _, metrics = inputs.evaluate(logprobs, entropy, constants)
    loss = with_gradients(loss, [(target, grad_logits)], inputs.backend)
    return policy_loss_result(loss, metrics, logprobs, entropy, inputs, original.shape[:-1])

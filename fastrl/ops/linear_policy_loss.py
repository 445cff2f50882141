"""The policy loss from hidden states and the LM head, a chunk of logits at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.backend import Backend
from fastrl.checks import flag, tensor
from fastrl.objective import Objective, TokenLoss, as_objective
from fastrl.objective.presets import Preset
from fastrl.ops._autograd.known_gradient import with_gradients
from fastrl.ops._linear.call import LinearCall
from fastrl.ops._linear.inputs import (
    ChunkOptions,
    LinearInputs,
    checked_inputs,
    chunk_options,
    linear_inputs,
)
from fastrl.ops._linear.passes import linear_loss_pass
from fastrl.ops._loss.inputs import LossInputs, loss_inputs, unsupported_reason
from fastrl.ops._loss.slopes import TokenSlopes, flat_arguments
from fastrl.ops._loss.teacher_term import (
    Compared,
    add_divergence,
    divergence_weights,
    without_gradient,
)
from fastrl.ops._loss.term_weights import Normalizer
from fastrl.ops._vocabulary_parts.agreement import ranks_agree
from fastrl.ops.kept_tokens import KeptTokens
from fastrl.ops.linear_token_stats import Lora, stats_of_hidden
from fastrl.ops.policy_loss import PolicyLoss, loss_of_logprobs, policy_loss_result
from fastrl.ops.teacher import Teacher
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

    The loss is the one that `policy_loss` (PPO, arXiv 1707.06347, and its variants) computes from
    the `linear_token_logprobs` and entropies. Logits exist for a chunk of rows at a time, as in
    Liger (arXiv 2410.10989). At token level, the loss and all gradients take one pass over the
    chunks: 6NHV floating-point operations, 4NHV with a frozen head, 2NHV without gradients. Masked
    rows are left out of all GEMMs, and rows without advantage or weight out of the gradient GEMMs
    (on a CPU also clipped rows). `linear_token_logprobs` states the precision of the GEMMs.

    The backward leaves the gradients as they are if the upstream factor is 1. Any other factor, a
    compiled graph or a retained graph costs another read and write of the gradients, so pass a
    constant, such as the number of accumulated micro-batches, to `normalizer` instead of dividing
    the loss. Objectives that depend on all current log-probabilities or entropies (sequence-level
    ratios, masks, a rollout correction on policy) take two passes (8NHV) and no more memory, as do
    Python functions under `torch.compile`.

    Args:
        hidden: last hidden states, `[B, T, H]` or packed `[N, H]`.
        weight: the LM head, `[V, H]` as in `nn.Linear`; a DTensor as in `linear_token_logprobs`.
        token_ids: integers `[B, T]` or `[N]`.
        advantages: as in `policy_loss`; None for distillation alone, with `teacher_coef`.
        mask: 0/1, the shape of `token_ids`.
        bias: `[V]`, or None.
        lora: (A `[r, H]`, B `[V, r]`, scale) added to the head as scale * B A, or None.
        chunk_tokens: as in `linear_token_logprobs`.
        compact: as in `linear_token_logprobs`.
        metrics: if False, the metrics are empty. If one pass is enough, rows with advantage or
            weight 0 are then not projected, unless the KL or entropy term needs them, and NaN in
            them has no effect.
        temperature: as in `token_logprobs`.
        logit_scale: as in `token_logprobs`.
        logit_softcap: as in `token_logprobs`.
        ignore_index: tokens with this id count as masked.
        old_logprobs: as in `policy_loss`.
        ref_logprobs: as in `policy_loss`.
        rollout_logprobs: as in `policy_loss`.
        policy_weights: as in `policy_loss`.
        objective: as in `policy_loss`; a Python function is called with one chunk of tokens at a
            time, `[1, C]`, so it must treat tokens independently.
        normalizer: as in `policy_loss`.
        group_size: as in `token_weights`.
        group_ids: as in `token_weights`.
        cu_seqlens: as in `policy_loss`.
        kept: as in `linear_token_logprobs`.
        teacher: the distributions from which the policy diverges, for `objective.teacher_coef`, or
            those of the reference for an exact KL. Its head takes 2NHV more operations; the policy
            is not projected a second time.
        vocab_group: as in `linear_token_logprobs`.
        reduce_hidden_gradient: as in `linear_token_logprobs`.
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
    )
    flag("metrics", metrics)
    linear = linear_inputs(checked, options.backend, vocab_group)
    # a trace would record the loop over chunks with the row order of this call
    unrolled = callable(chosen.surrogate) and is_traced(linear.hidden)
    if inputs.tokenwise() and not unrolled:
        result = _one_pass(linear, inputs, options, token_ids.shape, metrics=metrics)
    else:
        shape = inputs.masks.active.shape
        logprobs, entropy, *_, divergence, teacher_entropy, agrees = stats_of_hidden(
            linear, options
        )
        compared = None
        if linear.teacher.given():
            compared = Compared(
                *(values.reshape(shape) for values in (divergence, teacher_entropy, agrees))
            )
        result = loss_of_logprobs(
            logprobs.reshape(shape), entropy.reshape(shape), inputs, token_ids.shape, compared
        )
    return result if metrics else result._replace(metrics={})


def _one_pass(
    linear: LinearInputs,
    inputs: LossInputs,
    options: ChunkOptions,
    shape: torch.Size,
    *,
    metrics: bool,
) -> PolicyLoss:
    hidden, rows, head, parts, kept, teacher = linear
    tensors = (hidden, *head.parameters())
    differentiable = torch.is_grad_enabled()
    needs = [differentiable and x is not None and x.requires_grad for x in tensors]
    objective = inputs.objective
    constants = inputs.masked_arguments(inputs.arguments.advantages, None)  # reads neither
    active = inputs.masks.active
    flat = flat_arguments(constants, active)
    function = objective.surrogate if callable(objective.surrogate) else None
    slopes = TokenSlopes(active.reshape(-1), flat, objective.arguments, function, inputs.backend)
    weights = None
    if teacher.given():
        weights = divergence_weights(objective, constants, active)
    flat_weights = None if weights is None else weights.reshape(-1)
    if function is not None:
        call = LinearCall(*tensors, head.lora_scale, rows, *options, parts, kept, teacher)
        outputs = linear_loss_pass(call, slopes, flat_weights, needs, metrics=metrics)
    else:
        outputs = torch.ops.fastrl.linear_policy_loss_fwd(
            *(None if x is None else x.detach() for x in tensors),
            head.lora_scale,
            *rows,
            *options,
            *parts,
            *kept,
            *teacher.flat(),
            *flat,
            *objective.arguments.flat(),
            flat_weights,
            needs,
            metrics,
        )
    logprobs, entropy, *rest = outputs
    compared, grads = rest[:3], rest[3:]
    logprobs, entropy = logprobs.reshape(active.shape), entropy.reshape(active.shape)
    if not metrics:  # rows of weight 0 were not projected, and 0 times their loss could be NaN
        projected = slopes.weighted().reshape(active.shape)
        projected = active & (projected if weights is None else projected | (weights != 0))
        inputs = inputs._replace(masks=inputs.masks._replace(active=projected))
    loss, slope, entropy_slope, values = inputs.evaluate(logprobs, entropy, constants)
    if weights is not None:
        of_rows = Compared(*(x.reshape(active.shape) for x in compared))
        active, still = inputs.masks.active, without_gradient(slope, entropy_slope)
        loss, values = add_divergence(loss, values, of_rows, weights, active, still, objective)
    if any(needs):
        pairs = zip(tensors, grads, needs, strict=True)
        given = [(x, grad if need else None) for x, grad, need in pairs]
        loss = with_gradients(loss, given, options.backend)
    return policy_loss_result(loss, values, logprobs, entropy, shape)

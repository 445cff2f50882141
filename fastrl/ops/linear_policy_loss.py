"""The policy loss straight from hidden states and the LM head, a chunk of logits at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastrl import reference
from fastrl.backend import Backend
from fastrl.checks import flag, tensor
from fastrl.objective import Objective, TokenLoss
from fastrl.objective.presets import Preset
from fastrl.ops._autograd.known_gradient import with_gradients
from fastrl.ops._linear.head import LinearHead
from fastrl.ops._linear.passes import LinearCall, linear_loss_pass
from fastrl.ops._loss.term_weights import Normalizer, TermWeights
from fastrl.ops._rows import Rows
from fastrl.ops.linear_token_stats import (
    ChunkOptions,
    Lora,
    chunk_options,
    flat_hidden,
    linear_inputs,
    stats_of_hidden,
    token_rows,
)
from fastrl.ops.policy_loss import (
    LossInputs,
    PolicyLoss,
    evaluate,
    loss_inputs,
    loss_of_logprobs,
    named_metrics,
)
from fastrl.reference import Sequences
from fastrl.tracing import is_traced


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    advantages: Tensor,
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
    backend: Backend = "auto",
) -> PolicyLoss:
    """Return `logits_policy_loss` of hidden @ weight^T + bias, never holding those logits.

    At token level the loss and all gradients come from one visit to each chunk of rows: 6NHV
    floating-point operations, 4NHV with a frozen head, 2NHV without gradient. Masked rows enter
    no GEMM; rows whose slope is 0 (clipped, no advantage) enter none of the gradient's.
    What needs all current log-probabilities or entropies first (ratios of sequences, masks of the
    objective, a rollout correction on policy) visits the rows twice (8NHV), in the same memory; so
    does a function as objective under `torch.compile`.

    Args:
        hidden: last hidden states, `[B, T, H]` or packed `[N, H]`.
        weight: of the LM head, `[V, H]` as in `nn.Linear`; an FSDP2 shard is gathered.
        token_ids: integers `[B, T]` or `[N]`.
        advantages: as in `policy_loss`.
        mask: 0/1, the shape of `token_ids`.
        bias: `[V]`, or None.
        lora: (A `[r, H]`, B `[V, r]`, scale) added to the head, or None.
        chunk_tokens: rows at a time; None chooses from the vocabulary and the device.
        compact: leave idle rows out, which on a GPU costs one synchronisation; False keeps them.
        metrics: if False, the metrics are empty, and where one visit is enough rows without
            advantage or weight are not even projected, whatever they hold, unless KL or entropy
            asks for them.
        temperature: as in `token_logprobs`.
        logit_scale: as in `token_logprobs`.
        logit_softcap: as in `token_logprobs`.
        ignore_index: tokens with this id count as masked.
        old_logprobs: as in `policy_loss`.
        ref_logprobs: as in `policy_loss`.
        rollout_logprobs: as in `policy_loss`.
        policy_weights: as in `policy_loss`.
        objective: as in `policy_loss`; a function of one's own sees the tokens of one chunk at a
            time, `[1, C]`, so it has to treat each token by itself.
        normalizer: as in `policy_loss`.
        group_size: as in `token_weights`.
        group_ids: as in `token_weights`.
        cu_seqlens: as in `policy_loss`.
        backend: `auto`, or the backend that works on the chunks. A function as objective takes
            `auto` or `reference`: PyTorch evaluates it, on log-probabilities from the fastest.

    Returns:
        `PolicyLoss`; the entropy among its metrics is exact.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has the wrong shape or value, is missing, or has no effect, or the
            weight is an emptied ZeRO-3 shard.

    Example:
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
    rows, head = linear_inputs(
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
    )
    inputs = loss_inputs(
        token_ids,
        rows.active.reshape(token_ids.shape),
        advantages,
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
        rollout_logprobs=rollout_logprobs,
        policy_weights=policy_weights,
        objective=objective,
        normalizer=normalizer,
        group_size=group_size,
        group_ids=group_ids,
        cu_seqlens=cu_seqlens,
        dtype=head.dtype,
    )
    options = chunk_options(chunk_tokens, compact, backend, head, inputs.unable())
    flag("metrics", metrics)
    scoring = "reference" if inputs.unable() else options.backend
    # a loop over chunks in Python would be cut to the values of one call
    unrolled = callable(inputs.objective.ratio) and is_traced(rows.logits)
    if in_one_pass(inputs) and not unrolled:
        result, _, _ = one_pass(rows, head, inputs, options, scoring, metrics=metrics)
    else:
        logprobs, entropy, *_ = stats_of_hidden(rows, head, options)
        result = loss_of_logprobs(logprobs, entropy, inputs, scoring)
    return result if metrics else PolicyLoss(result.loss, {})


def in_one_pass(inputs: LossInputs) -> bool:
    """Say whether a row's slope is known once its own log-probability is."""
    return inputs.objective.level == "token" and not inputs.weighing.wait()


def one_pass(
    rows: Rows,
    head: LinearHead,
    inputs: LossInputs,
    options: ChunkOptions,
    scoring: str,
    *,
    metrics: bool,
) -> tuple[PolicyLoss, Tensor, Tensor]:
    """Return the loss, and the log-probabilities and entropies that it saw (no gradient)."""
    hidden = flat_hidden(rows)
    tensors = (hidden, *head.parameters())
    differentiable = torch.is_grad_enabled()
    needs = [differentiable and x is not None and x.requires_grad for x in tensors]
    weights = inputs.weighing.weights(inputs.advantages, None)
    if callable(inputs.objective.ratio):
        found = _custom_pass(hidden, rows, head, inputs, weights, options, needs, metrics=metrics)
    else:
        found = torch.ops.fastrl.linear_policy_loss_fwd(
            *(None if x is None else x.detach() for x in tensors),
            head.lora_scale,
            *token_rows(rows),
            *options,
            inputs.advantages.reshape(-1),
            *(_flat(of_term) for of_term in weights),
            _flat(inputs.old_logprobs),
            _flat(inputs.ref_logprobs),
            *inputs.kernel_objective(),
            needs,
            metrics,
        )
    logprobs, entropy, *grads = found
    shape = rows.token_ids.shape
    logprobs, entropy = logprobs.reshape(shape), entropy.reshape(shape)
    if not metrics:  # nobody has looked at the others: 0 times what they seem to lose can be NaN
        inputs = inputs._replace(mask=inputs.mask & weights.counts())
    loss, _, values = evaluate(logprobs, entropy, weights, inputs, scoring)
    if any(needs):
        pairs = zip(tensors, grads, needs, strict=True)
        loss = with_gradients(loss, [(x, grad if need else None) for x, grad, need in pairs])
    return PolicyLoss(loss, named_metrics(values)), logprobs, entropy


def _custom_pass(
    hidden: Tensor,
    rows: Rows,
    head: LinearHead,
    inputs: LossInputs,
    weights: TermWeights,
    options: ChunkOptions,
    needs: list[bool],
    *,
    metrics: bool,
) -> tuple[Tensor, ...]:
    """The single pass with an objective that is a function of the user's own."""
    coefficient = inputs.objective.entropy_coef

    def slope_of(
        logprobs: Tensor, entropy: Tensor, part: Tensor | slice
    ) -> tuple[Tensor, Tensor | None]:
        def of_part(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.reshape(-1)[part][None]

        policy = weights.policy.reshape(-1)[part][None]
        kl, of_entropy = of_part(weights.kl), of_part(weights.entropy)
        _, slope, _ = reference.policy_loss(
            logprobs[None],
            inputs.advantages.reshape(-1)[part][None],
            inputs.mask.reshape(-1)[part][None],
            policy,
            Sequences(None, 1),
            inputs.objective,
            old_logprobs=of_part(inputs.old_logprobs),
            ref_logprobs=of_part(inputs.ref_logprobs),
            entropy=entropy[None],
            kl_weights=kl,
            entropy_weights=of_entropy,
        )
        of_entropy = policy if of_entropy is None else of_entropy
        return slope[0], -coefficient * of_entropy[0] if coefficient else None

    shared: tuple[Any, ...] = (*head.parameters(), head.lora_scale, *token_rows(rows), *options)
    call = LinearCall(hidden, *shared)
    moves = weights.counts().reshape(-1)
    return tuple(linear_loss_pass(call, moves, slope_of, needs, metrics=metrics))


def _flat(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.reshape(-1)

"""Checks of the arguments that all policy losses share, and their conversion for operators."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastrl import reference
from fastrl.checks import floating, on_device, refuse_no_logprobs, same_shape, saveable
from fastrl.contract import LossArguments, ObjectiveArguments
from fastrl.library import operators
from fastrl.objective import Objective, TokenLoss
from fastrl.ops._arguments import NO_TEACHER, TeacherArguments
from fastrl.ops._loss.teacher_term import check_teacher
from fastrl.ops._loss.term_weights import WeightCorrections, term_aggregations, term_weights
from fastrl.ops.token_weights import bounds_of


def unsupported_reason(objective: Objective) -> str | None:
    """Return why compiled kernels cannot evaluate the objective, or None if they can."""
    if callable(objective.surrogate):
        return (
            "the objective is a Python function, which PyTorch evaluates (backend='auto' uses "
            "the fastest backend for everything else)"
        )
    return None


class LossInputs(NamedTuple):
    """The inputs of a policy loss besides log-probabilities and entropy; they have no gradient."""

    objective: Objective
    arguments: LossArguments
    active: Tensor  # bool [B, T]
    corrections: WeightCorrections
    backend: str

    # not properties: torch.compile in torch 2.10 cannot trace properties of a NamedTuple
    def has_reference(self) -> bool:
        """Return whether there is a KL to a reference."""
        return self.arguments.ref_logprobs is not None or self.objective.has_exact_kl

    def tokenwise(self) -> bool:
        """Return whether the slope of a token depends on its own log-probability alone."""
        return self.objective.level == "token" and not self.corrections.need_logprobs(
            self.arguments
        )

    def padded(self, name: str, value: Tensor, like: Tensor) -> Tensor:
        """Return a differentiable tensor per token as `[B, T]` in the dtype of the arithmetic."""
        return as_padded(name, value, like, self.arguments.advantages.dtype)

    def corrected_arguments(self, logprobs: Tensor, entropy: Tensor | None) -> LossArguments:
        """Return the arguments with corrections and masks applied to the weights.

        If the loss is `tokenwise`, the values of the two tensors have no effect.
        """
        return self.corrections.apply(self.arguments, self.active, logprobs, entropy)

    def centering_weights(self, logprobs: Tensor, entropy: Tensor | None) -> Tensor | None:
        """Return the factor of the sampler's expected score, `[B, T]`, or None.

        The policy term has the same factor, times the weight of the sampled token.
        """
        if not self.objective.score_centering:
            return None
        corrections = self.corrections.without_sampled()
        a = corrections.apply(self.arguments, self.active, logprobs, entropy)
        sequences = reference.sequences_of(self.active, a.cu_seqlens)
        factors = [sequences.per_token(x, self.active) for x in (a.weights, a.advantages)]
        if a.policy_weights is not None:
            factors[0] = factors[0] * sequences.per_token(a.policy_weights, self.active)
        weights, advantages = factors
        flows = self.active & (weights != 0)  # 0 times an infinite advantage would be NaN
        return torch.where(flows, weights * advantages, 0.0)

    def evaluate(
        self, logprobs: Tensor, entropy: Tensor | None, arguments: LossArguments
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Return loss, dL/dlogprobs, dL/dentropy (None: 0) and metrics, without autograd."""
        o = self.objective
        function = o.surrogate if callable(o.surrogate) else None
        return evaluate(
            logprobs, entropy, self.active, arguments, o.arguments, function, self.backend
        )


def evaluate(
    logprobs: Tensor,
    entropy: Tensor | None,
    active: Tensor,
    arguments: LossArguments,
    objective: ObjectiveArguments,
    function: TokenLoss | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return loss, dL/dlogprobs, dL/dentropy (None: 0) and metrics of `[B, T]` tokens."""
    if backend == "reference":
        return reference.policy_loss(logprobs, entropy, active, arguments, objective, function)
    loss, slope, entropy_slope, metrics = operators(backend).policy_loss_fwd(
        logprobs, entropy, active, *arguments, *objective.flat()
    )
    has_entropy_term = objective.coefficients.entropy_coef != 0 and entropy is not None
    return loss, slope, entropy_slope if has_entropy_term else None, metrics


def loss_inputs(
    tokens: Tensor,
    mask: Tensor,
    advantages: object,
    *,
    old_logprobs: object,
    ref_logprobs: object,
    rollout_logprobs: object,
    policy_weights: object,
    objective: Objective,
    normalizer: object,
    group_size: object,
    group_ids: object,
    cu_seqlens: object,
    dtype: torch.dtype,
    backend: str,
    token_ids: Tensor | None = None,
    ignore_index: int = 0,
    teacher: TeacherArguments = NO_TEACHER,
    with_sampler: bool = False,
) -> LossInputs:
    """Check the arguments that the policy losses share.

    `tokens` is `[B, T]` or `[N]`, `mask` 0/1 of any dtype. If `token_ids` are given, tokens with
    the id `ignore_index` are masked, too.
    """
    o = objective
    check_teacher(o, teacher)
    if o.score_centering and not with_sampler:
        raise ValueError(
            "rollout_top_k is needed when objective.score_centering is set: give it to "
            "logits_policy_loss or linear_policy_loss"
        )
    if advantages is None and not teacher.given():
        raise TypeError("advantages must be a tensor, got None, which needs a teacher")
    if ref_logprobs is not None and o.has_exact_kl:
        raise ValueError("ref_logprobs has no effect with objective.kl_estimator 'exact'")
    if advantages is None:  # distillation alone
        advantages = torch.zeros(tokens.shape, dtype=dtype, device=tokens.device)
    packed = tokens.dim() == 1
    bounds = bounds_of(tokens, cu_seqlens)
    if ref_logprobs is None and o.kl_coef and not o.has_exact_kl:
        raise ValueError("ref_logprobs is needed when objective.kl_coef is above 0")
    ratios = o.rollout_corrections
    if rollout_logprobs is None and ratios:
        raise ValueError("rollout_logprobs is needed when objective.rollout_correction is set")
    off_policy_mask = o.off_policy_threshold is not None
    if rollout_logprobs is not None and not (ratios or off_policy_mask):
        raise ValueError(
            "rollout_logprobs has no effect unless objective.rollout_correction or "
            "objective.off_policy_threshold is set"
        )
    sequence_level = o.level != "token" or any(c.level != "token" for c in ratios)
    sequence_level = sequence_level or off_policy_mask or o.gamma_weights is not None
    if packed and bounds is None and sequence_level:
        raise ValueError("cu_seqlens is needed for sequence-level ratios of packed tokens")

    def per_token(name: str, value: object) -> Tensor | None:
        if value is None:
            return None
        padded = as_padded(name, value, tokens, dtype)
        return padded.detach() if padded.requires_grad else padded

    def constant(name: str, value: object) -> Tensor:
        result = checked_constant(name, value, tokens, bounds)
        return result if _ready(result, dtype) else saveable(result.to(dtype).contiguous())

    aggregations = term_aggregations(
        o, tokens, bounds, normalizer=normalizer, group_size=group_size, group_ids=group_ids
    )
    weights, kl_weights, entropy_weights, active = term_weights(
        (mask[None] if packed else mask).contiguous(),
        bounds,
        aggregations,
        backend,
        token_ids if token_ids is None or token_ids.dim() == 2 else token_ids[None],
        ignore_index,
        dtype,
    )
    arguments = LossArguments(
        constant("advantages", advantages),
        weights,
        kl_weights,
        entropy_weights,
        None if policy_weights is None else constant("policy_weights", policy_weights),
        per_token("old_logprobs", old_logprobs),
        per_token("ref_logprobs", ref_logprobs),
        bounds,
    )
    rollout = per_token("rollout_logprobs", rollout_logprobs)
    if ref_logprobs is not None and o.kl_coef is None and not callable(o.surrogate):
        raise ValueError(
            "ref_logprobs has no effect on the loss unless objective.kl_coef is set, for example "
            "Objective.preset('grpo', kl_coef=0.04); kl_coef=0.0 computes the metric kl alone"
        )
    of_others = (arguments.old_logprobs, arguments.ref_logprobs, rollout)
    for name, values in zip(("old", "ref", "rollout"), of_others, strict=True):
        if values is not None:
            refuse_no_logprobs(f"{name}_logprobs", values, active)
    corrections = WeightCorrections(o, ratios, rollout, aggregations.entropy)
    return LossInputs(o, arguments, saveable(active), corrections, backend)


def _ready(value: Tensor, dtype: torch.dtype) -> bool:
    """Return whether a tensor needs neither a cast nor a copy; much cheaper than trying."""
    return (
        type(value) is Tensor
        and value.dtype == dtype
        and value.is_contiguous()
        and not torch.compiler.is_compiling()
        and not value.is_inference()
    )


def as_padded(name: str, value: object, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor per token as contiguous `[B, T]`; packed `[N]` becomes `[1, N]`."""
    result = same_shape(name, floating(name, value), like, "logprobs")
    result = result[None] if result.dim() == 1 else result
    if _ready(result, dtype):
        return result
    return saveable(result.to(dtype).contiguous())


def checked_constant(name: str, value: object, tokens: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Check a constant of the loss; return it per sequence `[S]` or per token `[B, T]`."""
    result = floating(name, value)
    result = result.detach() if result.requires_grad else result
    on_device(name, result, tokens, "logprobs")
    if result.shape == tokens.shape:
        return result[None] if result.dim() == 1 else result
    has_sequences = tokens.dim() == 2 or cu_seqlens is not None
    count = tokens.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if has_sequences and result.shape == (count,):
        return result
    expected = f"{tuple(tokens.shape)}" + (f" or ({count},)" if has_sequences else "")
    mend = f": pass {name}.squeeze(-1)" if result.shape == (count, 1) else ""
    raise ValueError(f"{name} must have shape {expected}, got {tuple(result.shape)}{mend}")

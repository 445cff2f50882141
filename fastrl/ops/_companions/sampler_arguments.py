"""Checks of the sampler's most likely tokens, and their conversion for operators."""

from __future__ import annotations

from math import exp, inf

import torch
from torch import Tensor

from fastrl.checks import can_read, on_device, saveable
from fastrl.objective import Objective
from fastrl.objective.rollout_correction import RolloutCorrection
from fastrl.ops._arguments import NO_SAMPLER, SamplerArguments
from fastrl.ops.top_k_logprobs import TopKLogprobs, check_fields
from fastrl.reference.objectives import MAX_LOG_RATIO
from fastrl.reference.rollout_correction import numbers_of


def sampler_arguments(
    top: object, objective: Objective, old_logprobs: object, token_ids: Tensor
) -> SamplerArguments:
    """Check `rollout_top_k` for rows with these tokens, but not its values."""
    if top is None:
        if objective.score_centering:
            raise ValueError("rollout_top_k is needed when objective.score_centering is set")
        return NO_SAMPLER
    if not isinstance(top, TopKLogprobs):
        raise TypeError(f"rollout_top_k must be TopKLogprobs or None, got {type(top).__name__}")
    if not objective.score_centering:
        raise ValueError("rollout_top_k has no effect unless objective.score_centering is set")
    weights = [*objective.sampler_weights]
    if old_logprobs is not None and objective.surrogate in ("ppo_clip", "sapo"):
        raise ValueError(
            "old_logprobs must be None with objective.score_centering and surrogate "
            f"{objective.surrogate}: off policy with a clip the term has no agreed form"
        )
    if old_logprobs is not None and weights:
        raise ValueError(
            "old_logprobs must be None with objective.score_centering and a rollout correction at "
            "level 'token': it would weigh tokens by the old policy, of which the sampler's other "
            "tokens are unknown"
        )
    if old_logprobs is not None and objective.surrogate == "cispo":
        weights = _clipped_ratio(objective)
    check_fields(top, "rollout_top_k")
    for name, value in top._asdict().items():
        on_device(f"rollout_top_k.{name}", value, token_ids, "token_ids")
    rows = token_ids.numel()
    flat = TopKLogprobs(*(x.flatten(0, -2) for x in top))
    packed = token_ids.shape[1:] if token_ids.shape[0] == 1 else token_ids.shape
    if top.token_ids.dim() == 3 and top.token_ids.shape[:2] != token_ids.shape:
        raise ValueError(
            f"rollout_top_k.token_ids must have shape {tuple(packed)} and K, got "
            f"{tuple(top.token_ids.shape)}"
        )
    if len(flat.token_ids) != rows:
        raise ValueError(
            f"rollout_top_k.token_ids must have {rows} rows for {rows} tokens, got "
            f"{len(flat.token_ids)}"
        )
    ids = saveable(flat.token_ids.to(torch.int64).contiguous())
    return SamplerArguments(ids, saveable(flat.logprobs.detach().contiguous()), numbers_of(weights))


def _clipped_ratio(objective: Objective) -> list[RolloutCorrection]:
    """Return the weight of `cispo`, whose log-ratio may be clamped, too."""
    c = objective.arguments.coefficients
    low = max(0.0, 1 - c.clip_low, exp(-c.log_ratio_low))
    unbounded = c.log_ratio_high > MAX_LOG_RATIO  # as in a correction with high=inf
    high = min(1 + c.clip_high, inf if unbounded else exp(c.log_ratio_high))
    return [RolloutCorrection(low=low, high=high)] if low < high else []  # 1, if both are


def check_sampler(sampler: SamplerArguments, active: Tensor, vocabulary: int) -> None:
    """Raise on a CPU if an active row `[N]` has invalid ids or log-probabilities."""
    ids, given = sampler.token_ids, sampler.logprobs
    if ids is None or given is None or not (can_read(ids) and can_read(active)):
        return
    ids, logprobs = ids[active], given[active].double()
    outside = (ids < -1) | (ids >= vocabulary)
    if bool(outside.any()):
        raise ValueError(
            f"rollout_top_k.token_ids must lie in [0, {vocabulary}), or be -1 for no token, got "
            f"{int(ids[outside][0])}"
        )
    ordered = ids.sort(-1).values
    repeated = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if bool(repeated.any()):
        token = int(ordered[:, 1:][repeated][0])
        raise ValueError(f"rollout_top_k.token_ids must not repeat an id in a row, got {token}")
    # logarithms are rounded: in bfloat16 the mass may be some percent above 1
    most = torch.where(ids < 0, 0.0, logprobs.exp()).sum(-1)
    limit = 1 + max(1e-3, 16 * torch.finfo(given.dtype).eps)
    if bool((most > limit).any()):
        raise ValueError(
            "rollout_top_k.logprobs must be log-probabilities, which sum to at most 1, "
            f"got {float(most.max()):.6g}"
        )

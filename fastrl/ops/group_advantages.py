"""Group-relative advantages."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from fastrl import reference
from fastrl.backend import Backend, resolve
from fastrl.checks import (
    as_mask,
    can_read,
    floating,
    integer,
    number,
    one_of,
    same_shape,
    whole,
)
from fastrl.contract import BASELINES, SCALES, SINGLETONS, Baseline, Scale, Singleton
from fastrl.library import operators
from fastrl.objective.presets import ADVANTAGE_CONVENTIONS, Convention
from fastrl.ops._process_groups import checked_group, concatenated, gathered
from fastrl.ops.token_weights import check_group_size
from fastrl.reference.groups import dense_index


class GroupAdvantages(NamedTuple):
    """Advantages and statistics of each reward's group, in the shape of the rewards.

    All are 0 or False for a completion that is left out.

    Attributes:
        advantages: the advantage of each reward.
        mean: the mean reward of the group.
        std: the standard deviation of the group's rewards.
        informative: bool, False if all rewards of the group are equal.

    Examples:
        >>> import torch, fastrl
        >>> fastrl.group_advantages(torch.tensor([1.0, 1.0]), group_size=2).informative
        tensor([False, False])
    """

    advantages: Tensor
    mean: Tensor
    std: Tensor
    informative: Tensor


def group_advantages(
    rewards: Tensor,
    *,
    mask: Tensor | None = None,
    group_size: int | None = None,
    group_ids: Tensor | None = None,
    baseline: Baseline = "mean",
    scale: Scale = "group",
    correction: float | None = None,
    eps: float | None = None,
    singleton: Singleton | None = None,
    convention: Convention = "fastrl",
    process_group: torch.distributed.ProcessGroup | None = None,
    backend: Backend = "auto",
) -> GroupAdvantages:
    """Return the advantage of each reward within its group of responses to the same prompt.

        A = (r - baseline) / (scale + eps)

    The defaults are GRPO (Shao et al. 2024, arXiv 2402.03300) with TRL's eps and unbiased std. Dr.
    GRPO (arXiv 2503.20783) is `scale="none"`; RLOO (Ahmadian et al. 2024, arXiv 2402.14740) is
    `baseline="leave_one_out", scale="none"`; MaxRL (arXiv 2602.02710) is `scale="mean", eps=1e-6`.
    The rewards of MaxRL must be at least 0: its advantages grow without bound as the mean nears 0,
    and a negative mean reverses their signs. A CPU refuses negative rewards; a GPU does not read
    them. Mean and variance are computed in two passes in float64. A group of equal rewards gives
    exactly 0 (unless `baseline="none"`).

    A completion with `mask` 0 is left out of all statistics, whatever its reward, and has advantage
    0; its group consists of the others. A reward that is NaN is left out by `convention="trl"`, as
    TRL does with a reward of None. Otherwise a non-finite reward makes the results of its own group
    NaN, and of no other group.

    With `process_group` the batch consists of the rewards of all its ranks, concatenated in rank
    order, and each rank gets exactly its part of the result for this batch. A group may be spread
    over ranks: `group_size` counts consecutive rewards of the concatenation, and equal `group_ids`
    on different ranks are one group. Each rank computes the whole batch, since rewards are few.

    Args:
        rewards: one per completion, `[N]`, or `[P, G]` for P groups of G.
        mask: 0/1, the shape of `rewards`: which completions have a reward; None means all.
        group_size: the number of consecutive rewards in a group (not needed for `[P, G]`).
        group_ids: integers, the shape of `rewards`: the group of each reward, in any order.
        baseline: `mean`, `leave_one_out` (the mean of the other rewards) or `none`.
        scale: the divisor: the std of the `group` or of the whole `batch`, the `mean` of the group,
            or `none`.
        correction: the number subtracted from n in the variance, see `torch.std`; None means 1.
        eps: added to the divisor; None means the value of the convention.
        singleton: the advantage in a group of one: `zero`, or the reward itself (`raw`); None
            means the value of the convention, and refuses groups of one if that is `zero`.
        convention: the trainer whose `eps` and `singleton` are the defaults: `fastrl` and `trl`
            1e-4, zero; `verl` 1e-6, raw; `openrlhf` 1e-9, zero.
        process_group: the ranks that share the batch, each with any number of rewards, even none;
            None is this process alone. All ranks must make this call together, with the same
            options and dtype. It takes two all-gathers and one wait for the number of rewards of
            each rank.
        backend: `auto`, or the backend to use.

    Returns:
        `GroupAdvantages`, fp32 (fp64 from fp64), without gradient.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has the wrong shape or value, no groups are given, each group has
            one reward by `group_size` or shape and would have the advantage 0, or `process_group`
            has no effect: rewards `[P, G]` are whole groups, which only `scale="batch"` relates to
            other groups.

    Examples:
        >>> import torch, fastrl
        >>> rewards = torch.tensor([1.0, 0.8, 0.4, 0.2])
        >>> fastrl.group_advantages(rewards, group_size=4, correction=0, eps=0).advantages
        tensor([ 1.2649,  0.6325, -0.6325, -1.2649])
        >>> missing = torch.tensor([1.0, torch.nan, 0.0, 1.0])
        >>> fastrl.group_advantages(
        ...     missing, mask=~missing.isnan(), group_size=4, scale="none"
        ... ).advantages
        tensor([ 0.3333,  0.0000, -0.6667,  0.3333])
    """
    r = floating("rewards", rewards).detach()
    if r.dim() not in (1, 2):
        raise ValueError(f"rewards must have shape [N] or [P, G], got {tuple(r.shape)}")
    one_of("baseline", baseline, BASELINES)
    one_of("scale", scale, SCALES)
    defaults = ADVANTAGE_CONVENTIONS[one_of("convention", convention, tuple(ADVANTAGE_CONVENTIONS))]
    correction = number("correction", defaults[0] if correction is None else correction, low=0.0)
    eps = number("eps", defaults[1] if eps is None else eps, low=0.0)
    rule = one_of("singleton", defaults[2] if singleton is None else singleton, SINGLETONS)
    group = checked_group(process_group)
    if group_ids is not None:
        if group_size is not None:
            raise ValueError("group_size and group_ids cannot both be given")
        ids = same_shape("group_ids", integer("group_ids", group_ids), r, "rewards")
        ids, size = ids.reshape(-1).to(torch.int64).contiguous(), 0
    else:
        if group_size is None and r.dim() == 1:
            raise ValueError("group_size or group_ids is needed for rewards of shape [N]")
        if group_size is None:
            group_size = max(r.shape[1], 1)
        if group is None or r.dim() == 2:
            size = check_group_size(group_size, r.numel(), "rewards")
        else:
            size = whole("group_size", group_size, low=1)
        if r.dim() == 2 and size != max(r.shape[1], 1):
            mend = ": pass rewards.squeeze(-1)" if r.shape[1] == 1 else ""
            raise ValueError(
                f"group_size must be {r.shape[1]} for rewards [P, G], got {size}{mend}"
            )
        ids = None
        if isinstance(size, torch.SymInt):  # as an argument of the operator it would be specialized
            ids, size = torch.arange(r.numel(), device=r.device) // size, 0
    if group is not None and r.dim() == 2 and ids is None and scale != "batch":
        raise ValueError(
            f"process_group has no effect with rewards [P, G] and scale {scale}: each row is a "
            "whole group, which only scale batch relates to groups of other ranks"
        )
    flat = r.reshape(-1).to(torch.float64 if r.dtype == torch.float64 else torch.float32)
    valid = None if mask is None else as_mask("mask", mask, r, "rewards").reshape(-1)
    mine = slice(None)
    if group is not None:
        flat, valid, ids, size, mine = _of_all_ranks(flat, valid, ids, size, group)
    if singleton is None and rule == "zero" and size == 1 and flat.numel():
        _refuse_groups_of_one(r)
    valid = _rewarded(flat, valid, convention)
    if valid is not None:
        flat, ids, size = _left_out(flat, valid, ids, size)
    if scale == "mean" and can_read(flat) and bool((flat < 0).any()):
        raise ValueError(
            "rewards must be at least 0 with scale 'mean', which divides by the mean of the group; "
            f"got {flat[flat < 0][0].item():g}"
        )
    chosen = resolve(backend, r.device, r.dtype)
    if chosen == "reference":
        if ids is None:
            ids = torch.arange(flat.shape[0], device=r.device) // size
        result = reference.group_advantages(
            flat,
            ids,
            baseline=baseline,
            scale=scale,
            correction=correction,
            eps=eps,
            singleton=rule,
        )
    else:
        result = cast(
            "tuple[Tensor, Tensor, Tensor, Tensor]",
            operators(chosen).group_advantages_fwd(
                flat.contiguous(),
                ids,
                size,
                BASELINES.index(baseline),
                SCALES.index(scale),
                correction,
                eps,
                SINGLETONS.index(rule),
            ),
        )
    outputs = (
        result
        if valid is None
        else (output.where(valid, torch.zeros_like(output)) for output in result)
    )
    return GroupAdvantages(*(output[mine].reshape(r.shape) for output in outputs))


def _refuse_groups_of_one(rewards: Tensor) -> None:
    given, mend = "group_size=1", ""
    if rewards.dim() == 2:
        given = f"rewards of shape {tuple(rewards.shape)}"
        mend = "; if each row is one completion, pass rewards.squeeze(-1) and group_size"
    raise ValueError(
        f"groups must have at least 2 rewards unless singleton is given, got {given}{mend}"
    )


def _rewarded(rewards: Tensor, valid: Tensor | None, convention: str) -> Tensor | None:
    """Return which completions count, or None if all are known to count."""
    if convention == "trl":
        valid = ~rewards.isnan() if valid is None else valid & ~rewards.isnan()
    return None if valid is None or (can_read(valid) and bool(valid.all())) else valid


def _left_out(
    rewards: Tensor, valid: Tensor, ids: Tensor | None, size: int
) -> tuple[Tensor, Tensor, int]:
    """Return rewards and groups in which the left-out completions form a group of NaN.

    Such a group affects no other and is not part of the deviation of the batch.
    """
    index = (
        torch.arange(rewards.shape[0], device=rewards.device) // size
        if ids is None
        else dense_index(ids)
    )
    return torch.where(valid, rewards, torch.nan), torch.where(valid, index, -1), 0


def _of_all_ranks(
    rewards: Tensor,
    valid: Tensor | None,
    ids: Tensor | None,
    size: int,
    group: torch.distributed.ProcessGroup,
) -> tuple[Tensor, Tensor | None, Tensor | None, int, slice]:
    """Return all ranks' rewards `[N]`, mask, groups and group size, and the slice of this rank.

    The same call on the same rewards gives the same bits on every rank as in one process.
    """
    # size 0: groups by ids
    here = rewards.new_tensor([rewards.shape[0], size, valid is not None], dtype=torch.int64)
    counts, sizes, masked = zip(*gathered(here, group).tolist(), strict=True)
    agreed = {size for count, size in zip(counts, sizes, strict=True) if count} or {size}
    if len(agreed) > 1:
        given = ", ".join(f"group_size={size}" if size else "group_ids" for size in sizes)
        raise ValueError(
            f"all ranks of process_group must give the same group_size, or group_ids; got {given}"
        )
    size = agreed.pop()
    if size:
        check_group_size(size, sum(counts), "rewards of all ranks")
    bits = rewards.double().view(torch.int64)  # float64 holds every float32
    rows = [
        bits,
        torch.zeros_like(bits) if ids is None else ids,
        torch.ones_like(bits) if valid is None else valid.to(torch.int64),
    ]
    bits, ids, known = concatenated(torch.stack(rows, dim=1), counts, group).unbind(1)
    first = sum(counts[: torch.distributed.get_rank(group)])
    return (
        bits.contiguous().view(torch.float64).to(rewards.dtype),
        known.bool() if any(masked) else None,
        None if size else ids.contiguous(),
        size,
        slice(first, first + rewards.shape[0]),
    )

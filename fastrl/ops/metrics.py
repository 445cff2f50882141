"""The metrics of a loss over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from fastrl.checks import floating, one_of
from fastrl.contract import METRICS

_POLICY, _MAX, _MIN, _TOKENS = (
    METRICS.index(name) for name in ("policy_loss", "ratio_max", "ratio_min", "active_tokens")
)


def reduce_metrics(
    metrics: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]],
    process_group: torch.distributed.ProcessGroup | None = None,
    *,
    policy_loss: Literal["sum", "mean"] = "sum",
) -> dict[str, Tensor]:
    """Return the metrics of all micro-batches and ranks together, equal on every rank.

    `active_tokens` is summed, `ratio_max` and `ratio_min` are the extremes of those that have an
    active token, and every other metric is the mean over all active tokens. `policy_loss` is
    summed, which is right where a global `normalizer` made each a share of the whole; `"mean"`
    weighs it by active tokens, which is right for local token means. Two all-reduces of one small
    vector each, no host synchronisation.

    Args:
        metrics: `PolicyLoss.metrics`, or a sequence of them, one of each micro-batch.
        process_group: the ranks; None is the default group where `torch.distributed` is
            initialised, and else this process alone.
        policy_loss: `sum` or `mean`.

    Returns:
        0-d tensors by the same names, fp32 (fp64 from fp64), on the device of the metrics.

    Raises:
        TypeError: `metrics` are no metrics, or `process_group` is no process group.
        ValueError: there are none, or they have other names (those of `metrics=False` have none).

    Example:
        >>> import torch, fastrl
        >>> first, second = (
        ...     fastrl.policy_loss(torch.zeros(1, n), torch.ones(1), torch.ones(1, n)).metrics
        ...     for n in (2, 3)
        ... )
        >>> fastrl.reduce_metrics([first, second])["active_tokens"]
        tensor(5.)
    """
    one_of("policy_loss", policy_loss, ("sum", "mean"))
    table = torch.stack([_row(part) for part in _parts(metrics)])
    dtype, table = table.dtype, table.double()
    tokens = table[:, _TOKENS, None]
    some = tokens > 0

    sums = torch.where(some, table * tokens, 0.0)
    sums[:, _TOKENS] = table[:, _TOKENS]
    if policy_loss == "sum":
        sums[:, _POLICY] = table[:, _POLICY]
    # a mean may be NaN, an extreme may not: gloo and NCCL order NaN as they like
    extremes = torch.stack([table[:, _MAX], -table[:, _MIN]], dim=1)
    extremes = torch.where(some & ~extremes.isnan(), extremes, -torch.inf).amax(0)
    total = sums.sum(0)
    group = _group(process_group)
    if group is not None:
        torch.distributed.all_reduce(total, group=group)
        torch.distributed.all_reduce(extremes, torch.distributed.ReduceOp.MAX, group=group)

    count = total[_TOKENS]
    result = total / count.clamp(min=1)
    result[_TOKENS] = count
    if policy_loss == "sum":
        result[_POLICY] = total[_POLICY]
    for index, extreme in ((_MAX, extremes[0]), (_MIN, -extremes[1])):
        broken = total[index].isnan()
        result[index] = torch.where(broken, total[index], torch.where(count > 0, extreme, 0.0))
    return dict(zip(METRICS, result.to(dtype).unbind(), strict=True))


def _parts(metrics: object) -> Sequence[object]:
    if isinstance(metrics, Mapping):
        return [metrics]
    if not isinstance(metrics, Sequence) or isinstance(metrics, str):
        raise TypeError(
            "metrics must be the metrics of a policy loss or a sequence of them, "
            f"got {type(metrics).__name__}"
        )
    if not metrics:
        raise ValueError("metrics must hold those of at least one micro-batch, got none")
    return metrics


def _row(metrics: object) -> Tensor:
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics must be the metrics of a loss, got {type(metrics).__name__}")
    if set(metrics) != set(METRICS):
        raise ValueError(
            f"metrics must have the names {', '.join(METRICS)}; "
            f"got {', '.join(map(str, metrics)) or 'none'}"
        )
    for name in METRICS:
        if floating(f"metrics[{name!r}]", metrics[name]).dim() != 0:
            raise ValueError(
                f"metrics[{name!r}] must be a 0-d tensor, got shape {tuple(metrics[name].shape)}"
            )
    return torch.stack([metrics[name].detach() for name in METRICS])


def _group(process_group: object) -> torch.distributed.ProcessGroup | None:
    if process_group is None:
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        return torch.distributed.group.WORLD if distributed else None
    if not isinstance(process_group, torch.distributed.ProcessGroup):
        raise TypeError(
            f"process_group must be a ProcessGroup or None, got {type(process_group).__name__}"
        )
    return process_group

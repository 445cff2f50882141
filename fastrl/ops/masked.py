"""Masked mean and whitening."""

from __future__ import annotations

import torch
from torch import Tensor

from fastrl.backend import Backend, torch_only
from fastrl.checks import as_mask, flag, floating, whole
from fastrl.ops._process_groups import checked_group, total


def masked_mean(
    x: Tensor, mask: Tensor, *, dim: int | None = None, backend: Backend = "auto"
) -> Tensor:
    """Return the mean of x over the entries where the mask is 1, or 0 if there are none.

        sum(mask * x) / sum(mask)

    This is `masked_mean` of TRL and verl, except that NaN and infinity in masked entries have no
    effect.

    Args:
        x: values of any shape.
        mask: 0/1, the shape of `x`.
        dim: the dimension to reduce, or None for all dimensions.
        backend: `auto` or `reference`; the function is plain torch on every device.

    Returns:
        The mean, 0-d or the shape of `x` without `dim`, fp32 (fp64 from fp64), differentiable in
        `x`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has the wrong shape, or `dim` is out of range.

    Examples:
        >>> import torch, fastrl
        >>> x = torch.tensor([[1.0, float("nan")], [3.0, 5.0]])
        >>> fastrl.masked_mean(x, torch.tensor([[1, 0], [1, 1]]))
        tensor(3.)
    """
    torch_only(backend)
    values, active = _masked(x, mask)
    if dim is None:
        return values.sum() / active.sum().clamp(min=1)
    dim = whole("dim", dim)
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim must lie in [{-x.dim()}, {x.dim()}), got {dim}")
    return values.sum(dim) / active.sum(dim).clamp(min=1)


def whiten(
    x: Tensor,
    mask: Tensor,
    *,
    shift_mean: bool = True,
    process_group: torch.distributed.ProcessGroup | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Return x with mean 0 and variance 1 over the entries where the mask is 1, and 0 elsewhere.

        (x - mean) / sqrt(var + 1e-8)

    The variance is unbiased (divided by n - 1), as in `masked_whiten` of TRL and verl. Mean and
    variance are computed in two passes in float64. If the mask is 1 for fewer than two entries, the
    variance is 0.

    Args:
        x: values of any shape.
        mask: 0/1, the shape of `x`.
        shift_mean: whether to subtract the mean; False only scales.
        process_group: the ranks whose entries are whitened together, with any number of entries on
            each; None is this process alone. The statistics have the same bits on all ranks. All
            ranks must make this call together; it takes two all-gathers of one or two numbers.
        backend: `auto` or `reference`; the function is plain torch on every device.

    Returns:
        fp32 (fp64 from fp64), the shape of `x`, without gradient.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has the wrong shape.

    Examples:
        >>> import torch, fastrl
        >>> fastrl.whiten(torch.tensor([1.0, 2.0, 3.0, 99.0]), torch.tensor([1, 1, 1, 0]))
        tensor([-1.,  0.,  1.,  0.])
    """
    torch_only(backend)
    flag("shift_mean", shift_mean)
    group = checked_group(process_group)
    values, active = _masked(x.detach() if isinstance(x, Tensor) else x, mask)
    entries = values.double()
    count, added = total(torch.stack([active.sum().double(), entries.sum()]), group).unbind()
    mean = added / count.clamp(min=1)
    centered = torch.where(active, entries - mean, 0.0)
    variance = total(centered.square().sum(), group) / (count - 1).clamp(min=1)
    scaled = centered * torch.rsqrt(variance + 1e-8)
    white = torch.where(active, scaled if shift_mean else scaled + mean, 0.0)
    return white.to(values.dtype)


def _masked(x: object, mask: object) -> tuple[Tensor, Tensor]:
    values = floating("x", x)
    active = as_mask("mask", mask, values, "x")
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    return torch.where(active, values.to(dtype), 0.0), active

"""Sums and concatenations over the ranks of a process group, bit for bit equal on all ranks.

Terms are gathered and added in rank order. An all-reduce would leave the order to the communication
library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor


def checked_group(
    process_group: object, name: str = "process_group"
) -> torch.distributed.ProcessGroup | None:
    """Return `process_group` if it is one, or None."""
    # torch may have been built without distributed
    kind = getattr(torch.distributed, "ProcessGroup", ())
    if process_group is None or isinstance(process_group, kind):
        return process_group
    raise TypeError(f"{name} must be a ProcessGroup or None, got {type(process_group).__name__}")


def size_of(group: torch.distributed.ProcessGroup | None) -> int:
    """Return the number of ranks; None is this process alone."""
    return 1 if group is None else torch.distributed.get_world_size(group)


def gathered(x: Tensor, group: torch.distributed.ProcessGroup | None) -> Tensor:
    """Return the tensors of all ranks, `[R, *shape]`; `x` has one shape and dtype on all of them.

    It takes one collective, and does not wait for the device.
    """
    if group is None:
        return x[None]
    result, work = start_gather(x.contiguous(), group)
    work.wait()
    return result


def start_gather(
    x: Tensor, group: torch.distributed.ProcessGroup
) -> tuple[Tensor, torch.distributed.Work]:
    """Start `gathered`; return its result and the work to wait for; `x` must exist until then."""
    result = x.new_empty((size_of(group), *x.shape))
    # torch 2.13 warns of all_gather_into_tensor, and earlier versions lack its replacement
    work = torch.distributed.all_gather(list(result.unbind()), x, group=group, async_op=True)
    return result, cast("torch.distributed.Work", work)


def total(x: Tensor, group: torch.distributed.ProcessGroup | None) -> Tensor:
    """Return the sum over the ranks, in their order."""
    return x if group is None else gathered(x, group).sum(0)


def concatenated(x: Tensor, counts: Sequence[int], group: torch.distributed.ProcessGroup) -> Tensor:
    """Return the rows of all ranks in rank order; `counts` has the number of rows of each."""
    rows = x.new_zeros((max(counts), *x.shape[1:]))
    rows[: x.shape[0]] = x
    parts = gathered(rows, group).unbind()
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

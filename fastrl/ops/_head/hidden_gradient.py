"""The gradient of the hidden states, written chunk by chunk and summed over ranks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor


class HiddenGradient:
    """The gradient of all hidden states, `[N, H]`.

    With a process group each chunk is summed over its ranks before it is rounded, while the GEMMs
    of the next one run.
    """

    def __init__(self, total: Tensor, group: dist.ProcessGroup | None) -> None:
        """Write into `total`, zeros in the dtype of the result."""
        self._total, self._group = total, group
        self._sending: tuple[slice | Tensor, Tensor, Any] | None = None

    def put(self, rows: slice | Tensor, gradient: Tensor) -> None:
        """Write the gradient of rows; with a process group take ownership of the tensor."""
        if self._group is None:
            self._total[rows] = gradient.to(self._total.dtype)
            return
        self._finish()
        work = dist.all_reduce(gradient, group=self._group, async_op=True)
        self._sending = rows, gradient, work

    def put_same(self, rows: slice | Tensor, value: Tensor) -> None:
        """Write a value that is already the same on all ranks."""
        self._total[rows] = value.to(self._total.dtype)

    def result(self) -> Tensor:
        """Return the gradient."""
        self._finish()
        return self._total

    def _finish(self) -> None:
        if self._sending is None:
            return
        rows, gradient, work = self._sending
        work.wait()
        self._total[rows] = gradient.to(self._total.dtype)
        self._sending = None

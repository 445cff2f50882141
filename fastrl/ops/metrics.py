"""The metrics of a loss, and their reduction over micro-batches and ranks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from typing import Literal

import torch
from torch import Tensor
from torch.utils import _pytree

from fastrl.checks import floating, on_device, one_of
from fastrl.contract import METRICS
from fastrl.ops._process_groups import checked_group, gathered, size_of

#: Further metrics of a loss with a teacher: means over the active tokens.
TEACHER_METRICS = ("divergence", "teacher_entropy", "teacher_agreement")
#: Further metrics of a loss with score centering.
CENTERING_METRICS = ("centering_mass", "head_kl", "zero_weight_fraction")


class LossMetrics(Mapping[str, Tensor]):
    """The metrics of a policy loss by name: 0-d tensors, views of a vector on the device.

    The mapping is read-only. Pickle and `torch.save` store an `OrderedDict` of tensors, which
    `torch.load(weights_only=True)` accepts.

    Attributes:
        vector: all metrics, in the order of their names; 0 in place of a `kl` without a reference.
        has_kl: whether `kl` is one of the names.
        has_centering: whether those of score centering are.

    Examples:
        >>> import torch, fastrl
        >>> metrics = fastrl.policy_loss(torch.zeros(1, 2), torch.ones(1), torch.ones(1, 2)).metrics
        >>> metrics["ratio_mean"]
        tensor(1.)
        >>> metrics.to_floats()["active_tokens"]
        2.0
    """

    __slots__ = ("has_centering", "has_kl", "vector")

    def __init__(
        self,
        values: Tensor | Mapping[str, Tensor],
        *,
        has_kl: bool = True,
        has_centering: bool = False,
    ) -> None:
        """Take the vector, or a mapping, in which `kl` and the last metrics may be missing."""
        if isinstance(values, Mapping):
            names, has_kl = _names(values), "kl" in values
            has_centering = CENTERING_METRICS[0] in names
            first = torch.as_tensor(values[METRICS[0]])
            absent = torch.zeros_like(first)
            values = torch.stack([torch.as_tensor(values.get(name, absent)) for name in names])
        self.vector, self.has_kl, self.has_centering = values, has_kl, has_centering

    def _order(self) -> tuple[str, ...]:
        """Return the names of the vector, `kl` among them."""
        further = len(self.vector) - len(METRICS)
        if not self.has_centering:
            return (*METRICS, *TEACHER_METRICS[:further])
        further -= len(CENTERING_METRICS)
        return (*METRICS, *TEACHER_METRICS[:further], *CENTERING_METRICS)

    def __getitem__(self, name: str) -> Tensor:
        if name not in list(self):
            raise KeyError(name)
        return self.vector[self._order().index(name)]

    def __iter__(self) -> Iterator[str]:
        return iter([n for n in self._order() if self.has_kl or n != "kl"])

    def __len__(self) -> int:
        return len(self.vector) - (not self.has_kl)

    # before torch 2.12 torch.compile cannot unpack the views that Mapping returns

    def keys(self) -> KeysView[str]:
        """Return the names."""
        return dict.fromkeys(self).keys()

    def values(self) -> ValuesView[Tensor]:
        """Return the metrics, in the order of the names."""
        return self._plain().values()

    def items(self) -> ItemsView[str, Tensor]:
        """Return pairs of a name and its metric."""
        return self._plain().items()

    def _plain(self) -> dict[str, Tensor]:
        return {name: self[name] for name in self}

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> tuple[object, ...]:
        # torch.load(weights_only=True) would reject this class
        return OrderedDict, (), None, None, iter(self.items())

    def __copy__(self) -> LossMetrics:
        return self._like(self.vector)

    def _like(self, vector: Tensor) -> LossMetrics:
        return LossMetrics(vector, has_kl=self.has_kl, has_centering=self.has_centering)

    def __deepcopy__(self, memo: dict[int, object]) -> LossMetrics:
        return self._like(self.vector.clone())

    def to_floats(self) -> dict[str, float]:
        """Return the metrics as Python floats, by a single transfer from the device.

        Returns:
            A dict from names to floats.

        Examples:
            >>> import torch, fastrl
            >>> result = fastrl.policy_loss(torch.zeros(1, 2), torch.ones(1), torch.ones(1, 2))
            >>> result.metrics.to_floats()["ratio_mean"]
            1.0
        """
        numbers = dict(zip(self._order(), self.vector.tolist(), strict=True))
        return {name: numbers[name] for name in self}


_pytree.register_pytree_node(
    LossMetrics,
    lambda metrics: ([metrics.vector], (metrics.has_kl, metrics.has_centering)),
    lambda vector, has: LossMetrics(*vector, has_kl=has[0], has_centering=has[1]),
    serialized_type_name="fastrl.LossMetrics",
)


def reduce_metrics(
    metrics: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]],
    process_group: torch.distributed.ProcessGroup | None = None,
    *,
    policy_loss: Literal["sum", "mean", "rank-mean"] = "sum",
) -> LossMetrics:
    """Return metrics over all micro-batches and ranks, equal on every rank.

    `active_tokens` is summed, `ratio_max` and `ratio_min` are the extremes over micro-batches with
    an active token, and every other metric except `policy_loss` is the mean over all active tokens.
    `kl` is NaN if only some ranks have one. The call takes one all-gather of a small vector and no
    host synchronization.

    Args:
        metrics: `PolicyLoss.metrics`, 0-d tensors, or a sequence of them, one per micro-batch.
        process_group: the ranks; None is the default group if `torch.distributed` is initialized,
            else this process alone.
        policy_loss: how `policy_loss` is reduced. `sum` fits losses with a global `normalizer`.
            `rank-mean` sums over micro-batches and averages over ranks, which fits a normalizer
            that was divided by the number of ranks (`global_normalizer` with `gradients="mean"`).
            `mean` averages with the active tokens as weights, which fits local token means.

    Returns:
        The metrics, 0-d tensors, as a `LossMetrics`, fp32 (fp64 from fp64), on their device.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the sequence is empty, or the names are wrong (a loss with `metrics=False` has
            none).

    Examples:
        >>> import torch, fastrl
        >>> first, second = (
        ...     fastrl.policy_loss(torch.zeros(1, n), torch.ones(1), torch.ones(1, n)).metrics
        ...     for n in (2, 3)
        ... )
        >>> fastrl.reduce_metrics([first, second])["active_tokens"]
        tensor(5.)
    """
    one_of("policy_loss", policy_loss, ("sum", "mean", "rank-mean"))
    first, *others = parts = [_checked(item) for item in _sequence(metrics)]
    for number, part in enumerate(others, 1):
        on_device(f"metrics[{number}]", part.vector, first.vector, "the first")
        if list(part) != list(first):
            differing = ", ".join(sorted(set(part) ^ set(first)))
            raise ValueError(
                f"metrics[{number}] must have the {len(first)} names of the first, got "
                f"{len(part)}: all or none must have {differing}, from a teacher, a reference or "
                "score centering"
            )
    table = torch.stack([part.vector.detach() for part in parts])
    dtype, table = table.dtype, table.double()
    columns = dict(zip(METRICS, table.unbind(1), strict=False))
    tokens = columns["active_tokens"][:, None]
    has_tokens = tokens > 0

    def named(vector: Tensor) -> LossMetrics:
        return LossMetrics(vector, has_centering=first.has_centering)

    sums = named(torch.where(has_tokens, table * tokens, 0.0).sum(0))
    sums["active_tokens"].copy_(columns["active_tokens"].sum())
    if policy_loss != "mean":
        sums["policy_loss"].copy_(columns["policy_loss"].sum())
    # NaN goes through the sums alone: it must not hide the extremes of other micro-batches
    extremes = torch.stack([columns["ratio_max"], -columns["ratio_min"]], dim=1)
    extremes = torch.where(has_tokens & ~extremes.isnan(), extremes, -torch.inf).amax(0)
    group = _group(process_group)
    has_kl = extremes.new_full((1,), float(first.has_kl))
    ranks = gathered(torch.cat([sums.vector, extremes, has_kl]), group)
    sums, extremes = named(ranks[:, :-3].sum(0)), ranks[:, -3:-1].amax(0)
    sums["kl"].copy_(torch.where((ranks[:, -1] == has_kl).all(), sums["kl"], torch.nan))

    count = sums["active_tokens"]
    result = named(sums.vector / count.clamp(min=1))
    result["active_tokens"].copy_(count)
    if policy_loss != "mean":
        over = 1 if policy_loss == "sum" else size_of(group)
        result["policy_loss"].copy_(sums["policy_loss"] / over)
    for name, extreme in (("ratio_max", extremes[0]), ("ratio_min", -extremes[1])):
        extreme = torch.where(count > 0, extreme, 0.0)
        result[name].copy_(torch.where(sums[name].isnan(), sums[name], extreme))
    return first._like(result.vector.to(dtype))


def _sequence(metrics: object) -> Sequence[object]:
    if isinstance(metrics, Mapping):
        return [metrics]
    if not isinstance(metrics, Sequence) or isinstance(metrics, str):
        raise TypeError(
            "metrics must be the metrics of a policy loss or a sequence of them, "
            f"got {type(metrics).__name__}"
        )
    if not metrics:
        raise ValueError("metrics must contain at least one micro-batch, got none")
    return metrics


def _names(metrics: Mapping[str, object]) -> tuple[str, ...]:
    """Return the names of a vector with these metrics."""
    groups = (TEACHER_METRICS, CENTERING_METRICS)
    given = [names for names in groups if any(name in metrics for name in names)]
    return (*METRICS, *(name for names in given for name in names))


def _checked(metrics: object) -> LossMetrics:
    if isinstance(metrics, LossMetrics):
        return metrics
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics must be the metrics of a loss, got {type(metrics).__name__}")
    names = [name for name in _names(metrics) if name != "kl" or "kl" in metrics]
    if set(metrics) != set(names):
        raise ValueError(
            f"metrics must have the names {', '.join(names)}; "
            f"got {', '.join(map(str, metrics)) or 'none'}"
        )
    for name in names:
        if floating(f"metrics[{name!r}]", metrics[name]).dim() != 0:
            raise ValueError(
                f"metrics[{name!r}] must be a 0-d tensor, got shape {tuple(metrics[name].shape)}"
            )
        on_device(f"metrics[{name!r}]", metrics[name], metrics[METRICS[0]], "the others")
    return LossMetrics(metrics)


def _group(process_group: object) -> torch.distributed.ProcessGroup | None:
    if process_group is None:
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        return torch.distributed.group.WORLD if distributed else None
    return checked_group(process_group)

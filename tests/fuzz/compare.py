"""Compares the results of a call with those of the oracle."""

from __future__ import annotations

import dataclasses

import numpy as np
from torch import Tensor

from .arithmetic import FORMATS
from .bounded import Bounded, Decision, Doubts
from .functions import stored
from .tensors import numbers


@dataclasses.dataclass(frozen=True)
class Difference:
    """One part of a result that differs from what the oracle expects."""

    part: str
    kind: str  # shape, dtype, nan, value, bool, missing, refused, not refused, raised
    text: str

    def __str__(self) -> str:
        return f"{self.part}: {self.kind}: {self.text}"


#: The numbers of a part of a result, and their dtype.
Got = tuple[np.ndarray, str]


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of a result as the oracle expects it."""

    want: Bounded | Decision | np.ndarray
    dtype: str | None = None
    #: the upstream gradient of a loss whose gradient waited for it, rounded to its dtype
    waited_for: float | None = None


def part(x: Tensor | None) -> Got | None:
    """Return what a tensor holds."""
    return None if x is None else (numbers(x), str(x.dtype).removeprefix("torch."))


def differences(
    got: dict[str, Got | None], want: dict[str, Part], doubts: Doubts
) -> list[Difference]:
    """Return the differences in the order of the parts; `got` has (numbers, dtype) or None."""
    found = []
    for name, part in want.items():
        if name not in got or got[name] is None:
            found.append(Difference(name, "missing", "there is none"))
            continue
        numbers, dtype = got[name]
        if part.dtype is not None and dtype != part.dtype:
            found.append(Difference(name, "dtype", f"got {dtype}, want {part.dtype}"))
        difference = _compare(name, numbers, part, doubts)
        if difference is not None:
            found.append(difference)
    found += [
        Difference(name, "unexpected", "the oracle expects none")
        for name in got
        if name not in want and got[name] is not None
    ]
    return found


def _compare(name: str, got: np.ndarray, part: Part, doubts: Doubts) -> Difference | None:
    want = part.want
    if isinstance(want, Decision):
        if got.shape != want.yes.shape:
            return Difference(name, "shape", f"got {got.shape}, want {want.yes.shape}")
        doubts.add(name, want.doubtful)
        wrong = (got != want.yes) & ~want.doubtful
        return _first(name, "bool", wrong, got, want.yes, None)
    if isinstance(want, np.ndarray):
        if got.shape != want.shape:
            return Difference(name, "shape", f"got {got.shape}, want {want.shape}")
        wrong = ~((got == want) | (np.isnan(got) & np.isnan(want)))
        return _first(name, "value", wrong, got, want, None)
    if got.shape != want.shape:
        return Difference(name, "shape", f"got {got.shape}, want {want.shape}")
    if part.dtype is not None and part.dtype in FORMATS:
        want = stored(want, part.dtype, part.waited_for)
    if part.waited_for is not None and np.isnan(part.waited_for):
        nothing = (want.value == 0) & (want.error == 0)
        doubts.add("unspecified: NaN as upstream gradient of a loss", nothing)
        want = Bounded(want.value, np.where(nothing, np.inf, want.error), want.arithmetic)
    doubts.add("unbounded", np.isinf(want.error).any(-1))
    near = np.abs(got - want.value) <= want.error
    equal = (got == want.value) | (np.isnan(got) & np.isnan(want.value)) | np.isinf(want.error)
    wrong = ~(near | equal)
    kind = "nan" if (np.isnan(got) != np.isnan(want.value))[wrong].any() else "value"
    return _first(name, kind, wrong, got, want.value, want.error)


def _first(
    name: str,
    kind: str,
    wrong: np.ndarray,
    got: np.ndarray,
    want: np.ndarray,
    error: np.ndarray | None,
) -> Difference | None:
    if not wrong.any():
        return None
    if error is not None:  # the worst, in units of its bound
        excess = np.where(wrong, np.abs(got - want) / (error + 1e-300), -1.0)
        at = np.unravel_index(
            int(np.argmax(np.where(np.isnan(excess), np.inf, excess))), wrong.shape
        )
    else:
        at = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
    place = "" if not at else " at " + ", ".join(str(int(i)) for i in at)
    text = f"got {got[at]}, want {want[at]}"
    if error is not None:
        text += f" within {error[at]:.3g}"
    return Difference(name, kind, f"{text}{place}; {int(wrong.sum())} of {wrong.size} wrong")

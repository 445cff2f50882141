"""Sums and means over the sequences or groups that tokens belong to."""

from __future__ import annotations

import numpy as np

from ..bounded import Bounded, Decision


def sums(x: Bounded, sequence: np.ndarray, count: int) -> Bounded:
    """Return the sum over each sequence, `[count]`."""
    value, error = np.zeros(count), np.zeros(count)
    for which in np.unique(sequence):
        one = x[sequence == which].sum()
        value[which], error[which] = one.value, one.error
    return Bounded(value, error, x.arithmetic)


def lengths(sequence: np.ndarray, count: int) -> np.ndarray:
    return np.bincount(sequence, minlength=count).astype(np.float64)


def means(x: Bounded, sequence: np.ndarray, count: int) -> Bounded:
    """Return the mean over each sequence, `[count]`; 0 of an empty one."""
    return sums(x, sequence, count) / np.maximum(lengths(sequence, count), 1)


def taken(x: Bounded | Decision, index: np.ndarray) -> Bounded | Decision:
    """Return the value of each token's sequence."""
    if isinstance(x, Decision):
        return Decision(x.yes[index], x.doubtful[index])
    return x[index]

"""Engines that seed the generators of the whole process."""

from collections.abc import Iterator
from contextlib import contextmanager

from fastrl.train.run.checkpoint import rng_state, set_rng_state


@contextmanager
def unchanged_generators() -> Iterator[None]:
    """Put the states of torch's, Python's and NumPy's generators back at the end."""
    before = rng_state()
    try:
        yield
    finally:
        set_rng_state(before)

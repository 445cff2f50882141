"""Batches of padded sequences, bounded by tokens."""

from collections.abc import Iterator


def by_length(lengths: list[int], tokens: int) -> Iterator[list[int]]:
    """Indices of items of similar lengths that, padded to the longest, have at most ``tokens``.

    A longer item is alone.
    """
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if batch and (len(batch) + 1) * lengths[i] > tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch

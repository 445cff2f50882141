"""Ready reward functions of the length of a completion, in tokens with its end token."""

from collections.abc import Sequence


def length_penalty(lengths: Sequence[int], *, max_new_tokens: int) -> list[float]:
    """Minus the share of ``max_new_tokens`` that each completion takes: from -1 to 0."""
    return [-length / max_new_tokens for length in lengths]


def overlong(lengths: Sequence[int], *, max_new_tokens: int, buffer: int) -> list[float]:
    """The soft overlong punishment of DAPO, https://arxiv.org/abs/2503.14476, equation 13.

    0 up to ``max_new_tokens - buffer`` tokens, then falling linearly to -1 at ``max_new_tokens``.

    Raises:
        ValueError: ``buffer`` is longer than ``max_new_tokens``.
    """
    if buffer > max_new_tokens:
        raise ValueError(
            f"overlong_buffer must be at most max_new_tokens, {max_new_tokens}, got {buffer}"
        )
    start = max_new_tokens - buffer
    return [max(-1.0, min(0.0, (start - length) / buffer)) for length in lengths]

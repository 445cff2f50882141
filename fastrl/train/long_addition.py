"""A task that needs no download, with long completions: addition with every step written out.

Its records are ``{"prompt": ..., "answer": ..., "demonstrations": [...]}``. For the prompt
``985440+503958:`` a correct completion is::

     0+8+0=08 8_____
    _98544+_50395: 4+5+0=09 98____
    __9854+__5039: 4+9+0=13 398___
    ___985+___503: 5+3+1=09 9398__
    ____98+____50: 8+0+0=08 89398_
    _____9+_____5: 9+5+0=14 489398
    1489398

Each line adds the last digits and the carry, and puts the new digit before those found so far. The
next line drops the digits that are done, and the last line is the sum. Blanks are underscores: all
fields keep their place in a line, so that a model of two layers learns to copy them.

The warm start imitates the demonstrations, which forget each carry more often than not. The most
likely imitation is wrong as soon as there is a carry; a sample is correct if it remembers all of
them. The reward depends on the last line alone, and only the reward shows that carries count.
"""

import random
from typing import Any

Record = dict[str, Any]

DIGITS = 6
FORGOTTEN = 0.6  # the share of carries that the demonstrations forget


def completion(a: int, b: int, *, forgotten: float, generator: random.Random) -> str:
    """Return the steps and the sum of two numbers of ``DIGITS`` digits."""
    lines, total, carry = [], "", 0
    for column in range(DIGITS):
        x, y = (number // 10**column % 10 for number in (a, b))
        digits = x + y + carry
        total = f"{digits % 10}{total}"
        head = f"{_without(a, column)}+{_without(b, column)}:" if column else ""
        lines.append(f"{head} {x}+{y}+{carry}={digits:02d} {total:_<{DIGITS}}")
        carry = digits // 10 if generator.random() >= forgotten else 0
    return "\n".join([*lines, f"{carry or '_'}{total}"])


def _without(number: int, digits: int) -> str:
    """Return a number without its last digits, padded to the width of all."""
    return f"{number // 10**digits:_>{DIGITS}}"


def split(seed: int, held_out: int = 256, train: int = 4096) -> tuple[list[Record], list[Record]]:
    """Return the records for training and the held-out records.

    Returns:
        Two lists of records. No pair of numbers occurs twice, not even in the other order.
    """
    generator = random.Random(seed)
    pairs: dict[tuple[int, int], tuple[int, int]] = {}
    while len(pairs) < held_out + train:
        a, b = (generator.randrange(10 ** (DIGITS - 1), 10**DIGITS) for _ in range(2))
        pairs.setdefault((min(a, b), max(a, b)), (a, b))
    records: list[Record] = [
        {
            "prompt": f"{a}+{b}:",
            "answer": str(a + b),
            "demonstrations": [
                completion(a, b, forgotten=FORGOTTEN, generator=generator) for _ in range(2)
            ],
        }
        for a, b in pairs.values()
    ]
    return records[held_out:], records[:held_out]


def right_sum(prompts: list[str], completions: list[str], records: list[Record]) -> list[float]:
    """Return 1 for a completion whose last line is the ``"answer"`` in its width, else 0."""
    return [
        float(text.rpartition("\n")[2] == f"{record['answer']:_>{DIGITS + 1}}")
        for text, record in zip(completions, records, strict=True)
    ]

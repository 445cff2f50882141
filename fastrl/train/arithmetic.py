"""A task that needs no download: small sums in words and digits, to be answered in digits.

Its records are ``{"prompt": ..., "answer": ..., "demonstrations": [...]}``. No prompt is in both
sets, but the same problem may be, in other words.

The warm start imitates the demonstrations, of which one in three is correct and the others are one
too large (an off-by-one error). They teach the format and the rough size of an answer. The most
likely imitation is wrong; only the reward tells which answer is correct.
"""

import random
from typing import Any, NamedTuple

Record = dict[str, Any]

LARGEST = 9
_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_PLUS = ("{a} + {b} =", "{a} plus {b} =", "{a} and {b} is", "add {a} to {b}:")
_MINUS = ("{a} - {b} =", "{a} minus {b} =", "{b} from {a} is", "{a} less {b}:")


class Problem(NamedTuple):
    """Two operands and whether they are added or subtracted; the answer is never negative."""

    a: int
    b: int
    plus: bool

    @property
    def answer(self) -> int:
        """The correct answer."""
        return self.a + self.b if self.plus else self.a - self.b

    def demonstrations(self) -> list[str]:
        """Return the demonstrated answers, each equally likely."""
        return [str(self.answer + error) for error in (0, 1, 1)]

    def phrasings(self) -> list[str]:
        """Return every wording: each template with each operand in digits or as a word."""
        templates = _PLUS if self.plus else _MINUS
        return [
            template.format(a=a, b=b)
            for template in templates
            for a in (str(self.a), _WORDS[self.a])
            for b in (str(self.b), _WORDS[self.b])
        ]


def problems() -> list[Problem]:
    """Return all problems with operands from 0 to ``LARGEST``, in a fixed order."""
    numbers = range(LARGEST + 1)
    sums = [Problem(a, b, True) for a in numbers for b in numbers]
    return sums + [Problem(a, b, False) for a in numbers for b in numbers if b <= a]


def split(seed: int, held_out: int = 256) -> tuple[list[Record], list[Record]]:
    """Return the records for training and the held-out records.

    Args:
        seed: Determines which prompts are held out, and the order of both lists.
        held_out: The number of held-out records.
    """
    records: list[Record] = [
        {
            "prompt": prompt,
            "answer": str(problem.answer),
            "demonstrations": problem.demonstrations(),
        }
        for problem in problems()
        for prompt in problem.phrasings()
    ]
    random.Random(seed).shuffle(records)
    return records[held_out:], records[:held_out]

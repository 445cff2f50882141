"""A task that needs no download: small sums in words and digits, to be answered in digits.

Its records are ``{"prompt": ..., "answer": ..., "demonstrations": [...]}``. No prompt is in both
sets, but the same problem may be, in other words.

The warm start imitates the demonstrations, of which one in three is correct and the others are one
too large (an off-by-one error). They teach the format and the rough size of an answer. The most
likely imitation is wrong; only the reward tells which answer is correct.
"""

import random
from itertools import product
from typing import Any

Record = dict[str, Any]

_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_TEMPLATES = {
    1: ("{a} + {b} =", "{a} plus {b} =", "{a} and {b} is", "add {a} to {b}:"),
    -1: ("{a} - {b} =", "{a} minus {b} =", "{b} from {a} is", "{a} less {b}:"),
}


def split(seed: int, held_out: int = 256) -> tuple[list[Record], list[Record]]:
    """Return the records for training and the held-out records.

    Args:
        seed: Determines which prompts are held out, and the order of both lists.
        held_out: The number of held-out records.
    """
    records: list[Record] = []
    for sign, a, b in product(_TEMPLATES, range(10), range(10)):
        if (answer := a + sign * b) < 0:
            continue
        spelled = product(_TEMPLATES[sign], (str(a), _WORDS[a]), (str(b), _WORDS[b]))
        records += [
            {
                "prompt": template.format(a=first, b=second),
                "answer": str(answer),
                "demonstrations": [str(answer + error) for error in (0, 1, 1)],
            }
            for template, first, second in spelled
        ]
    random.Random(seed).shuffle(records)
    return records[held_out:], records[:held_out]

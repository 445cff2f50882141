"""Preference pairs of the arithmetic prompts: the right answer against wrong ones.

A policy that learns from a reward model finds what its pairs do not cover. So the wrong answers
are not only the numbers near the right one, but also other numbers, and texts that are no number
or more than the right one.
"""

import random
import string

from fastrl.train.data import arithmetic
from fastrl.train.data.task_files import Record

_NEAR = (-2, -1, 1, 2)
_CHARACTERS = string.digits + string.ascii_letters + string.punctuation


def split(seed: int) -> tuple[list[Record], list[Record]]:
    """The pairs for training, of the training prompts, and the held-out pairs.

    Args:
        seed: Determines which prompts are held out, and the wrong answers that are drawn.

    Returns:
        Two lists of ``{"prompt", "chosen", "rejected"}`` that share no prompt.
    """
    chance = random.Random(seed)
    train, held_out = arithmetic.split(seed)
    return _pairs(train, chance), _pairs(held_out, chance)


def _pairs(records: list[Record], chance: random.Random) -> list[Record]:
    return [
        {"prompt": str(record["prompt"]), "chosen": str(record["answer"]), "rejected": rejected}
        for record in records
        for rejected in wrong_answers(str(record["answer"]), chance)
    ]


def wrong_answers(answer: str, chance: random.Random) -> list[str]:
    """Wrong answers: the numbers near the right one, two others, and two that are no number."""
    right = int(answer)
    near = [right + error for error in _NEAR if right + error >= 0]
    far = [n for n in range(2 * arithmetic.LARGEST + 2) if n != right and n not in near]
    numbers = [str(n) for n in (*near, *chance.sample(far, 2))]
    return numbers + chance.sample(_malformed(answer, chance), 2)


def _malformed(answer: str, chance: random.Random) -> list[str]:
    """Nothing, more than the right answer, and noise."""
    digit, character = chance.choice(string.digits), chance.choice(_CHARACTERS)
    noise = "".join(chance.choices(_CHARACTERS, k=chance.randint(1, 4)))
    return [
        "",
        answer + digit,
        digit + answer,
        answer + character,
        character + answer,
        f"{answer} {answer}",
        noise if noise != answer else "",
    ]

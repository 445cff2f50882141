"""Word problems of two steps in the form of GSM8K, with numbers up to 100.

python docs/word_problems.py runs/word_problems

Writes train.jsonl and held_out.jsonl, whose rows have a `question` and an `answer`, a solution that
ends with `#### number`. A held-out problem has other numbers than all training problems.
"""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

NAMES = ("Ana", "Ben", "Lea", "Mia", "Sam", "Tom")
THINGS = ("books", "cards", "coins", "pens")
TRAIN, HELD_OUT = 2000, 256


QUESTIONS = {
    "lost": "{name} has {a} {things}, gets {b} more and loses {c}. How many {things} are left?",
    "bought": "{name} has {a} {things}, sells {b} and buys {c}. How many {things} are there now?",
    "boxes": "{name} buys {a} boxes of {b} {things} and finds {c} more. How many {things} is that?",
    "both": "{name} has {a} {things}, and a friend has {b} fewer. How many {things} do both have?",
}


def solution(kind: str, a: int, b: int, c: int) -> str:
    """Return two steps and the result."""
    if kind == "lost":
        x, y = a + b, a + b - c
        steps = f"{a} + {b} = {x}. {x} - {c} = {y}."
    elif kind == "bought":
        x, y = a - b, a - b + c
        steps = f"{a} - {b} = {x}. {x} + {c} = {y}."
    elif kind == "boxes":
        x, y = a * b, a * b + c
        steps = f"{a} * {b} = {x}. {x} + {c} = {y}."
    else:
        x, y = a - b, a + a - b
        steps = f"{a} - {b} = {x}. {a} + {x} = {y}."
    return f"{steps}\n#### {y}"


def numbers(kind: str, rng: random.Random) -> tuple[int, int, int]:
    """Return three numbers for a problem whose numbers are all from 0 to 100."""
    if kind == "boxes":
        return rng.randint(2, 10), rng.randint(2, 8), rng.randint(1, 20)
    a = rng.randint(5, 50)
    if kind == "lost":
        b = rng.randint(2, 25)
        return a, b, rng.randint(1, a + b)
    return a, rng.randint(1, a), rng.randint(2, 25)


def problems(seed: int, *, held_out: bool) -> Iterator[dict[str, str]]:
    """Yield different problems without end; three numbers whose sum ends in 0 are held out."""
    rng = random.Random(seed)
    seen = set()
    while True:
        kind = rng.choice(list(QUESTIONS))
        a, b, c = numbers(kind, rng)
        words = {"name": rng.choice(NAMES), "things": rng.choice(THINGS)}
        text = QUESTIONS[kind].format(a=a, b=b, c=c, **words)
        of_split = ((a + b + (0 if kind == "both" else c)) % 10 == 0) == held_out
        if of_split and text not in seen:
            seen.add(text)
            yield {"question": text, "answer": solution(kind, a, b, c)}


def main(directory: Path) -> None:
    """Write both files."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, count, held_out in (("train", TRAIN, False), ("held_out", HELD_OUT, True)):
        rows = zip(range(count), problems(0, held_out=held_out), strict=False)
        text = "".join(json.dumps(row) + "\n" for _, row in rows)
        (directory / f"{name}.jsonl").write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

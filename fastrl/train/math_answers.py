r"""Answers to mathematical problems, compared by math-verify.

A text's answer is in the line of its last ``####``, as in GSM8K, or in its last ``\boxed{}``,
whichever comes later. Without these it is what math-verify finds in the text. Several different
numbers in the line, or several boxes, are a list of guesses: they equal an answer that is a list,
and no single one. Math-verify ignores units and the bases of numbers.

The workers of rewards run this file, so it imports neither fastrl nor, before it is used, sympy.
"""

import functools
import logging
import re
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

_NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!\d)|\d+[.,]\d+|\d+|\.\d+)"
_MARK = r"\\f?boxed\s*\{"
_FORMULA = re.compile(
    rf"[-+]?\(*-?{_NUMBER}\)*(?:\s*(?:[-+/^\u00d7\u00f7]|\*\*?)\s*\(*-?{_NUMBER}\)*)*(?:\s*%)?"
)
#: What math-verify reads like the plain number in front of it.
_UNLIKE = re.compile(r"\d(?:[A-Za-z]|\s*(?:hundred|thousand|million|billion|trillion|dozen)\b)")
#: Forms of numbers in sentences, and how they are written in formulas.
_FORMS = (
    (r"[\u2212\u2013]", "-"),
    (r"[$\u20ac\u00a3]", ""),
    (r"\bminus\s+(?=\d)", "-"),
    (r"^-\s+(?=\d)", "-"),
    (r"\b(\d+)\s+(\d+/\d+)\b", r"\1+\2"),
    (r"(?<=\d)\s*x\s*(?=\d)", "*"),
    (r"(?<=[A-Za-z])\s*(?:\^\s*\d+|\d\b)", ""),  # of a unit
)
_WORDS = re.compile(r"[A-Za-z]{3,}(?:[ -][A-Za-z]+)*")


def math_equality(
    prompts: list[str], completions: list[str], records: list[dict[str, Any]]
) -> list[float]:
    """Return 1 for a completion whose answer math-verify finds equal to ``"answer"``, else 0.

    It takes math-verify's own time limits, for which it must be in the main thread.

    Raises:
        ValueError: The answer of a record has no number or formula.
    """
    return _equalities(completions, records, seconds=5)


def in_worker(
    prompts: list[str], completions: list[str | None], records: list[dict[str, Any]]
) -> list[float]:
    r"""Do the same without a time limit, for a process that can be killed.

    None stands for the right completion: the answer, in ``\boxed{}`` unless it is marked.
    """
    return _equalities(completions, records, seconds=None)


def decisive(answer: Any) -> str:
    """Return the part of an answer that decides how it is read; of a solution, it is short."""
    _, hashes, after = str(answer).rpartition("####")
    is_short = hashes and _begins_answer(after) and not re.search(_MARK, after)
    return hashes + after if is_short else repr(answer)


def _equalities(
    completions: Iterable[str | None], records: Iterable[dict[str, Any]], seconds: int | None
) -> list[float]:
    from math_verify import verify

    found = []
    for text, record in zip(completions, records, strict=True):
        answer = _text(record.get("answer"))
        right = answer if _is_marked(answer) else rf"\boxed{{{answer}}}"
        gold = _read(right, seconds)
        if not gold:
            raise ValueError(f'"answer" must hold a number or formula, got {answer!r}')
        same = right != answer and text is not None and text.strip() == answer
        read = _read(right if text is None else text, seconds)
        found.append(float(same or verify(gold, read, timeout_seconds=seconds)))
    return found


def _text(answer: Any) -> str:
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
        raise ValueError(f'"answer" must hold a number or formula, got {answer!r}')  # noqa: TRY004
    # LaTeX has no 1e-07
    return format(Decimal(repr(answer)), "f") if isinstance(answer, float) else str(answer).strip()


def _is_marked(text: str) -> bool:
    return "####" in text or re.search(_MARK, text) is not None


@functools.lru_cache(maxsize=256)  # a group of completions has one answer
def _read(text: str, seconds: int | None) -> list[Any]:
    """Return math-verify's reading of the answer of a text: empty, or a formula and its text."""
    from latex2sympy2_extended.math_normalization import extract_boxed_content

    before, hashes, after = text.rpartition("####")
    if re.search(_MARK, after):
        return _formula(extract_boxed_content(after, mode="last"), seconds)
    if not hashes:
        return _parse(text, seconds)
    line, _, below = after.strip().partition("\n")
    if _begins_answer(line) or not (below.strip() or re.search(_MARK, before)):
        return _line(line, seconds)
    # a heading
    return _read(before if re.search(_MARK, before) else below, seconds)


def _begins_answer(text: str) -> bool:
    return re.match(r"\s*(?:minus\b)?[-+.$\u20ac\u00a3\u2212\u2013(\\*\s]*[\d\\]", text) is not None


def _line(line: str, seconds: int | None) -> list[Any]:
    """Read a formula, or numbers, which must be equal."""
    if "\\" in line:
        return _formula(line, seconds)
    plain = line.replace("**", "") if line.startswith("**") else line
    for form, written in _FORMS:
        plain = re.sub(form, written, plain.strip())
    numbers = _FORMULA.findall(plain)
    if not numbers or _UNLIKE.search(plain):
        return _formula(line, seconds)
    from math_verify import verify

    first, *others = (_parse(number, seconds) for number in dict.fromkeys(numbers))
    same = all(verify(first, other, timeout_seconds=seconds) for other in others)
    return first if same else []


def _formula(latex: str, seconds: int | None) -> list[Any]:
    r"""Read LaTeX, with or without dollars; one word is no product of its letters."""
    from math_verify import LatexExtractionConfig

    latex = re.sub(r"(?<!\\)(?:\$|\\[()\[\]])", " ", latex).strip().removesuffix(".")
    if not latex:
        return []
    if _WORDS.fullmatch(latex):
        latex = rf"\text{{{latex}}}"
    # nothing but the whole: after a formula that it cannot read, it would look for a number
    whole = {"extraction_config": [LatexExtractionConfig()], "extraction_mode": "first_match"}
    return _parse(rf"\boxed{{{latex}}}", seconds, **whole)


def _parse(text: str, seconds: int | None, **options: Any) -> list[Any]:
    from math_verify import parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of no limit, and of limits
    return parse(text, parsing_timeout=seconds, **options)  # type: ignore[no-any-return]


if __name__ == "__mp_main__":  # in a worker, which has no time limit before its first completion
    for _form in (r"\left( 3, \frac{x}{2} \right)", "[-2,7]", "x^2+1", r"\{1, \sqrt{2}\}"):
        _formula(_form, None)  # the first of a kind takes long

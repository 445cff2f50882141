r"""Answers to mathematical problems, compared by math-verify.

A text's answer is in the line of its last ``####``, as in GSM8K, or in its last ``\boxed{}``,
whichever comes later. Without these it is what math-verify finds in the text. It is a number with
words, or else a formula, read as a whole. Several different numbers in the line, or several boxes
in a sentence, are a list of guesses: they equal an answer that is a list, and no single one.
Math-verify ignores units and the bases of numbers.

The workers of rewards run this file, so it imports neither fastrl nor, before it is used, sympy.
"""

import functools
import logging
import re
from collections.abc import Iterable
from decimal import Decimal
from typing import Any
from unicodedata import normalize

_MARK = r"\\f?boxed\s*\{"
_BETWEEN_BOXES = r"""</think>|\n|[.?!;][$)*'"]*\s"""
_SIGNS: dict[int, Any] = str.maketrans(
    "\u2212\u2013—\u00d7·÷\u2044≈\u00a0\u2009\u202f", "---**//~   ", "€£¥₹"
)
_NAMES = {"π": "pi", "∞": "infty", "±": "pm", "≤": "le", "≥": "ge", "≠": "ne", "\u222a": "cup"}
_SIGNS |= {ord(sign): rf"\{name} " for sign, name in _NAMES.items()}
#: Forms that math-verify misreads, what is no part of an answer, and numbers in sentences.
_FORMS = (
    (r"\u221a\s*(\d+(?:\.\d+)?|\w|\([^()]*\))", r"\\sqrt{\1}"),
    (r"(?<![\\\w])(pi|sin|cos|ln)\b", r"\\\1 "),
    (r"(?m)(^ *|[a-z] |[=:$] ?)\((-\d+(?:\.\d+)?)\)(?!\s*[-+*/^!(])", r"\1\2"),
    (r"\^\s*-(\d+)", r"^(-\1)"),
)
_NOISE = (
    r"(?<!\\)(?:\\?\$|\\[()\[\]])|(?<!\S)\*\*(?=\S)|(?<=\S)\*\*(?![\w(])|</\w+>|<\|[^<>]*\|>"
    r"|\bUS(?=\$)|\b(?:Rs\b\.?|USD|EUR)(?= ?\$?\d)"
)
_SPOKEN = (
    (r"^[+~=]\s*", ""),
    (r"(?i)(?:\b(?:minus|negative)|^-)\s+(?=\d)", "-"),
    (r"(?<!\d)\.(?=\d)", "0."),
    (r"\s*°(?:\s*[CF]\b)?(?!\w)", " degrees"),
    (r"(?<=\d)\s*x\s*(?=\d)", "*"),
    (r"\s*\b(?:percent|pct)\b", "%"),
    (r"(?<=\d) ?([cdkm]?m|ft|in|yd|mi|[a-z]{3,})(?:\s*\^\s*\(?[23]\)?|[23])(?!\w)", r" square \1"),
)
_NUMBER = r"(?<![\d.,])(?:\d{1,3}(?:,\d{3})+|(?!0\d)\d+)(?:\.\d+)?(?![.,]?\d)"
_SUM = rf"-?\({{0,3}}-?{_NUMBER}\)*(?:\s*(?:[-+/^]|\*\*?)\s*\(*-?{_NUMBER}\)*)*(?:\s*%)?"
#: Words and numbers, which are written ``#``. Words of two letters may be products of variables.
_TOKEN = r"\(?(?:#|[A-Za-z]{2,}(?:['\u2019-][A-Za-z]+)*|[aAIhm])\)?"
_BETWEEN = r"(?:\s*=\s*|(?<=[a-z]):\s*|/(?=[a-z])|\s+-\s+(?=[A-Za-z]{3})|[,;.]?\s+)"
_SENTENCE = rf"{_TOKEN}(?:{_BETWEEN}{_TOKEN})*!*"
_SAYING = r"[A-Za-z]{3,}|\b(?:am|pm|in|[cdkm]m|mi|ft|yd|oz|lb|[km]?g|m[lL]|[kMG][WB])\b"
#: Words that make another number of it, or a formula.
_OF_FORMULAS = "sqrt|sin|cos|tan|log|exp|inf|infinity|mod"
_UNLIKE = (
    rf"(?i)\b(?:{_OF_FORMULAS}|not|(?:hundred|thousand|million|billion|trillion|dozen)s?|squared"
    r"|cubed|factorial|half|halves|thirds?|quarters?|fourths?|fifths?|sixths?"
    r"|sevenths?|eighths?|ninths?|tenths?|plus|times|divided|over)\b|#!|#,? (?:and|or)\b(?! #)"
)
_WORDS = (
    rf"(?=.*\b(?!(?:and|or|{_OF_FORMULAS})\b)[^\W\d_]{{3}})"
    r"[^\W_](?:[^\W_]|[ ,.:;'?!&]|(?<=\w)-(?=\w))*"
)
#: Two numbers side by side, feet, digits of dates: what is no formula is itself.
_VERBATIM = r"""\d\s+\d|\d['"\u2019\u201d\u2032]|(?<![\d.,])0\d|\d{4}-\d+-\d|\d/\d+/\d{4}"""


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
    line = after.strip().partition("\n")[0]
    is_short = hashes and _begins_answer(line) and not re.search(_MARK, after)
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
        same = right != answer and text is not None and _bare(_find(text)[1]) == _bare(answer)
        read = _read(right if text is None else text, seconds)
        found.append(float(same or verify(gold, read, timeout_seconds=seconds)))
    return found


def _text(answer: Any) -> str:
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
        raise ValueError(f'"answer" must hold a number or formula, got {answer!r}')  # noqa: TRY004
    text = str(answer).strip()
    if re.fullmatch(r"(?i)nan|n/a|[?*.$\s]*", text):
        raise ValueError(f'"answer" must hold a number or formula, got {answer!r}')
    return format(Decimal(text), "f") if isinstance(answer, float) else text


def _is_marked(text: str) -> bool:
    return "####" in text or re.search(_MARK, text) is not None


def _bare(part: str) -> str:
    return part.strip(" \n*.$")


def _find(text: str) -> tuple[str, str]:
    """Return where the answer of a text is, and the answer."""
    from latex2sympy2_extended.math_normalization import extract_boxed_content

    before, hashes, after = text.rpartition("####")
    if boxes := [box.start() for box in re.finditer(_MARK, after)]:
        sentence = re.split(_BETWEEN_BOXES, after[: boxes[-1]])[-1] + after[boxes[-1] :]
        return "box", extract_boxed_content(sentence, mode="last")
    if not hashes:
        return "text", text
    line, _, below = after.strip().partition("\n")
    if _begins_answer(_plain(line)) or not (below.strip() or re.search(_MARK, before)):
        return "line", line
    # a heading
    return _find(before if re.search(_MARK, before) else below)


def _begins_answer(line: str) -> bool:
    lead = r"(?:(?:the|final|answer|is|minus|negative)\b[:*\s]*)*"
    return re.match(rf"(?i)[*\s]*{lead}[-+~.$(\\*\s]*[\d\\]", line) is not None


@functools.lru_cache(maxsize=256)  # a group of completions has one answer
def _read(text: str, seconds: int | None) -> list[Any]:
    """Return math-verify's reading of the answer of a text: empty, or a formula and its text."""
    place, part = _find(text)
    part = _plain(part)
    return _parse(part, seconds) if place == "text" else _part(part, seconds, place == "line")


def _plain(text: str) -> str:
    """Write signs, mixed numbers and powers of ten as math-verify reads them."""
    text = re.sub(r"[\u00bc-\u00be\u2150-\u215e]", lambda m: f" {normalize('NFKC', m[0])}", text)
    raised = "[\u00b2\u00b3\u00b9\u2070\u2074-\u2079\u207b]+"
    text = re.sub(raised, lambda m: f"^({normalize('NFKC', m[0])})", text).translate(_SIGNS)
    for form, written in _FORMS:
        text = re.sub(form, written, text)
    mixed = r"(?<![\w.,/^])(\d{1,9}) +(\d{1,9})/(\d{1,9})(?![\w/])"
    text = re.sub(mixed, lambda m: f"{int(m[1]) * int(m[3]) + int(m[2])}/{m[3]}", text)
    grouped = r"(?<![\d.,])\d{1,3}(?:(?: |\\[,;:! ]|\{,\})\d{3})+(?![\d,/])"
    text = re.sub(grouped, lambda m: re.sub(r"\D", "", m[0]), text)
    scientific = r"\b\d+(?:\.\d+)?[eE][-+]?\d{1,2}\b"
    return re.sub(scientific, lambda m: format(Decimal(m[0]), "f"), text)


def _part(part: str, seconds: int | None, is_line: bool) -> list[Any]:
    """Read numbers among words, which must be equal, or a formula."""
    is_latex = re.fullmatch(r"\s*\$[^$]+\$\s*", part) is not None
    part = re.sub(r"^([`\"*])(.*)\1$", r"\2", " ".join(re.sub(_NOISE, "", part).split())).rstrip(
        ",;."
    )
    if is_line:
        part = re.sub(
            r"(?i)^[a-z ,']*\b(?:answer(?:[a-z ']* is)?|(?:is|are)(?=.*[\d\\]))\b[:= ]*", "", part
        )
    if "\\" in part or is_latex:
        return _formula(part, seconds, is_latex=True)
    spoken = part
    for form, written in _SPOKEN:
        spoken = re.sub(form, written, spoken)
    rest = re.sub(_SUM, "#", spoken)
    numbers = re.findall(_SUM, spoken)
    among_words = (
        (is_line or rest.startswith("#"))
        and re.fullmatch(_SENTENCE, rest)
        and (len(numbers) > 1 or re.search(_SAYING, rest))
        and not re.search(_UNLIKE, rest)
    )
    is_said = numbers and (among_words or re.fullmatch(r"#(?:\s*=\s*#)*", rest))
    if not is_said or any(number.count("(") != number.count(")") for number in numbers):
        return _formula(part, seconds)
    from math_verify import verify

    # it reads no (72)
    numbers = [re.sub(r"^\(+([^()]*)\)+$", r"\1", number) for number in numbers]
    first, *others = (_parse(number, seconds) for number in dict.fromkeys(numbers))
    if all(verify(first, other, timeout_seconds=seconds) for other in others):
        return first
    return [] if is_line and re.search(r"=|\bor\b", rest) else _formula(part, seconds)


def _formula(latex: str, seconds: int | None, is_latex: bool = False) -> list[Any]:
    """Read LaTeX; words are no product of their letters."""
    from math_verify import LatexExtractionConfig

    if not is_latex and re.search(_VERBATIM, latex):
        return [latex]
    latex = latex.replace("°", r"^{\circ}")
    if re.fullmatch(_WORDS, latex) and not (is_latex and re.search(r"\d", latex)):
        latex = rf"\text{{{latex}}}"
    # nothing but the whole: after a formula that it cannot read, it would look for a number
    whole = {"extraction_config": [LatexExtractionConfig()], "extraction_mode": "first_match"}
    return _parse(rf"\boxed{{{latex}}}", seconds, **whole) if latex else []


def _parse(text: str, seconds: int | None, **options: Any) -> list[Any]:
    from math_verify import parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of no limit, and of limits
    return parse(text, parsing_timeout=seconds, **options)  # type: ignore[no-any-return]


if __name__ == "__mp_main__":  # in a worker, which has no time limit before its first completion
    for _form in (r"\left( 3, \frac{x}{2} \right)", "[-2,7]", "x^2+1", r"\{1, \sqrt{2}\}"):
        _formula(_form, None)  # the first of a kind takes long

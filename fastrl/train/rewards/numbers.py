r"""A ready reward function that compares numbers, exactly."""

import decimal
import re
from decimal import Decimal
from typing import Any, NamedTuple

from fastrl.train.data.prompts import Record

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!,?\d)|\d+)(?:\.\d+)?|\.\d+"
# After a digit, a letter or a closing bracket, a minus subtracts.
_SIGN = r"(?:(?<![\w)\]}.])[-+\u2212])?"
_NUMBER = re.compile(
    rf"(?P<sign>{_SIGN})\$?(?:\\[dt]?frac\{{(?P<over>[-+]?\d+)\}}\{{(?P<under>\d+)\}}"
    rf"|(?P<number>{_DIGITS})(?P<exponent>[eE][-+]?\d+)?(?:/(?P<divisor>\d+))?)",
    re.ASCII,
)
_BOXED = "\\boxed{"


class Fraction(NamedTuple):
    """A number as a quotient, which is never divided: exponents may be huge."""

    numerator: Decimal
    denominator: Decimal

    def equals(self, other: "Fraction") -> bool:
        """Whether both are the same number, without rounding."""
        terms = (*self, *other)
        context = decimal.Context(
            prec=2 * max(len(term.as_tuple().digits) for term in terms),
            Emax=decimal.MAX_EMAX,
            Emin=decimal.MIN_EMIN,
            traps=[decimal.Inexact, decimal.InvalidOperation],
        )
        try:
            left = context.multiply(self.numerator, other.denominator)
            return left == context.multiply(other.numerator, self.denominator)
        except decimal.DecimalException:  # an exponent beyond 10**18
            return False


def number_equality(
    prompts: list[str], completions: list[str], records: list[Record]
) -> list[float]:
    r"""1 if the last number of the completion equals the record's ``"answer"``, else 0.

    The last ``\boxed{...}`` is looked at alone if there is one, else what follows the last
    ``#### `` (with its space) on its line, else the whole completion. Numbers have signs,
    thousands separators, decimals, exponents, and may be fractions (``3/4``, ``\frac{3}{4}``);
    0.50 equals 1/2, and nothing is rounded. Units, currencies and percent signs are ignored.

    Raises:
        ValueError: The answer of a record is neither a number nor text with one.
    """
    answers = [_answer(record, prompt) for prompt, record in zip(prompts, records, strict=True)]
    found = [last_number(completion) for completion in completions]
    return [
        float(number is not None and number.equals(answer))
        for number, answer in zip(found, answers, strict=True)
    ]


def last_number(text: str) -> Fraction | None:
    """The number that a text answers, see `number_equality`; None without one."""
    last = None
    for last in _NUMBER.finditer(_answer_part(text)):  # noqa: B007
        pass
    return None if last is None else _fraction(last)


def _answer_part(text: str) -> str:
    """What the last box holds, or what follows the last ``####``, or the text."""
    begin = text.rfind(_BOXED)
    if begin >= 0:
        begin += len(_BOXED)
        depth = 1
        for end in range(begin, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[begin:end]
    _, marked, answer = text.rpartition("#### ")
    return answer.partition("\n")[0] if marked else text


def _fraction(match: re.Match[str]) -> Fraction | None:
    if match["over"] is not None:
        numerator, denominator = Decimal(match["over"]), Decimal(match["under"])
    else:
        try:
            numerator = Decimal(match["number"].replace(",", "") + (match["exponent"] or ""))
        except decimal.InvalidOperation:  # an exponent beyond 10**18
            return None
        denominator = Decimal(match["divisor"] or 1)
    if denominator == 0:
        return None
    negative = match["sign"] in ("-", "\u2212")
    return Fraction(numerator.copy_negate() if negative else numerator, denominator)


def _answer(record: Record, prompt: str) -> Fraction:
    answer: Any = record.get("answer")
    number = None
    if isinstance(answer, (int, float, Decimal)) and not isinstance(answer, bool):
        exact = Decimal(repr(answer)) if isinstance(answer, float) else Decimal(answer)
        number = Fraction(exact, Decimal(1)) if exact.is_finite() else None
    elif isinstance(answer, str):
        number = last_number(answer)
    if number is None:
        raise ValueError(
            f'"answer" must be a number or text with one, got {answer!r} for prompt {prompt!r}'
        )
    return number

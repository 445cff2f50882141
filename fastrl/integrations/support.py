"""The support of a drop-in for the options of its trainer.

The rules that decide the behavior of `use_fastrl` for TRL are the rows of its table in
`docs/support.md`, so code and table cannot contradict each other.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

#: `docs/support.md` says what they mean.
Handling = Literal["fused", "primitive", "replaced", "unchanged", "refused"]


@dataclass(frozen=True, kw_only=True)
class Support:
    """One option of a trainer, and how a drop-in handles it.

    Attributes:
        option: the option as a user writes it.
        handling: what fastrl does.
        note: the reason, or a remark; part of the error message if the option is refused.
        applies: a function that returns whether the option is set on a trainer, if the handling
            depends on it.
        reason: a function that returns the reason for a trainer on which the option is set.
    """

    option: str
    handling: Handling
    note: str = ""
    applies: Callable[[Any], bool] | None = None
    reason: Callable[[Any], str] | None = None

    def __post_init__(self) -> None:
        if self.handling not in get_args(Handling):
            known = ", ".join(get_args(Handling))
            raise ValueError(f"handling must be one of {known}, got {self.handling!r}")


def updated(document: str) -> str:
    """Return `docs/support.md` with the section of TRL that its rules give."""
    trl = importlib.import_module("fastrl.integrations.trl")
    alike: dict[tuple[str, str], list[str]] = {}
    for row in trl.SUPPORT:
        alike.setdefault((row.handling, row.note), []).append(row.option)
    rows = [f"| {', '.join(names)} | {how} | {note} |" for (how, note), names in alike.items()]
    table = "\n".join(["| option | how | note |", "| --- | --- | --- |", *rows])
    before, heading, section = document.partition("## `fastrl.integrations.trl`\n")
    _, following, after = section.partition("\n## ")
    return f"{before}{heading}\n{trl.TESTED}\n\n{table}\n{following}{after}"

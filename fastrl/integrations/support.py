"""What each drop-in does with each option of its trainer; `docs/support.md` is made from it.

A module of drop-ins lists its options as `SUPPORT` and stands in `MODULES`. The rules that decide
when it runs are the rows of the table, so neither can say what the other does not.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

Handling = Literal["fused", "primitive", "replaced", "own", "refused"]

MEANINGS: dict[str, str] = {
    "fused": "loss and gradient in one pass over the hidden states or the logits",
    "primitive": "log-probabilities and entropies are fastrl's, the trainer computes its own loss",
    "replaced": "the trainer's function is replaced by fastrl's, with the same arguments",
    "own": "left to the trainer's own code",
    "refused": "a sentence says why, and nothing is changed",
}

#: Modules of `fastrl.integrations` that have a table.
MODULES: tuple[str, ...] = ("trl", "verl", "openrlhf", "liger", "torchrl")


@dataclass(frozen=True, kw_only=True)
class Support:
    """One option of a trainer and what a drop-in does with it.

    Attributes:
        option: the option as its user writes it.
        handling: a key of `MEANINGS`.
        note: why, or what to know; a sentence of its own where it is refused.
        applies: says whether the option is set on a trainer, where that decides something.
    """

    option: str
    handling: Handling
    note: str = ""
    applies: Callable[[Any], bool] | None = None

    def __post_init__(self) -> None:
        if self.handling not in get_args(Handling):
            raise ValueError(
                f"handling must be one of {', '.join(MEANINGS)}, got {self.handling!r}"
            )


def table() -> str:
    """Return `docs/support.md`."""
    parts = [
        "# What the drop-ins support",
        "Made from the rules that decide it: `python -m fastrl.integrations > docs/support.md`.",
        "\n".join(f"- **{name}**: {meaning}." for name, meaning in MEANINGS.items()),
    ]
    for name in MODULES:
        module = importlib.import_module(f"fastrl.integrations.{name}")
        rows = [f"| {row.option} | {row.handling} | {row.note} |" for row in module.SUPPORT]
        parts += [
            f"## `fastrl.integrations.{name}`",
            f"{module.TRIED}",
            "\n".join(["| option | how | note |", "| --- | --- | --- |", *rows]),
        ]
    return "\n\n".join(parts) + "\n"

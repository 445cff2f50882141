"""The support of each drop-in for the options of its trainer; `docs/support.md` comes from it.

A drop-in lists its options as `SUPPORT` and is listed in `MODULES`. The rules that decide the
behavior of `use_fastrl` are the rows of the table, so code and table cannot contradict each other.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

Handling = Literal["fused", "primitive", "replaced", "unchanged", "refused"]

MEANINGS: dict[str, str] = {
    "fused": "fastrl computes loss and gradient in one pass over the hidden states or the logits",
    "primitive": "fastrl computes log-probabilities and entropies, from which the trainer computes "
    "its loss",
    "replaced": "fastrl's function replaces the trainer's, with the same arguments",
    "unchanged": "the trainer's own code runs",
    "refused": "an error says why, and nothing is changed",
}

#: Modules of `fastrl.integrations` that have a table.
MODULES: tuple[str, ...] = ("trl", "verl", "openrlhf", "nemo_rl", "liger", "torchrl")


@dataclass(frozen=True, kw_only=True)
class Support:
    """One option of a trainer, and how a drop-in handles it.

    Attributes:
        option: the option as a user writes it.
        handling: a key of `MEANINGS`.
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
            raise ValueError(
                f"handling must be one of {', '.join(MEANINGS)}, got {self.handling!r}"
            )


def table() -> str:
    """Return `docs/support.md`."""
    parts = [
        "# What the drop-ins support",
        "Generated from the rules in the code: `python -m fastrl.integrations > docs/support.md`.",
        "\n".join(f"- **{name}**: {meaning}." for name, meaning in MEANINGS.items()),
    ]
    for name in MODULES:
        module = importlib.import_module(f"fastrl.integrations.{name}")
        alike: dict[tuple[str, str], list[str]] = {}
        for row in module.SUPPORT:
            alike.setdefault((row.handling, row.note), []).append(row.option)
        rows = [f"| {', '.join(names)} | {how} | {note} |" for (how, note), names in alike.items()]
        parts += [
            f"## `fastrl.integrations.{name}`",
            f"{module.TESTED}",
            "\n".join(["| option | how | note |", "| --- | --- | --- |", *rows]),
        ]
    return "\n\n".join(parts) + "\n"

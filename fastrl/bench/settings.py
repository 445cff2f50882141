"""What a run measures; the runner hands it to its worker processes as JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import torch

from fastrl.bench.case import Case
from fastrl.bench.cases import Size, cases
from fastrl.bench.timing import Plan


@dataclasses.dataclass(frozen=True)
class Settings:
    """The sizes of a run, the passes and providers of each, and how often they are called."""

    sizes: tuple[Size, ...]
    steps: tuple[str, ...]
    device: str
    plan: Plan
    backends: tuple[str, ...] | None = None  # None: all that are available
    peers: tuple[str, ...] | None = None  # None: all that are installed
    tiny: bool = False  # whether even the machine's ceilings are measured on tiny sizes
    sparing: bool = False  # of torch's forms, see `cases`

    def cases(self) -> list[Case]:
        """Build the cases; their inputs are made when their turn comes."""
        device = torch.device(self.device)
        return cases(
            self.sizes, self.steps, device, self.backends, self.peers, sparing=self.sparing
        )

    @property
    def together(self) -> bool:
        """Whether one process measures all cases.

        On a CPU each has its own: a heap with holes would raise the peaks of the next case.
        """
        return self.device == "cuda" or self.tiny

    def to_json(self) -> str:
        """Return a form that ``from_json`` reads."""
        return json.dumps(vars(self), default=lambda dtype: str(dtype).removeprefix("torch."))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Read what ``to_json`` returned."""
        found: dict[str, Any] = json.loads(text)
        found["sizes"] = tuple(
            Size(op, model, rows, getattr(torch, dtype), variant)
            for op, model, rows, dtype, variant in found["sizes"]
        )
        found["plan"] = Plan(*found["plan"])
        for name in ("steps", "backends", "peers"):
            found[name] = None if found[name] is None else tuple(found[name])
        return cls(**found)

"""How a run ended."""

import shlex
from pathlib import Path
from typing import NamedTuple

from fastrl.train.config import LoopConfig
from fastrl.train.run.run_directory import SETTINGS
from fastrl.train.run.terminal import printable

#: What a loop measures on what is held out, by its key in the log.
MEASURED = {
    "held_out_reward": "held-out reward, greedy",
    "held_out_accuracy": "held-out accuracy",
}


class Summary(NamedTuple):
    """How a run ended."""

    directory: Path
    step: int
    held_out: tuple[float, float] | None  # before the first step, and the last that was measured
    interrupted: bool
    evaluated: int = 0  # the step after which it was measured last
    measured: str = MEASURED["held_out_reward"]  # what was measured

    def __str__(self) -> str:
        """The final lines of output."""
        lines = []
        if self.interrupted and not (self.directory / SETTINGS).exists():
            lines.append("stopped in the warm start: nothing was saved")
        elif self.interrupted:
            options = ["--resume", "--name", self.directory.name]
            if self.directory.parent != Path(LoopConfig.out_dir):
                options += ["--out_dir", str(self.directory.parent)]
            lines.append(f"stopped after step {self.step}; continue with {shlex.join(options)}")
        if self.held_out is not None:
            before, after = self.held_out
            then = f", {after:.3f} after {self.evaluated} steps" if self.evaluated else ""
            lines.append(f"{self.measured}: {before:.3f} before{then}")
        for kind, name in (("curves", "curves.png"), ("report", "report.html")):
            if (path := self.directory / name).exists():
                lines.append(f"{kind}: {path}")
        return "\n".join(printable(line) for line in lines)

"""The settings of a run that decide where it is kept and how often it is saved and measured."""

from dataclasses import dataclass
from pathlib import Path

from fastrl.train.settings.options import option


@dataclass
class RunSettings:
    """Where the run is kept, and how often it is saved and measured."""

    name: str | None = option(
        None, "Name of the run; without one, the loop's name and a number.", result=False
    )
    out_dir: str = option("runs", "Directory of runs: files go to OUT_DIR/NAME.", result=False)
    resume: bool = option(
        False,
        "Continue the run NAME (without one, the last unnamed run) from its last checkpoint.",
        result=False,
    )
    seed: int = option(0, "Random seed, also of the embedded tasks.", least=0)
    eval_every: int = option(
        5, "Steps between evaluations on the held-out prompts.", least=1, result=False
    )
    save_every: int = option(50, "Steps between checkpoints.", least=1, result=False)
    keep_checkpoints: int = option(
        2, "How many of the latest checkpoints are kept.", least=1, result=False
    )
    device: str = option(
        "auto", "auto, cpu, cuda, ...: auto uses a GPU if there is one.", result=False
    )

    def check_run(self) -> None:
        """Raise a `ValueError` if the name, the directory or the seed cannot be used."""
        if self.name is not None and not _names_a_directory(self.name):
            raise ValueError(
                "name must be a plain directory name of printable characters, at most 255 bytes, "
                f"without a space at its ends, got {self.name[:80]!r} ({len(self.name)} characters)"
            )
        if not self.out_dir.isprintable() or not self.out_dir.strip():
            raise ValueError(
                f"out_dir must be a path of printable characters, got {self.out_dir[:80]!r}"
            )
        if self.seed >= 2**31:
            raise ValueError(f"seed must be below 2**31, got {self.seed}")


def _names_a_directory(name: str) -> bool:
    if not name.isprintable() or name != name.strip() or name in ("", ".", ".."):
        return False
    return Path(name).name == name and len(name.encode()) <= 255

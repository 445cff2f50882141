"""The metrics of a run in TensorBoard, trackio and Weights & Biases, beside ``metrics.jsonl``."""

import importlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from fastrl.train.checkpoint import unchanged_generators
from fastrl.train.config import RunConfig


class Trackers:
    """The trackers that ``config.track`` names, which begin with the first row that is written.

    A tracker must never stop a run: if one fails, it is named once and then left out.
    """

    def __init__(
        self, config: RunConfig, directory: Path, identity: str, say: Callable[[str], None]
    ) -> None:
        self._config, self._directory, self._identity = config, directory, identity
        self._say = say
        self._open: dict[str, Any] = dict.fromkeys(config.track)

    def write(self, row: dict[str, float]) -> None:
        """Add a row; rows come in the order of their steps."""
        values, step = {k: v for k, v in row.items() if k != "step"}, int(row["step"])
        with unchanged_generators():
            for name in list(self._open):
                self._guarded(name, partial(self._write, name, values, step))

    def close(self, *, failed: bool) -> None:
        """Complete the trackers; ``failed`` tells whether an error ended the run."""
        for name, run in list(self._open.items()):
            if run is not None:
                options = {"exit_code": int(failed)} if name == "wandb" else {}
                end = run.close if name == "tensorboard" else run.finish
                self._guarded(name, partial(end, **options))
        self._open.clear()

    def _write(self, name: str, values: dict[str, float], step: int) -> None:
        if self._open[name] is None:
            self._open[name] = self._begin(name, step)
        run = self._open[name]
        if name == "tensorboard":
            for key, value in values.items():
                run.add_scalar(key, value, step)
            run.flush()
        else:
            run.log(values, step=step)

    def _begin(self, name: str, step: int) -> Any:
        if name == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            return SummaryWriter(str(self._directory / name), purge_step=step)
        package: Any = importlib.import_module(name)
        options: dict[str, Any] = {}
        if name == "wandb":  # sends metrics and settings alone
            settings = package.Settings(
                silent=True, console="off", disable_code=True, disable_git=True, init_timeout=30
            )
            options = {"id": self._identity, "dir": str(self._directory), "settings": settings}
        return package.init(
            project=os.environ.get(f"{name.upper()}_PROJECT", "fastrl"),
            name=f"{self._directory.name}-{self._identity[:4]}",
            resume="allow",
            config=self._config.to_json(),
            **options,
        )

    def _guarded(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # a tracker may raise anything
            self._open.pop(name, None)
            self._say(
                f"track {name}: {type(error).__name__}: {error}; the run continues without it, "
                "metrics.jsonl has every row"
            )

"""A run of Weights & Biases that neither asks for anything nor waits without an end.

Without a key or a network it is recorded below ``RUN/wandb``, from where ``wandb sync`` uploads it.
Only metrics and settings are sent: no code, no output, no environment, no command line.
"""

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from fastrl.train.config import LoopConfig
from fastrl.train.run.json_lines import replace_file
from fastrl.train.run.run_directory import settings_of

RUN_ID = "wandb-run-id"
#: Seconds to wait for the server: at the start, and at the end for what is not uploaded yet.
START_SECONDS, END_SECONDS = 30.0, 60.0
_NOT_ONLINE = ("offline", "disabled", "dryrun")


class WeightsAndBiases:
    """The run with the id in ``RUN/wandb-run-id``, which a resumed run continues.

    Args:
        config: The settings of the run, which are also shown at W&B.
        directory: The run's.
        rows: The rows of the log, with the first new one; what the server lacks is sent.
        say: Prints a line.
    """

    def __init__(
        self,
        config: LoopConfig,
        directory: Path,
        rows: Sequence[Mapping[str, float]],
        say: Callable[[str], None],
    ) -> None:
        self._say = say
        wanted = os.environ.get("WANDB_MODE", "online")
        try:
            self._run = _init(config, directory, wanted)
        except Exception as error:  # no key, no network, a server that refuses
            if wanted in _NOT_ONLINE:
                raise
            reason = (str(error).splitlines() or [""])[0]
            _forget()
            self._run = _init(config, directory, "offline")
            say(f"track wandb: W&B cannot be reached ({type(error).__name__}: {reason})")
        if self._run.offline:
            say(f"track wandb: the run is recorded offline; upload it with {self._upload}")
        for row in rows:
            if row["step"] >= self._run.starting_step:
                self.write(row)

    def write(self, row: Mapping[str, float]) -> None:
        """Send a row, unless a resumed run has sent it before it was cut."""
        if row["step"] >= self._run.starting_step:
            self._run.log(dict(row), step=int(row["step"]))

    def close(self, *, failed: bool) -> None:
        """Wait, for a limited time, until all is uploaded."""
        try:
            self._run.finish(exit_code=int(failed))
        except TimeoutError:
            self._say(
                f"track wandb: not everything was uploaded within {END_SECONDS:.0f} s; "
                f"upload the rest with {self._upload}"
            )

    @property
    def _upload(self) -> str:
        return f"wandb sync {Path(self._run.dir).parent}"


def _forget() -> None:
    """Forget a run that could not begin, whose id is in use otherwise."""
    import wandb

    if wandb.run is None:  # it would end a run of the program that calls the loop
        wandb.teardown()


def _init(config: LoopConfig, directory: Path, mode: str) -> Any:
    """Begin or continue the run."""
    import wandb

    wandb.setup(wandb.Settings(silent=True))  # so that it never asks for a key
    stored = directory / RUN_ID
    if not stored.exists():
        replace_file(stored, uuid.uuid4().hex[:12])
    return wandb.init(
        project=config.wandb_project,
        name=directory.name,
        id=stored.read_text(),
        resume="allow" if mode == "online" else None,
        dir=str(directory),
        config=settings_of(config),
        mode=cast("Any", mode),
        reinit="create_new",  # a run of the program that calls the loop goes on
        settings=wandb.Settings(
            silent=True,
            console="off",
            save_code=False,
            disable_code=True,
            disable_git=True,
            disable_job_creation=True,
            x_disable_meta=True,
            x_save_requirements=False,
            init_timeout=START_SECONDS,
            login_timeout=START_SECONDS,
            finish_timeout=END_SECONDS,
            finish_timeout_raises=True,
        ),
    )

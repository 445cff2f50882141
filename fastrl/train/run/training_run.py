"""The frame of a loop's steps: start or resume, log, evaluate, save checkpoints, stop cleanly."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fastrl.train import gradients
from fastrl.train.config import LoopConfig
from fastrl.train.data.messages import prompt_text
from fastrl.train.data.prompts import Record
from fastrl.train.distributed import ranks
from fastrl.train.distributed.gradient_sum import GradientSum
from fastrl.train.model.finite_weights import not_finite
from fastrl.train.model.reference import Reference
from fastrl.train.packing import PackedBatch
from fastrl.train.rewards.weighted import Scored
from fastrl.train.run import checkpoint
from fastrl.train.run.interrupt import Interrupt
from fastrl.train.run.phases import Phases
from fastrl.train.run.run_log import Row, RunLog, Summary
from fastrl.train.schedules import learning_rate

Parts = Mapping[str, checkpoint.Stateful]


class Job(Protocol):
    """What a run works on: it begins, is measured, and is saved."""

    @property
    def log(self) -> RunLog: ...  # noqa: D102
    @property
    def model(self) -> Any: ...  # noqa: D102
    @property
    def tokenizer(self) -> Any: ...  # noqa: D102
    @property
    def resumed_from(self) -> Path | None: ...  # noqa: D102

    def begin(self, parts: Parts, interrupt: Interrupt) -> int | None:
        """Restore the checkpoint to resume from, or prepare the model for the first step.

        Returns:
            How many steps are done; None if this was interrupted and nothing is kept.
        """

    def reference(self) -> Reference | None:
        """The reference of the KL, if there is one."""

    def evaluate(self) -> Row:
        """Measure the model on what is held out, without a random number."""


@contextmanager
def training_run(
    job: Job,
    config: LoopConfig,
    parts: Parts,
    *,
    warm_started: Callable[[], None] = lambda: None,
) -> Iterator["TrainingRun"]:
    """Start or resume a run, and leave a checkpoint and curves behind however it ends.

    If the warm start is interrupted, the run has no steps and nothing is saved. If an error ends
    the run before the first optimizer step of a step, a checkpoint is saved; if later, none, since
    the weights belong to no step. The message of the error tells where ``--resume`` continues.

    Args:
        job: What `prepare` returned.
        config: The settings of the run.
        parts: What a checkpoint holds besides the model: the optimizer, a value head.
        warm_started: Called when a new run has its first weights, before they are saved.

    Raises:
        ValueError: A reward function failed in a step.
        FloatingPointError: The gradients of a step are not finite.
        OSError: A checkpoint or the log could not be written.
    """
    with closing(job.log), Interrupt() as interrupt:
        run = TrainingRun(job, config, parts, interrupt)
        with ranks.explaining(), job.log.starting(), run.phase("start"):
            begun = job.begin(parts, interrupt)
            if begun is not None:
                run.step, run.rng = begun, checkpoint.rng_state()
                run.prepare_gradients()
                run.reference = job.reference()
                if job.resumed_from is None:
                    warm_started()
                    run.save()
        if begun is None:
            yield run
            return
        failed = True
        try:
            with ranks.explaining():
                job.log.follow(run.step)
                start = _largest(run.phase.read())
                if not job.log.rows and run.step == 0:
                    row = {"step": 0, **run.evaluate(), **start}
                    ranks.from_first(lambda: job.log.write(row))
                yield run
                run.save()
            failed = False
        except Exception as error:
            run.rescue(error)
            raise
        finally:
            job.log.finish(failed=failed)


class TrainingRun:
    """The state of a run.

    Attributes:
        step: How many steps are done.
        rng: The random state at the beginning of the next step.
        reference: The initial policy, for the KL; None if its coefficient is 0.
        phase: Measures the phases of a step, ``with run.phase("generate")``.
    """

    def __init__(self, job: Job, config: LoopConfig, parts: Parts, interrupt: Interrupt) -> None:
        self.step = 0
        self.rng = checkpoint.rng_state()
        self.reference: Reference | None = None
        self.phase = Phases(job.model.device)
        self._started = time.perf_counter()
        self._whole = True  # weights and log are those after `step` steps, and can be saved
        self._job, self._config, self._parts, self._interrupt = job, config, parts, interrupt

    def steps(self) -> Iterator[int]:
        """Yield the number of steps done so far, until there are enough or the user interrupts.

        Each step must change the weights by `apply` alone, and end with `finish_step`.
        """
        while self.step < self._config.steps and not self._interrupt.on_any_rank():
            self._started = time.perf_counter()
            yield self.step

    def prepare_gradients(self) -> None:
        """To be called when it is known which weights are trained."""
        modules = [part for part in self._parts.values() if isinstance(part, nn.Module)]
        self._gradients = GradientSum([self._job.model, *modules])

    def backward(self, loss: Tensor, batch: PackedBatch) -> None:
        """The backward of a micro-batch's loss; of all ranks' losses after the last one."""
        self._gradients.backward(loss, batch)

    def apply(self, optimizer: torch.optim.Optimizer) -> float:
        """`gradients.apply` in this step; from here to `finish_step` nothing can be saved.

        Returns:
            The norm of the gradients before clipping.

        Raises:
            FloatingPointError: That norm is not finite; the weights are unchanged.
        """
        whole, self._whole = self._whole, False
        self._gradients.before_update()
        try:
            return gradients.apply(optimizer, self._config, self.step)
        except FloatingPointError:
            self._whole = whole
            raise

    def show(self, records: Sequence[Record], completions: Sequence[str], scored: Scored) -> None:
        """Let some completions of this step be shown, if samples of it are due."""
        samples = self._job.log.samples
        if samples.due(self.step + 1):
            parts = scored.parts if len(scored.parts) > 1 else {}
            rewards = {"reward": scored.total, **parts}
            values = {name: part.tolist() for name, part in rewards.items()}
            samples.collect([prompt_text(record) for record in records], completions, values)

    def finish_step(self, row: Row) -> None:
        """Log a step, with the held-out reward if it is due, and save a checkpoint if one is.

        The speed is the ``tokens`` of the row over the time of the whole step.
        """
        row = {**row, "learning_rate": learning_rate(self._config, self.step)}
        self.step, self.rng = self.step + 1, checkpoint.rng_state()
        config, row = self._config, {"step": self.step, **row, **_largest(self.phase.read())}
        row["tokens_per_second"] = row["tokens"] / (time.perf_counter() - self._started)
        if self.reference is None:
            row.pop("kl", None)  # it would be 0: there is no reference
        try:
            if self.step % config.eval_every == 0 or self.step == config.steps:
                row |= self.evaluate()
        finally:
            ranks.from_first(lambda: self._job.log.write(row))
            self._whole = True
        ranks.from_first(lambda: self._job.log.samples.write(self.step))
        if self.step % config.save_every == 0:
            self.save()
            self._job.log.report()

    def evaluate(self) -> Row:
        """Measure the model on what is held out, as the phase ``evaluate``."""
        with self.phase("evaluate"):
            measured = self._job.evaluate()
        return {**measured, **_largest(self.phase.read())}

    def save(self) -> None:
        """Save a checkpoint after the steps done so far.

        Raises:
            CheckpointError: It could not be written.
            FloatingPointError: A weight is not finite; it would take the place of a better one.
            ValueError: The ranks do not have the same weights.
        """
        names = ranks.together(lambda: not_finite(self._job.model))
        if (name := next(filter(None, names), None)) is not None:
            self._whole = False
            raise FloatingPointError(
                f"the weights after step {self.step} are not finite, first in {name!r}"
            )
        if not self._gradients.are_replicas_equal():
            self._whole = False
            raise ValueError(
                f"the weights of the ranks differ after step {self.step}, but parallel=ddp keeps "
                "them equal: a reward function has changed them, or the state of the generators"
            )
        checkpoint.save(
            self._job.log.checkpoints,
            step=self.step,
            model=self._job.model,
            tokenizer=self._job.tokenizer,
            parts=self._parts,
            rng=self.rng,
            keep=self._config.keep_checkpoints,
        )

    def rescue(self, error: Exception) -> None:
        """Save a checkpoint if there is a whole step to save; add to ``error`` what resumes."""
        note = ""
        if self._whole and not isinstance(error, checkpoint.CheckpointError):
            try:
                if ranks.on_all_ranks(error):
                    self.save()
                elif ranks.is_first() and self._config.parallel == "ddp":
                    ranks.go_on_alone()
                    self.save()
            except Exception as second:  # it must not hide the first
                note = f"; {second}"
        if not ranks.is_first() and not ranks.on_all_ranks(error):
            return  # the first rank may still save one
        try:
            last = checkpoint.latest(self._job.log.checkpoints)
            note += f"; --resume continues from {last}" if last else "; there is no checkpoint"
        except OSError as second:
            note += f"; {second}"
        if len(error.args) == 1 and isinstance(error.args[0], str):
            error.args = (error.args[0] + note,)
        else:
            self._job.log.say(note.removeprefix("; "))

    def summary(self) -> Summary:
        """Return how the run ended."""
        stopped = self._interrupt.requested and self.step < self._config.steps
        return self._job.log.summary(self.step, interrupted=stopped)


def _largest(row: Row) -> Row:
    """Each value's maximum over the ranks: the slowest phase, the fullest memory."""
    rows = ranks.together(lambda: row)
    return {name: max(each[name] for each in rows if name in each) for name in row}

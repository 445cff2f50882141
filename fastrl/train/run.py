"""The frame of a run, which loads or resumes, logs, saves, and always leaves a checkpoint."""

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

import torch

from fastrl.integrations.transformers import backbone
from fastrl.train import checkpoint, optimizers
from fastrl.train.checkpoint import fingerprint, unchanged_generators
from fastrl.train.config import GrpoConfig, RunConfig
from fastrl.train.initial_policy import INITIAL, begins_changed, load_policy, save_base
from fastrl.train.loading import check_length, context_of, find_device, model_path, not_finite
from fastrl.train.phases import Phases
from fastrl.train.policy import check_head, check_packing, completion_logprobs
from fastrl.train.prompts import Prompt, digest, encode, read_records
from fastrl.train.recomputation import save_memory
from fastrl.train.records import Row
from fastrl.train.remarks import ending_remark, evaluation_remark, remarks
from fastrl.train.rewards import Rewards, Scored
from fastrl.train.rollout import Completion, Rollout, rollout_of
from fastrl.train.run_log import RunLog, Summary
from fastrl.train.sampling import Sampler
from fastrl.train.second_models import Reference, TeacherModel
from fastrl.train.vocabulary import check_tokens, row_count
from fastrl.train.warm_start import check_warm_start, warm_start, warm_start_steps

_FAR = 0.1  # nats per token; in bfloat16 sampler and trainer differ by less than a hundredth


class TrainingRun:
    """A run: model, prompts, rewards and log, all checked and loaded at first; and its state.

    The directory of the run is locked until the end of `saved`.

    Raises:
        ValueError: The run would stop later, because of a missing file, prompts that are too long,
            a reward that does not exist or returns a wrong type, damaged weights, prompts that
            changed since the run began, or another process in the same directory.
    """

    def __init__(self, config: RunConfig) -> None:
        if config.model is not None:  # a run goes on, the checkpoint remains what it is
            config = replace(config, model=model_path(config.model))
        self._config, self._log = config, RunLog(config)
        with ExitStack() as unless_prepared:
            unless_prepared.callback(self._log.close)
            self._prepare(config, self._log, unless_prepared)
            unless_prepared.pop_all()
        self.step = 0
        self.reference: Reference | None = None
        self.phase = Phases(self.model.device)
        self._parts: Mapping[str, checkpoint.Stateful] = {}
        self._interrupt = _Interrupt()
        self._rng: dict[str, Any] = {}  # at the beginning of the next step
        self._is_far = False  # the sampler was, from the model, and the user knows
        self._between_steps = True  # the weights are those after `step` steps, so save them
        self._started = self._saved = time.perf_counter()

    def _prepare(self, config: RunConfig, log: RunLog, unless_prepared: ExitStack) -> None:
        """Load and check everything that the settings name."""
        self._resumed_from = log.checkpoint_to_resume()
        device = find_device(config.device)
        records = read_records(config)
        checkpoint.seed_all(config.seed)
        self.model, self.tokenizer = load_policy(config, device, log, self._resumed_from)
        model, tokenizer = self.model, self.tokenizer
        check_head(model, config)
        train, held_out = (encode(some, tokenizer, config) for some in records)
        self.train, self._held_out = train, held_out
        for line in remarks(records, train, held_out, tokenizer, config):
            log.say(line)
        check_tokens(model, tokenizer, train + held_out)
        check_length(model, train + held_out, config.max_new_tokens)
        if self._resumed_from is None:
            check_warm_start(train, tokenizer, config)
        self.rewards = Rewards(config, device)
        unless_prepared.callback(self.rewards.close)
        for prompts in (train, held_out):
            self.rewards.probe(prompts)  # a broken function fails here
        judge, self.teacher = self.rewards.model, None
        if isinstance(config, GrpoConfig) and config.teacher is not None:
            self.teacher = TeacherModel(config, model, tokenizer)
            check_length(self.teacher.model, train + held_out, config.max_new_tokens)
        log.begun_with(
            prompts=digest(records[0]),
            held_out=digest(records[1]),
            reward_model=None if judge is None else fingerprint(judge.model),
            teacher=None if self.teacher is None else fingerprint(self.teacher.model),
        )
        save_memory(model, config)
        check_packing(model, config)
        optimizers.make_optimizer(model.parameters(), config)  # a missing one fails here
        self.sampler = Sampler(model, tokenizer, config)
        log.say(f"a completion ends with {self.sampler.endings}")
        evaluation = evaluation_remark(held_out, config) if self.rewards else ()
        for line in (*ending_remark(train, tokenizer, self.sampler.endings), *evaluation):
            log.say(line)

    @contextmanager
    def saved(
        self,
        parts: Mapping[str, checkpoint.Stateful],
        *,
        warm_started: Callable[[], None] = lambda: None,
    ) -> Iterator[None]:
        """Start or resume the run, and leave a checkpoint and curves behind however it ends.

        - An interrupt before the first optimizer step of a step ends it at the next token or
          micro-batch, and the earlier steps are saved. After it, the step is finished first.
        - An error before the first optimizer step leaves a checkpoint of the earlier steps. After
          it, and after numbers that are not finite, nothing is saved, because the weights belong to
          no step. The message tells where ``--resume`` continues.

        Args:
            parts: Contents of a checkpoint besides the model: the optimizer, a value head.
            warm_started: Called when a new run has its first weights, before they are saved.
        """
        log, self._parts = self._log, parts
        with closing(log), closing(self.rewards), self._interrupt:
            with self.phase("start"):
                self.start(warm_started)
            # a forward is a token while sampling, and a micro-batch otherwise
            hook = backbone(self.model).register_forward_pre_hook(self.poll)
            failed = True
            try:
                with log.following(log.directory.name, self._config.steps, self.step):
                    try:
                        yield
                    except _Interrupted:
                        self.model.zero_grad()
                    self.save()
                failed = False
            except Exception as error:
                self.rescue(error)
                raise
            finally:
                hook.remove()
                log.finish(failed=failed)

    def start(self, warm_started: Callable[[], None]) -> None:
        """Restore the checkpoint to resume from, or make and save the first one."""
        config, log = self._config, self._log
        resumed, initial = self._resumed_from, log.directory / INITIAL
        if resumed is not None:
            self.step = checkpoint.restore(resumed, self._parts)
        else:
            losses = warm_start(self.model, self.tokenizer, self.train, config)
            with log.following("warm start", warm_start_steps(config)):
                for i, loss in enumerate(losses, 1):
                    if self._interrupt.requested:
                        raise KeyboardInterrupt
                    log.show(i, {"loss": loss})
            if config.lora_rank is not None and begins_changed(config):
                checkpoint.store(initial, partial(save_base, self.model, self.tokenizer))
        self._rng = checkpoint.rng_state()
        if config.kl_coef > 0:
            self.reference = Reference(self.model, config, initial, resumed=resumed is not None)
        log.begin(self.step if resumed is not None else -1)
        if resumed is None:
            warm_started()
            self.save()

    def steps(self) -> Iterator[int]:
        """Yield the number of finished steps, until there are enough or the user interrupts.

        A step must change the weights only by `apply`, and end with `finish_step`.
        """
        self._measure_what_is_missing()
        while self.step < self._config.steps and not self._interrupt.requested:
            self._started = time.perf_counter()
            yield self.step

    def poll(self, *_: Any) -> None:
        """Raise if the user wants to stop and the finished steps can be saved."""
        if self._interrupt.requested and self._between_steps:
            raise _Interrupted

    def apply(self, optimizer: torch.optim.Optimizer) -> float:
        """Call `optimizers.apply` in this step; nothing can be saved before `finish_step`."""
        whole, self._between_steps = self._between_steps, False
        try:
            return optimizers.apply(optimizer, self._config, self.step)
        except FloatingPointError:
            self._between_steps = whole
            raise

    def sample(self, prompts: list[Prompt]) -> tuple[Rollout, Scored]:
        """Sample a group of completions for each prompt, and reward them."""
        size = self._config.group_size
        with self.phase("generate"):
            rollout, completions = self.sampler.sample(prompts, size)
        asked = [prompt for prompt in prompts for _ in range(size)]
        with self.phase("score"):
            scored = self.rewards.score(asked, completions, rollout.lengths)
        self.show(asked, completions, scored)
        return rollout, scored

    def show(
        self, prompts: Sequence[Prompt], completions: Sequence[str | None], scored: Scored
    ) -> None:
        """Collect some completions of this step, if it shows samples."""
        parts = scored.parts if len(scored.parts) > 1 else {}
        self._log.collect(self.step + 1, prompts, completions, {"reward": scored.total, **parts})

    def say_nothing_counts(self) -> None:
        """Tell the user that this step changes no weight."""
        self._log.say(
            f"step {self.step + 1} has no update: no completion has a reward, or with "
            "truncated=mask an end"
        )

    def finish_step(self, row: Row) -> None:
        """Log a step, with the held-out reward and a checkpoint if they are due.

        The speed is the number of ``tokens`` in the row over the time of the whole step.
        """
        config = self._config
        row["learning_rate"] = optimizers.learning_rate(config, self.step)
        if self.reference is None:
            row.pop("kl", None)  # always 0 without a reference
        self._warn_of_far(row.get("kl_sampler", 0.0))
        self.step, self._rng, self._between_steps = self.step + 1, checkpoint.rng_state(), True
        row = {"step": self.step, **row, **self.phase.read()}
        row["tokens_per_second"] = row["tokens"] / (time.perf_counter() - self._started)
        try:
            if self._is_evaluated(self.step):
                row |= self._evaluate()
        finally:
            self._log.write(row)
        minutes = (time.perf_counter() - self._saved) / 60
        late = config.save_minutes is not None and minutes >= config.save_minutes
        if self.step % config.save_every == 0 or late:
            self.save()
            self._log.report()

    def _warn_of_far(self, kl: float) -> None:
        """Tell the user once if the sampler's log-probabilities cannot be those of the model."""
        if kl > _FAR and not self._is_far:
            self._is_far = True
            self._log.say(
                f"the log-probabilities of the sampler {self._config.sampler} are far from the "
                f"model's: kl_sampler is {kl:.3g} nats per token, and should be below {_FAR}; look "
                "at the completions' token_ids, logprobs (of the same tokens, at the temperature) "
                "and sampled"
            )

    def _measure_what_is_missing(self) -> None:
        """Evaluate before the first step, or if an interrupt prevented an evaluation."""
        start, rows = self.phase.read(), self._log.metrics.rows
        if not rows:
            self._log.write({"step": self.step, **self._evaluate(), **start})
        elif self._is_evaluated(self.step) and "held_out_reward" not in rows[-1]:
            self._log.metrics.replace_last(rows[-1] | self._evaluate())

    def save(self) -> None:
        """Save a checkpoint after the steps done so far.

        Raises:
            CheckpointError: The checkpoint could not be written.
            FloatingPointError: A weight or logit is not finite; the old checkpoint is kept.
        """
        self._between_steps = False  # an interrupt waits
        if (wrong := self._not_finite()) is not None:
            raise FloatingPointError(f"after step {self.step}, {wrong} not finite")
        checkpoint.save(
            self._log.checkpoints,
            step=self.step,
            model=self.model,
            tokenizer=self.tokenizer,
            parts=self._parts,
            rng=self._rng,
        )
        self._saved, self._between_steps = time.perf_counter(), True

    def rescue(self, error: Exception) -> None:
        """Save a checkpoint if a whole step can be saved; note in ``error`` how to resume."""
        note = ""
        if self._between_steps and not isinstance(
            error, (checkpoint.CheckpointError, FloatingPointError)
        ):
            try:
                self.save()
            except Exception as second:  # it must not hide the first
                note = f"; {second}"
        try:
            last = checkpoint.latest(self._log.checkpoints)
            note += f"; --resume continues from {last}" if last else "; there is no checkpoint"
        except OSError as second:
            note += f"; {second}"
        if (
            len(error.args) == 1
            and isinstance(error.args[0], str)
            and not isinstance(error, KeyError)
        ):
            error.args = (error.args[0] + note,)
        else:
            self._log.say(note.removeprefix("; "))

    def summary(self) -> Summary:
        """Return how the run ended."""
        stopped = self._interrupt.requested and self.step < self._config.steps
        return self._log.summary(self.step, interrupted=stopped)

    def _not_finite(self) -> str | None:
        """Return the part of the model that is not finite: a weight, or outputs on many tokens."""
        if (name := not_finite(self.model)) is not None:
            return f"the weight {name!r} is"
        vocabulary = row_count(self.model)
        count = min(64, vocabulary, context_of(self.model) or 64)
        # some were in no step yet
        ids = torch.linspace(0, vocabulary - 1, count, dtype=torch.float64).long()
        asked, answer = Prompt({}, ids[: count // 2].tolist()), ids[count // 2 :]
        rollout = rollout_of(
            [asked], [Completion(answer, answer.float() * 0.0, True)], self.model.device
        )
        logprobs = completion_logprobs(self.model, rollout, torch.tensor([0]), self._config)
        return None if (logprobs < torch.inf).all() else "the logits are"  # NaN is not either

    def _is_evaluated(self, step: int) -> bool:
        return step % self._config.eval_every == 0 or step == self._config.steps

    def _evaluate(self) -> Row:
        """Return the mean reward of greedy completions of the held-out prompts.

        No random numbers are used.
        """
        if not self.rewards:
            return {}
        with self.phase("evaluate"), unchanged_generators():
            sampled, completions = self.sampler.greedy(self._held_out)
            scored = self.rewards.score(self._held_out, completions, sampled.lengths)
        self.sampler.engine.computed()
        return {**self.rewards.means(scored, prefix="held_out_reward"), **self.phase.read()}


class _Interrupted(BaseException):
    """The user wants to stop, and the finished steps can be saved."""


class _Interrupt:
    """A context in which the first SIGINT or SIGTERM sets ``requested``; the second one ends.

    Outside the main thread, where Python allows no signal handlers, this does nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "_Interrupt":
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._note)
        except ValueError:  # not the main thread
            self._previous.clear()
        return self

    def __exit__(self, *_: object) -> None:
        while self._previous:
            signal.signal(*self._previous.popitem())

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self.__exit__()  # a second signal has its usual effect

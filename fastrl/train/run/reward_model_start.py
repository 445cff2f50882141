"""Before the first step of a reward model: check the settings, load or resume; its evaluation."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastrl.train.config import RewardModelConfig
from fastrl.train.data import arithmetic_pairs, task_files
from fastrl.train.data.pairs import Pair, encode_pairs, pair_batches, read_pairs
from fastrl.train.distributed import ranks
from fastrl.train.distributed.process_group import check_joined
from fastrl.train.gradients import autocast
from fastrl.train.model import loading
from fastrl.train.model.finite_weights import check_weights
from fastrl.train.model.recomputation import save_memory
from fastrl.train.model.sequence_scorer import check_context, load_scorer
from fastrl.train.optimizers import make_optimizer
from fastrl.train.preference import bradley_terry, pair_scores
from fastrl.train.run import checkpoint
from fastrl.train.run.interrupt import Interrupt
from fastrl.train.run.run_log import Row, RunLog
from fastrl.train.scorer_warm_start import scorer_warm_start, scorer_warm_start_steps
from fastrl.train.settings.data import check_files_differ


class RewardModelJob(NamedTuple):
    """Model, pairs and log of a run in which a reward model learns."""

    config: RewardModelConfig
    log: RunLog
    model: Any
    tokenizer: Any
    train: list[Pair]
    held_out: list[Pair]
    resumed_from: Path | None

    def begin(self, parts: Mapping[str, Any], interrupt: Interrupt) -> int | None:
        """See `Job.begin`: what is new is warm started."""
        if self.resumed_from is not None:
            step = checkpoint.restore(self.resumed_from, parts)
            self.log.begin(step)
            return step
        self.log.begin(-1)
        if self.config.train_file is None:
            directory = self.log.directory / "data"
            split = arithmetic_pairs.split
            self.log.written += task_files.write(directory, split, self.config.seed)
        losses = scorer_warm_start(self.model, self.train, self.config)
        with self.log.stage("warm start", scorer_warm_start_steps(self.config)) as show:
            for i, loss in enumerate(losses, 1):
                if interrupt.requested:
                    self.log.discard()
                    return None
                show(i, {"loss": loss})
        return 0

    def reference(self) -> None:
        """There is none."""

    @torch.no_grad()
    def evaluate(self) -> Row:
        """Share of the held-out pairs that are ranked right, and their mean loss."""
        right, loss = 0.0, 0.0
        for batch in pair_batches(self.held_out, self.config.tokens_per_micro_batch):
            with autocast(self.config, self.model.device):
                scores = pair_scores(self.model, batch)
            right += float((scores.chosen > scores.rejected).sum())
            loss += float(bradley_terry(scores).double().sum())
        count = len(self.held_out)
        return {"held_out_accuracy": right / count, "held_out_loss": loss / count}


def prepare_reward_model(config: RewardModelConfig) -> RewardModelJob:
    """Check and load everything that ``config`` names; lock the directory of the run.

    Raises:
        ValueError: Anything that would stop the run later: a missing file, a malformed line, a
            pair that is too long, damaged weights, another process in the same directory.
    """
    check_joined()
    if ranks.count() > 1:
        raise ValueError(f"a reward model learns on one rank, got {ranks.count()}")
    log = RunLog(config, config.loop)
    try:
        return _prepare(config, log)
    except BaseException:
        log.close()
        raise


def _prepare(config: RewardModelConfig, log: RunLog) -> RewardModelJob:
    resumed_from = log.checkpoint_to_resume()
    if resumed_from is None:
        check_files_differ(config.train_file, config.held_out_file)
    if config.train_file is None or config.held_out_file is None:
        records: list[list[Any]] = list(arithmetic_pairs.split(config.seed))
    else:
        records = [read_pairs(file) for file in (config.train_file, config.held_out_file)]
    checkpoint.seed_all(config.seed)
    model, tokenizer = _load(config, log, resumed_from)
    check_weights(model)
    train, held_out = (
        encode_pairs(
            some, tokenizer, chat_template=config.chat_template, max_length=config.max_length
        )
        for some in records
    )
    longest = max(max(len(pair.chosen), len(pair.rejected)) for pair in train + held_out)
    check_context(model, longest, "max_length")
    save_memory(model, config)
    make_optimizer(model.parameters(), config)  # one that is not available fails here
    return RewardModelJob(config, log, model, tokenizer, train, held_out, resumed_from)


def _load(config: RewardModelConfig, log: RunLog, resumed_from: Path | None) -> tuple[Any, Any]:
    device = loading.find_device(config.device)
    how: dict[str, Any] = {
        "dtype": getattr(torch, config.weights),
        "trust_remote_code": config.trust_remote_code,
    }
    if resumed_from is not None:
        if not checkpoint.verify(resumed_from):
            log.say(f"{resumed_from} has no checksums; damaged files may go unnoticed")
        with checkpoint.reading(resumed_from):
            scorer = load_scorer(str(resumed_from), device, setting="resume", **how)
        return scorer.model, scorer.tokenizer
    scorer = load_scorer(config.model, device, setting="model", new_head=True, **how)
    if config.model is not None and scorer.new_head:
        log.say(f"{config.model} is a language model: its layers get a new head for the reward")
    return scorer.model, scorer.tokenizer

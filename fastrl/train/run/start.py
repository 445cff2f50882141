"""Before the first step of a policy: check the settings, load, resume or warm start."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastrl.train.config import GrpoConfig, PpoConfig
from fastrl.train.data import task_files
from fastrl.train.data.messages import prompt_text
from fastrl.train.data.prompts import Prompt, count_shared, encode
from fastrl.train.data.sources import read_records
from fastrl.train.data.tasks import SPLITS
from fastrl.train.distributed import ranks
from fastrl.train.distributed.follower_log import open_log
from fastrl.train.distributed.process_group import check_joined
from fastrl.train.distributed.scoring import in_shares
from fastrl.train.distributed.sharding import reshard, sharded
from fastrl.train.distributed.supported import check_supported
from fastrl.train.model import loading
from fastrl.train.model.finite_weights import check_weights
from fastrl.train.model.policy_model import keep_base, load_policy
from fastrl.train.model.recomputation import save_memory
from fastrl.train.model.reference import Reference
from fastrl.train.optimizers import make_optimizer
from fastrl.train.packing_check import check_packing
from fastrl.train.policy import check_head
from fastrl.train.rewards import Rewards, make_rewards, reward_model
from fastrl.train.run import checkpoint
from fastrl.train.run.interrupt import Interrupt
from fastrl.train.run.run_log import Row, RunLog
from fastrl.train.sampling import Sampler, make_sampler
from fastrl.train.settings.data import check_files_differ
from fastrl.train.warm_start import check_demonstrations, warm_start, warm_start_steps


class PolicyJob(NamedTuple):
    """Model, data, rewards and log of a run in which a policy learns from rewards."""

    config: GrpoConfig | PpoConfig
    log: RunLog
    model: Any
    tokenizer: Any
    train: list[Prompt]
    held_out: list[Prompt]
    rewards: Rewards
    sampler: Sampler
    resumed_from: Path | None

    def begin(self, parts: Mapping[str, Any], interrupt: Interrupt) -> int | None:
        """See `Job.begin`: what is new is warm started."""
        if self.resumed_from is not None:
            step = checkpoint.restore(self.resumed_from, parts)
            self._begin_log(step)
            self._keep_reward_model()
            return step
        self._begin_log(-1)
        losses = warm_start(self.model, self.tokenizer, self.train, self.config)
        with self.log.stage("warm start", warm_start_steps(self.config)) as show:
            for i, loss in enumerate(losses, 1):
                if interrupt.on_any_rank():
                    self.log.discard()
                    return None
                show(i, {"loss": loss})
        ranks.from_first(
            lambda: keep_base(self.model, self.tokenizer, self.config, self.log.directory)
        )
        self._keep_reward_model()
        return 0

    def _keep_reward_model(self) -> None:
        if (judge := self.rewards.model) is not None:
            ranks.from_first(lambda: reward_model.keep(judge, self.log.directory))

    def _begin_log(self, step: int) -> None:
        def begin() -> list[Row]:
            self.log.begin(step)
            if self.resumed_from is None and not self.config.has_prompts:
                split, directory = SPLITS[self.config.task], self.log.directory / "data"
                self.log.written += task_files.write(directory, split, self.config.seed)
            return self.log.rows

        self.log.rows = ranks.from_first(begin)

    def reference(self) -> Reference | None:
        """The initial policy if the loss has a KL to it."""
        if self.config.kl_coef == 0:
            return None
        resumed = self.resumed_from is not None
        return Reference(self.model, self.config, self.log.directory, resumed=resumed)

    def evaluate(self) -> Row:
        """Mean reward of greedy completions of the held-out prompts; uses no random numbers."""
        before = checkpoint.rng_state()
        completions, lengths = self.sampler.greedy(self.held_out)
        records = [prompt.record for prompt in self.held_out]
        scored = in_shares(self.rewards.score, records, completions, lengths)
        checkpoint.set_rng_state(before)
        return self.rewards.means(scored, held_out=True)


def prepare(config: GrpoConfig | PpoConfig, loop: str) -> PolicyJob:
    """Check and load everything that ``config`` names; lock the directory of the run.

    The rewards of the job must be closed, and its log.

    Raises:
        ValueError: Anything that would stop the run later: a missing file, a malformed line, a
            prompt that is too long, a reward that does not exist or returns a wrong type, damaged
            weights, another process that runs in the same directory.
    """
    check_joined()
    check_supported(config)
    log = open_log(config, loop)
    with ExitStack() as unless_prepared:
        unless_prepared.callback(log.close)
        resumed_from = ranks.agreed(log.checkpoint_to_resume)
        resumed = None if resumed_from is None else log.directory
        rewards = unless_prepared.enter_context(ranks.agreed(lambda: make_rewards(config, resumed)))
        if rewards.model is not None and rewards.model.path != config.reward_model:
            log.say(f"reward_model: {rewards.model.path}")
        job = _prepare(config, log, rewards, resumed_from)
        unless_prepared.pop_all()
    return job


def _prepare(
    config: GrpoConfig | PpoConfig, log: RunLog, rewards: Rewards, resumed_from: Path | None
) -> PolicyJob:
    job = ranks.agreed(lambda: _load(config, log, rewards, resumed_from))
    sharded(job.model, config, loading.find_device(config.device))
    save_memory(job.model, config)
    check_packing(job.model, config)
    reshard(job.model)
    make_optimizer(job.model.parameters(), config)  # one that is not available fails here
    return job


def _load(
    config: GrpoConfig | PpoConfig, log: RunLog, rewards: Rewards, resumed_from: Path | None
) -> PolicyJob:
    """Everything that a rank does without the others."""
    if resumed_from is None:
        check_files_differ(config.train_file, config.held_out_file)
    records = read_records(config) if config.has_prompts else SPLITS[config.task](config.seed)
    for some in records:
        rewards.probe(some)  # a broken function fails here
    checkpoint.seed_all(config.seed)
    device = loading.find_device(config.device)
    if ranks.count() > 1 and config.parallel == "fsdp":
        device = torch.device("cpu")  # a GPU may be too small for all weights
    if resumed_from is not None and not checkpoint.verify(resumed_from):
        log.say(f"{resumed_from} has no checksums; damaged files may go unnoticed")
    model, tokenizer = load_policy(config, device, log, resumed_from)
    check_weights(model)
    check_head(model, config)
    train, held_out = (
        encode(
            some,
            tokenizer,
            chat_template=config.chat_template,
            max_tokens=config.max_prompt_tokens,
            system_prompt=config.system_prompt,
        )
        for some in records
    )
    if shared := count_shared(train, held_out):
        log.say(
            f"{shared} of {len(held_out)} held-out prompts are also training prompts; their reward "
            "does not measure generalization"
        )
    if resumed_from is None:
        check_demonstrations(train, tokenizer, config)
    check_length(model, train + held_out, config.max_new_tokens)
    sampler = make_sampler(model, tokenizer, config)
    return PolicyJob(config, log, model, tokenizer, train, held_out, rewards, sampler, resumed_from)


def check_length(model: Any, prompts: list[Prompt], max_new_tokens: int) -> None:
    """Raise a `ValueError` if the longest prompt and completion exceed the model's context."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
    length = len(longest.token_ids)
    if context is None or length + max_new_tokens <= context:
        return
    if length >= context:
        raise ValueError(
            f"max_prompt_tokens must be below {context}, the context of this model; got a prompt "
            f"of {length} tokens, {prompt_text(longest.record)[:80]!r}"
        )
    raise ValueError(
        f"max_new_tokens must be at most {context - length} for this model, with a context of "
        f"{context} tokens, and a longest prompt of {length}; got {max_new_tokens}"
    )

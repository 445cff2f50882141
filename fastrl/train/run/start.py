"""Before the first step of a policy: check the settings, load, resume or warm start."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from fastrl.train.config import GrpoConfig, PpoConfig
from fastrl.train.data import arithmetic
from fastrl.train.data.messages import prompt_text
from fastrl.train.data.prompts import Prompt, encode
from fastrl.train.data.sources import read_records
from fastrl.train.model import loading
from fastrl.train.model.finite_weights import check_weights
from fastrl.train.model.policy_model import keep_base, load_policy
from fastrl.train.model.recomputation import save_memory
from fastrl.train.model.reference import Reference
from fastrl.train.optimizers import make_optimizer
from fastrl.train.packing_check import check_packing
from fastrl.train.policy import check_head
from fastrl.train.rewards import Rewards, make_rewards
from fastrl.train.run import checkpoint
from fastrl.train.run.interrupt import Interrupt
from fastrl.train.run.run_log import Row, RunLog
from fastrl.train.sampling import Sampler, make_sampler
from fastrl.train.warm_start import check_demonstrations, warm_start


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
            self.log.begin(step)
            return step
        self.log.begin(0)
        if not self.config.has_prompts:
            self.log.written += arithmetic.write(self.log.directory / "data", self.config.seed)
        losses = warm_start(self.model, self.tokenizer, self.train, self.config)
        for i, loss in enumerate(losses, 1):
            if interrupt.requested:
                self.log.discard()
                return None
            if i % 50 == 0:
                self.log.say(f"warm start: step {i}, loss {loss:.3f}")
        keep_base(self.model, self.tokenizer, self.config, self.log.directory)
        return 0

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
        scored = self.rewards.score(records, completions, lengths)
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
    log = RunLog(config, loop)
    with ExitStack() as unless_prepared:
        unless_prepared.callback(log.close)
        rewards = unless_prepared.enter_context(make_rewards(config))
        job = _prepare(config, log, rewards)
        unless_prepared.pop_all()
    return job


def _prepare(config: GrpoConfig | PpoConfig, log: RunLog, rewards: Rewards) -> PolicyJob:
    records = read_records(config) if config.has_prompts else arithmetic.split(config.seed)
    for some in records:
        rewards.probe(some)  # a broken function fails here
    resumed_from = checkpoint.latest(log.checkpoints) if config.resume else None
    if config.resume and resumed_from is None:
        log.say(f"{log.checkpoints} holds no checkpoint; the run begins anew")
    checkpoint.seed_all(config.seed)
    device = loading.find_device(config.device)
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
    if resumed_from is None:
        check_demonstrations(train, tokenizer, config)
    check_length(model, train + held_out, config.max_new_tokens)
    save_memory(model, config)
    check_packing(model, config)
    make_optimizer(model.parameters(), config)  # one that is not available fails here
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

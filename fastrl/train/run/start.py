"""Before the first step of a policy: check the settings, load, resume or warm start."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fastrl.train.config import GrpoConfig, PpoConfig
from fastrl.train.data import arithmetic
from fastrl.train.data.prompts import Prompt, encode, read_jsonl
from fastrl.train.model import loading
from fastrl.train.model.finite_weights import check_weights
from fastrl.train.model.policy_model import keep_base, load_policy
from fastrl.train.model.recomputation import save_memory
from fastrl.train.model.reference import Reference
from fastrl.train.optimizers import make_optimizer
from fastrl.train.packing_check import check_packing
from fastrl.train.policy import check_head
from fastrl.train.rewards import RewardFunction, import_reward, score
from fastrl.train.rewards.reward_model import load_reward_model
from fastrl.train.run import checkpoint
from fastrl.train.run.interrupt import Interrupt
from fastrl.train.run.run_log import Row, RunLog
from fastrl.train.sampling import Sampler, make_sampler
from fastrl.train.warm_start import check_demonstrations, warm_start


class PolicyJob(NamedTuple):
    """Model, data, reward and log of a run in which a policy learns from rewards."""

    config: GrpoConfig | PpoConfig
    log: RunLog
    model: Any
    tokenizer: Any
    train: list[Prompt]
    held_out: list[Prompt]
    reward: RewardFunction
    sampler: Sampler
    resumed_from: Path | None

    def begin(self, parts: Mapping[str, Any], interrupt: Interrupt) -> int | None:
        """See `Job.begin`: what is new is warm started."""
        if self.resumed_from is not None:
            step = checkpoint.restore(self.resumed_from, parts)
            self.log.begin(step)
            return step
        self.log.begin(0)
        if self.config.train_file is None:
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
        completions = self.sampler.greedy(self.held_out)
        rewards = score(self.reward, [prompt.record for prompt in self.held_out], completions)
        checkpoint.set_rng_state(before)
        return {"held_out_reward": float(rewards.double().mean())}


def prepare(config: GrpoConfig | PpoConfig, loop: str) -> PolicyJob:
    """Check and load everything that ``config`` names; lock the directory of the run.

    Raises:
        ValueError: Anything that would stop the run later: a missing file, a malformed line, a
            prompt that is too long, a reward that does not exist or returns a wrong type, damaged
            weights, another process that runs in the same directory.
    """
    log = RunLog(config, loop)
    try:
        return _prepare(config, log)
    except BaseException:
        log.close()
        raise


def _prepare(config: GrpoConfig | PpoConfig, log: RunLog) -> PolicyJob:
    reward = _reward(config)
    if config.train_file is None or config.held_out_file is None:
        records = list(arithmetic.split(config.seed))
    else:
        records = [read_jsonl(file) for file in (config.train_file, config.held_out_file)]
    for some in records:
        score(reward, some, [""] * len(some))  # a broken reward fails here
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
            some, tokenizer, chat_template=config.chat_template, max_tokens=config.max_prompt_tokens
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
    return PolicyJob(config, log, model, tokenizer, train, held_out, reward, sampler, resumed_from)


def _reward(config: GrpoConfig | PpoConfig) -> RewardFunction:
    if config.reward_model is None:
        return import_reward(config.reward)
    device = loading.find_device(config.device)
    return load_reward_model(config.reward_model, device, chat_template=config.chat_template)


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
            f"of {length} tokens, {longest.record['prompt'][:80]!r}"
        )
    raise ValueError(
        f"max_new_tokens must be at most {context - length} for this model, with a context of "
        f"{context} tokens, and a longest prompt of {length}; got {max_new_tokens}"
    )

"""Before the first step: check the settings, load, resume or warm start; and evaluation."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fastrl.train import arithmetic, checkpoint, models
from fastrl.train.config import GrpoConfig, PpoConfig
from fastrl.train.interrupt import Interrupt
from fastrl.train.optimizers import make_optimizer
from fastrl.train.packing_check import check_packing
from fastrl.train.policy import check_head
from fastrl.train.policy_model import keep_base, load_policy
from fastrl.train.prompts import Prompt, encode, read_jsonl
from fastrl.train.recomputation import save_memory
from fastrl.train.rewards import RewardFunction, import_reward, score
from fastrl.train.run_log import RunLog
from fastrl.train.sampling import Sampler, make_sampler
from fastrl.train.warm_start import check_demonstrations, warm_start


class Job(NamedTuple):
    """Model, data, reward and log of a run."""

    log: RunLog
    model: Any
    tokenizer: Any
    train: list[Prompt]
    held_out: list[Prompt]
    reward: RewardFunction
    sampler: Sampler
    resumed_from: Path | None


def prepare(config: GrpoConfig | PpoConfig, loop: str) -> Job:
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


def _prepare(config: GrpoConfig | PpoConfig, log: RunLog) -> Job:
    reward = import_reward(config.reward)
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
    device = models.find_device(config.device)
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
    return Job(log, model, tokenizer, train, held_out, reward, sampler, resumed_from)


def check_weights(model: Any) -> None:
    """Raise a `ValueError` that names a tensor with a value that is not finite."""
    if (name := not_finite(model)) is not None:
        raise ValueError(f"model must have finite weights, got a NaN or infinity in {name!r}")


def not_finite(model: Any) -> str | None:
    """The name of the first tensor with a value that is not finite."""
    for name, weight in model.named_parameters():
        if not weight.is_floating_point() or weight.itemsize == 1 or weight.numel() == 0:
            continue  # quantized weights have no NaN, or no minimum
        if not all(end.isfinite() for end in weight.detach().aminmax()):
            return str(name)
    return None


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


def begin(
    job: Job, config: GrpoConfig | PpoConfig, parts: Mapping[str, Any], interrupt: Interrupt
) -> int | None:
    """Restore the checkpoint to resume from, or warm start.

    Returns:
        How many steps are done; None if the warm start was interrupted and nothing is kept.
    """
    if job.resumed_from is not None:
        step = checkpoint.restore(job.resumed_from, parts)
        job.log.begin(step)
        return step
    job.log.begin(0)
    if config.train_file is None:
        arithmetic.write(job.log.directory / "data", config.seed)
    for i, loss in enumerate(warm_start(job.model, job.tokenizer, job.train, config), 1):
        if interrupt.requested:
            job.log.discard()
            return None
        if i % 50 == 0:
            job.log.say(f"warm start: step {i}, loss {loss:.3f}")
    keep_base(job.model, job.tokenizer, config, job.log.directory)
    return 0


def evaluate(job: Job, config: GrpoConfig | PpoConfig) -> float:
    """Mean reward of greedy completions of the held-out prompts; uses no random numbers."""
    before = checkpoint.rng_state()
    completions = job.sampler.greedy(job.held_out)
    rewards = score(job.reward, [prompt.record for prompt in job.held_out], completions)
    checkpoint.set_rng_state(before)
    return float(rewards.double().mean())

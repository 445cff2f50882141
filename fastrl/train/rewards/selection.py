"""From the names in the settings to reward functions."""

from collections import Counter
from functools import partial
from pathlib import Path

from fastrl.train.config import RunConfig
from fastrl.train.model.loading import find_device
from fastrl.train.rewards import reward_model
from fastrl.train.rewards.functions import exact_match
from fastrl.train.rewards.lengths import length_penalty, overlong
from fastrl.train.rewards.numbers import number_equality
from fastrl.train.rewards.patterns import (
    SECONDS,
    compiled_pattern,
    has_format,
    regular_expression,
)
from fastrl.train.rewards.reward_model import RewardModel
from fastrl.train.rewards.scoring import import_reward
from fastrl.train.rewards.weighted import Judge, Rewards, in_this_process, in_workers
from fastrl.train.rewards.workers import WorkerPool
from fastrl.train.settings.rewards import READY, REWARD_MODEL


def make_rewards(config: RunConfig, run: Path | None = None) -> Rewards:
    """The rewards that ``config.reward`` names, with their weights.

    Ready functions are quick; they and a reward model are called in this process.

    Args:
        config: The settings of the run.
        run: Its directory if it is resumed, which knows the reward model that it began with.

    Raises:
        ValueError: A function does not exist, or a setting of one cannot be used; or the reward
            model of a resumed run is gone, or another one.
    """
    own = [name for name in config.reward if name not in (*READY, REWARD_MODEL)]
    for name in own:
        import_reward(name)
    pool = None
    if own and (config.reward_workers or config.reward_timeout is not None):
        pool = WorkerPool(
            max(1, config.reward_workers),
            config.reward_timeout,
            own,
            stop_at_failure=config.reward_failed is None,
        )
    model = _reward_model(config, run)
    names = _shown(config.reward)
    judges = {shown: _judge(name, config, pool, model) for shown, name in names.items()}
    weights = config.reward_weights or (1.0,) * len(config.reward)
    return Rewards(
        judges,
        dict(zip(judges, weights, strict=True)),
        quick=[shown for shown, name in names.items() if name in READY],
        failed=config.reward_failed,
        pool=pool,
        model=model,
    )


def _reward_model(config: RunConfig, run: Path | None) -> RewardModel | None:
    if config.reward_model is None:
        return None
    return reward_model.load_reward_model(
        config.reward_model,
        find_device(config.device),
        chat_template=config.chat_template,
        system_prompt=config.system_prompt,
        trust_remote_code=config.trust_remote_code,
        kept=None if run is None else reward_model.read_kept(run),
    )


def _shown(names: tuple[str, ...]) -> dict[str, str]:
    """The functions by their names in the log: without the module, if that is unique."""
    short = [name.rpartition(":")[2] for name in names]
    count = Counter(short)
    return {s if count[s] == 1 else name: name for s, name in zip(short, names, strict=True)}


def _judge(
    name: str, config: RunConfig, pool: WorkerPool | None, model: RewardModel | None
) -> Judge:
    seconds = config.reward_timeout or SECONDS
    longest = config.max_new_tokens
    if name == "exact_match":
        return in_this_process(exact_match)
    if name == "number_equality":
        return in_this_process(number_equality)
    if name == "regular_expression":
        pattern = config.reward_pattern
        if pattern is not None:
            compiled_pattern(pattern, "reward_pattern")
        return in_this_process(partial(regular_expression, pattern=pattern, seconds=seconds))
    if name == "format":
        form = config.reward_format
        compiled_pattern(form, "reward_format")
        return lambda given: has_format(given.texts, pattern=form, seconds=seconds)
    if name == "length_penalty":
        return lambda given: length_penalty(given.lengths, max_new_tokens=longest)
    if name == "overlong":
        buffer = config.overlong_buffer or max(1, longest // 5)
        overlong([], max_new_tokens=longest, buffer=buffer)  # a wrong setting fails here
        return lambda given: overlong(given.lengths, max_new_tokens=longest, buffer=buffer)
    if name == REWARD_MODEL:
        assert model is not None
        return in_this_process(model)
    return in_this_process(import_reward(name)) if pool is None else in_workers(name, pool)

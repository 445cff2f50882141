"""What a run says about its prompts before it begins, since the result may not be as expected."""

from collections.abc import Iterator
from typing import Any

from fastrl.train.config import RunConfig
from fastrl.train.endings import Endings
from fastrl.train.prompts import Prompt, Record, count_shared


def remarks(
    records: tuple[list[Record], list[Record]],
    train: list[Prompt],
    held_out: list[Prompt],
    tokenizer: Any,
    config: RunConfig,
) -> Iterator[str]:
    """Yield lines about the training and held-out records, and the prompts that are left."""
    for name, some, prompts in (("", records[0], train), ("held-out ", records[1], held_out)):
        if short := len(some) - len(prompts):
            yield (
                f"{short} of {len(some)} {name}prompts are left out: they are longer than "
                f"max_prompt_tokens, {config.max_prompt_tokens}"
            )
    if shared := count_shared(train, held_out):
        yield (
            f"{shared} of {len(held_out)} held-out prompts are also training prompts; their "
            "reward does not measure generalization"
        )
    begin = tokenizer.bos_token_id
    both = [*train, *held_out]
    if twice := sum(p.token_ids[:2] == [begin] * 2 for p in both if begin is not None):
        yield (
            f"{twice} of {len(both)} prompts begin with two {tokenizer.bos_token!r}: texts that "
            "already have the chat template get another; give the messages, or leave it out"
        )


def ending_remark(prompts: list[Prompt], tokenizer: Any, endings: Endings) -> Iterator[str]:
    """Yield a line if a completion does not end where the chat template ends an answer."""
    for end in {prompt.turn_end.strip() for prompt in prompts} - {""}:
        written = tokenizer(end, add_special_tokens=False)["input_ids"]
        if not {*written} & {*endings.token_ids} and not any(map(end.__contains__, endings.texts)):
            yield (
                f"the chat template ends an answer with {end!r}, which ends no completion here: "
                "name it with --stop"
            )


def evaluation_remark(held_out: list[Prompt], config: RunConfig) -> Iterator[str]:
    """Yield a line if an evaluation has more than half the completions of the steps before it."""
    sampled = config.eval_every * config.prompts_per_step * config.group_size
    if 2 * len(held_out) > sampled:
        yield (
            f"each evaluation completes {len(held_out)} held-out prompts, and the "
            f"{config.eval_every} steps between two sample {sampled} completions: for shorter "
            "evaluations hold out fewer, such as --splits train 'test[:200]' of a data set, or "
            "raise --eval_every"
        )

"""Preference pairs: read from JSONL, tokenized, in batches by tokens."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fastrl.train.data.messages import prompt_text
from fastrl.train.data.prompts import Record, read_jsonl
from fastrl.train.data.scored_text import encode_scored
from fastrl.train.padding import by_length


class Pair(NamedTuple):
    """Two completions of a prompt, each with it as the token ids of one sequence."""

    chosen: list[int]
    rejected: list[int]
    prompt_tokens: int  # of the prompt alone; 0 in a chat template
    margin: float  # by how much the reward of the chosen one should be larger


def read_pairs(path: str | Path) -> list[Record]:
    """The records of a file: one JSON object with the keys below per line; blank lines are skipped.

    ``"prompt"`` is a text or messages, ``"chosen"`` and ``"rejected"`` are strings that differ, and
    ``"margin"``, where it is present, is a finite number of 0 or more.

    Raises:
        ValueError: The file cannot be read or is empty, or a line is invalid (``file:line``).
    """
    return read_jsonl(path, check=_check)


def _check(record: Record, where: str) -> None:
    for name in ("chosen", "rejected"):
        if not isinstance(record.get(name), str):
            raise ValueError(  # noqa: TRY004
                f'{where}: "{name}" must be a string, got {record.get(name)!r}'
            )
    if record["chosen"] == record["rejected"]:
        raise ValueError(
            f'{where}: "chosen" and "rejected" must differ, both are {record["chosen"]!r}'
        )
    margin = record.get("margin", 0)
    number = isinstance(margin, (int, float)) and not isinstance(margin, bool)
    if not number or not 0 <= margin < math.inf:
        raise ValueError(f'{where}: "margin" must be a number of 0 or more, got {margin!r}')


def encode_pairs(
    records: list[Record], tokenizer: Any, *, chat_template: bool, max_length: int
) -> list[Pair]:
    """Tokenize the pairs; see `encode_scored`.

    Raises:
        ValueError: A prompt with a completion is longer than ``max_length`` tokens, or cannot be
            tokenized; or there is no chat template.
    """
    prompts = [record["prompt"] for record in records]
    chats = [chat_template or not isinstance(prompt, str) for prompt in prompts]
    if any(chats) and tokenizer.chat_template is None:
        raise ValueError("chat_template: the tokenizer has none")
    both = [
        _encode(records, tokenizer, name, chat_template=chat_template)
        for name in ("chosen", "rejected")
    ]
    pairs = []
    for record, chat, chosen, rejected in zip(records, chats, *both, strict=True):
        longest = max(len(chosen), len(rejected))
        if longest > max_length:
            raise ValueError(
                f"max_length must cover every prompt with its completions, got {longest} tokens "
                f"for {prompt_text(record)[:80]!r}"
            )
        alone = 0 if chat else len(tokenizer(record["prompt"])["input_ids"])
        pairs.append(Pair(chosen, rejected, alone, float(record.get("margin", 0))))
    return pairs


def pair_batches(pairs: list[Pair], tokens: int) -> Iterator[list[Pair]]:
    """The pairs in batches of similar lengths, each of at most ``tokens`` tokens with padding.

    A longer pair is a batch of its own.
    """
    lengths = [2 * max(len(pair.chosen), len(pair.rejected)) for pair in pairs]
    for batch in by_length(lengths, tokens):
        yield [pairs[i] for i in batch]


def _encode(
    records: list[Record], tokenizer: Any, name: str, *, chat_template: bool
) -> list[list[int]]:
    """The sequences of each prompt with its completion ``name``."""
    prompts, completions = ([record[key] for record in records] for key in ("prompt", name))
    try:
        return encode_scored(tokenizer, prompts, completions, chat_template=chat_template)
    except ValueError as error:
        for record in records if len(records) > 1 else ():
            _encode([record], tokenizer, name, chat_template=chat_template)  # raises for the one
        raise ValueError(f"prompt {prompt_text(records[0])[:80]!r}: {error}") from error

"""Prompts: read from JSONL, in an order that depends only on seed and step."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

Record = dict[str, Any]
Item = TypeVar("Item")


class Prompt(NamedTuple):
    """A record and its tokenized prompt."""

    record: Record
    token_ids: list[int]


def read_jsonl(
    path: str | Path, check: Callable[[Record, str], None] | None = None
) -> list[Record]:
    """The records of a file: one JSON object with a ``"prompt"`` string per line.

    Blank lines are skipped. ``check`` is called with each record and its ``file:line``.

    Raises:
        ValueError: The file cannot be read or is empty, or a line is invalid (``file:line``).
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    records = []
    for i, line in enumerate(lines, 1):
        if line.strip():
            records.append(_record(line, f"{path}:{i}"))
            if check is not None:
                check(records[-1], f"{path}:{i}")
    if not records:
        raise ValueError(f"{path} holds no prompts")
    return records


def _record(line: bytes, where: str) -> Record:
    try:
        record = json.loads(line.decode())
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # invalid bytes, too many digits or brackets
        raise ValueError(f"{where}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where}: must be an object, got {type(record).__name__}")  # noqa: TRY004
    if not isinstance(record.get("prompt"), str) or not record["prompt"]:
        raise ValueError(
            f'{where}: "prompt" must be a non-empty string, got {record.get("prompt")!r}'
        )
    return record


def encode(
    records: list[Record], tokenizer: Any, *, chat_template: bool, max_tokens: int
) -> list[Prompt]:
    """Tokenize the prompts, each as a user message if ``chat_template``.

    Raises:
        ValueError: A prompt is longer than ``max_tokens`` or cannot be tokenized.
    """
    if chat_template and tokenizer.chat_template is None:
        raise ValueError("chat_template: the tokenizer has none")
    prompts = []
    for record in records:
        text = record["prompt"]
        if chat_template:
            message = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(
                message, tokenize=False, add_generation_prompt=True
            )
        try:
            token_ids = tokenizer(text, add_special_tokens=not chat_template)["input_ids"]
        except Exception as error:  # the tokenizers package raises nothing narrower
            raise ValueError(f"prompt {text[:80]!r} cannot be tokenized: {error}") from error
        if not 0 < len(token_ids) <= max_tokens:
            raise ValueError(
                f"max_prompt_tokens must cover every prompt, got {len(token_ids)} tokens in "
                f"{text[:80]!r}"
            )
        prompts.append(Prompt(record, token_ids))
    return prompts


def deal(prompts: list[Item], *, count: int, step: int, seed: int) -> list[Item]:
    """The ``count`` prompts of a step: every prompt once in random order, then in another order.

    There is no state between calls, so a resumed run continues with the same prompts.
    """
    n = len(prompts)
    orders: dict[int, list[int]] = {}
    chosen = []
    for position in range(step * count, (step + 1) * count):
        epoch, place = divmod(position, n)
        if epoch not in orders:
            generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
            orders[epoch] = torch.randperm(n, generator=generator).tolist()
        chosen.append(prompts[orders[epoch][place]])
    return chosen

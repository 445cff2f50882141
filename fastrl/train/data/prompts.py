"""Prompts: read from JSONL, in an order that depends only on seed and step."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from fastrl.train.data.messages import check_messages, render

Record = dict[str, Any]
Item = TypeVar("Item")


class Prompt(NamedTuple):
    """A record and its tokenized prompt."""

    record: Record
    token_ids: list[int]


class Columns(NamedTuple):
    """The columns of a data set that become ``"prompt"`` and ``"answer"`` of its records."""

    prompt: str = "prompt"
    answer: str = "answer"


def read_jsonl(
    path: str | Path,
    columns: Columns = Columns(),  # noqa: B008
    *,
    check: Callable[[Record, str], None] | None = None,
) -> list[Record]:
    """The records of a file: one JSON object with a prompt per line.

    Blank lines are skipped. ``check`` is called with each record and its ``file:line``.

    Raises:
        ValueError: The file cannot be read or is empty, or a line is invalid (``file:line``).
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except (OSError, ValueError) as error:  # the latter if there is a NUL
        raise ValueError(f"{path} cannot be read: {error}") from error
    records = []
    for i, line in enumerate(lines, 1):
        if line.strip():
            records.append(as_record(_object(line, f"{path}:{i}"), f"{path}:{i}", columns))
            if check is not None:
                check(records[-1], f"{path}:{i}")
    if not records:
        raise ValueError(f"{path} holds no prompts")
    return records


def as_record(row: Any, where: str, columns: Columns) -> Record:
    """A row with its columns renamed: its ``"prompt"`` is text or messages.

    Raises:
        ValueError: It is not one, or lacks a column; the message begins with ``where``.
    """
    if not isinstance(row, dict):
        raise ValueError(f"{where}: must be an object, got {type(row).__name__}")  # noqa: TRY004
    record = dict(row)
    for name, column in columns._asdict().items():
        if column == name:
            continue
        if column not in row:
            raise ValueError(f"{where}: {name}_column {column!r} is missing, got {sorted(row)}")
        if name in row:
            raise ValueError(f"{where}: {name}_column {column!r} must not hide the column {name!r}")
        record[name] = record.pop(column)
    prompt = record.get("prompt")
    if isinstance(prompt, list):
        check_messages(prompt, f'{where}: "prompt"')
    elif not isinstance(prompt, str) or not prompt:
        raise ValueError(
            f'{where}: "prompt" must be a non-empty string or a list of messages, got {prompt!r}'
        )
    return record


def _object(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.decode())
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # invalid bytes, too many digits or brackets
        raise ValueError(f"{where}: not JSON: {error}") from error


def encode(
    records: list[Record],
    tokenizer: Any,
    *,
    chat_template: bool,
    max_tokens: int,
    system_prompt: str | None = None,
) -> list[Prompt]:
    """Tokenize the prompts.

    Args:
        records: Records with checked prompts.
        tokenizer: The model's.
        chat_template: Whether prompts that are text become a user message. Messages always go
            through the chat template.
        max_tokens: Length of the longest prompt.
        system_prompt: System message of the prompts that have none of their own.

    Raises:
        ValueError: A prompt is longer than ``max_tokens`` or cannot be tokenized, or there is no
            chat template, or none is used although there is a ``system_prompt``.
    """
    prompts = []
    for record in records:
        prompt = record["prompt"]
        chat = chat_template or not isinstance(prompt, str)
        if chat and tokenizer.chat_template is None:
            raise ValueError("chat_template: the tokenizer has none")
        if not chat and system_prompt is not None:
            raise ValueError(
                "system_prompt must be used with chat_template or prompts that are messages, got "
                f"prompt {prompt[:80]!r}"
            )
        text = render(prompt, tokenizer, system_prompt) if chat else prompt
        try:
            token_ids = tokenizer(text, add_special_tokens=not chat)["input_ids"]
        except Exception as error:  # the tokenizers package raises nothing narrower
            raise ValueError(f"prompt {text[:80]!r} cannot be tokenized: {error}") from error
        if not 0 < len(token_ids) <= max_tokens:
            raise ValueError(
                f"max_prompt_tokens must cover every prompt, got {len(token_ids)} tokens in "
                f"{text[:80]!r}"
            )
        prompts.append(Prompt(record, token_ids))
    return prompts


def count_shared(train: list[Prompt], held_out: list[Prompt]) -> int:
    """How many of the held-out prompts are also training prompts."""
    trained = {hash(tuple(prompt.token_ids)) for prompt in train}  # far less than the tuples
    return sum(hash(tuple(prompt.token_ids)) in trained for prompt in held_out)


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

"""Prompts, which are read, tokenized, and dealt to steps in an order set by seed and step."""

import glob
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from fastrl.train import arithmetic, long_addition
from fastrl.train.config import RunConfig

Record = dict[str, Any]
Item = TypeVar("Item")

#: The embedded tasks.
TASKS = {"arithmetic": arithmetic.split, "long_addition": long_addition.split}
_FILES = (".jsonl", ".parquet")


class Prompt(NamedTuple):
    """A record and its tokenized prompt."""

    record: Record
    token_ids: list[int]

    @property
    def text(self) -> str:
        """The prompt as text, or the last message of a conversation."""
        prompt = self.record["prompt"]
        return str(prompt if isinstance(prompt, str) else prompt[-1]["content"])


def read_records(config: RunConfig) -> tuple[list[Record], list[Record]]:
    """Return the records for training and the held-out records.

    Raises:
        ValueError: The records cannot be read, or a row is invalid; the message names the place.
    """
    first, *rest = config.prompts
    if first in TASKS and not rest:
        return TASKS[first](config.seed)
    if Path(first).suffix in _FILES:
        if not rest or Path(first).resolve() == Path(rest[0]).resolve():
            raise ValueError(f"prompts must be two different files, got {config.prompts}")
        train, held_out = (_records(_of_file(path), path, config) for path in config.prompts)
        return train, held_out
    train, held_out = (
        _records(rows, f"{first} split {split!r}", config)
        for rows, split in zip(_of_dataset(config), config.splits, strict=True)
    )
    return train, held_out


def digest(records: list[Record]) -> str:
    """Return a checksum of all records, which reveals a change."""
    text = json.dumps(records, sort_keys=True, default=lambda value: type(value).__name__)
    return hashlib.sha256(text.encode()).hexdigest()


def encode(records: list[Record], tokenizer: Any, config: RunConfig) -> list[Prompt]:
    """Tokenize the prompts; conversations go through the chat template.

    Raises:
        ValueError: A prompt is longer than ``max_prompt_tokens`` or cannot be tokenized, or there
            is no chat template.
    """
    prompts = []
    for record in records:
        prompt = record["prompt"]
        chat = config.chat_template or not isinstance(prompt, str)
        if chat and tokenizer.chat_template is None:
            raise ValueError("chat_template: the tokenizer has no chat template")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            text = (
                tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
                if chat
                else prompt
            )
            token_ids = tokenizer(text, add_special_tokens=not chat)["input_ids"]
        except Exception as error:  # templates are programs, and tokenizers raise nothing narrower
            raise ValueError(
                f"prompts: {str(prompt)[:80]!r} cannot be tokenized: {_reason(error)}"
            ) from error
        if not 0 < len(token_ids) <= config.max_prompt_tokens:
            raise ValueError(
                f"max_prompt_tokens must cover every prompt, got {len(token_ids)} tokens in "
                f"{text[:80]!r}"
            )
        prompts.append(Prompt(record, token_ids))
    return prompts


def count_shared(train: list[Prompt], held_out: list[Prompt]) -> int:
    """Return the number of held-out prompts that are also training prompts."""
    trained = {hash(tuple(prompt.token_ids)) for prompt in train}  # far smaller than the tuples
    return sum(hash(tuple(prompt.token_ids)) in trained for prompt in held_out)


def deal(prompts: list[Item], *, count: int, step: int, seed: int) -> list[Item]:
    """Return the ``count`` prompts of a step: all prompts in random order, then in another order.

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


def _of_file(path: str) -> Iterable[Record]:
    if not Path(path).is_file():
        raise ValueError(f"prompts: there is no file {path}")
    if Path(path).suffix not in _FILES:
        raise ValueError(f"prompts must be .jsonl or .parquet files, got {path}")
    try:
        if Path(path).suffix == ".jsonl":  # not by `datasets`, which turns text into dates
            lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
            return [json.loads(line) for line in lines if line.strip()]
        files = {"data_files": glob.escape(path), "split": "train", "streaming": True}
        return list(_datasets().load_dataset("parquet", **files))
    except Exception as error:  # the type depends on the library and the data
        raise ValueError(f"prompts: {path} cannot be read: {_reason(error)}") from error


def _of_dataset(config: RunConfig) -> Iterable[Iterable[Record]]:
    name, datasets = config.prompts[0], _datasets()
    try:
        return [datasets.load_dataset(*config.prompts, split=split) for split in config.splits]
    except Exception as error:  # the type depends on the library and the data
        where = "" if Path(name).exists() else "there is no such task or directory; on the hub: "
        raise ValueError(f"prompts: {name!r} cannot be read: {where}{_reason(error)}") from error


def _records(rows: Iterable[Record], where: str, config: RunConfig) -> list[Record]:
    records = []
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ValueError(f"{where} row {number}: must be an object, got {row!r}")  # noqa: TRY004
        of = {c: n for n, c in zip(("prompt", "answer"), config.columns, strict=True)}
        if missing := [column for column, name in of.items() if column not in (name, *row)]:
            raise ValueError(f"columns: {where} has no {missing[0]!r}, only {', '.join(row)}")
        record = {of.get(column, column): value for column, value in row.items()}
        if not _is_prompt(record.get("prompt")):
            raise ValueError(
                f'{where} row {number}: "prompt" must be text, or messages with role and content, '
                f"the last not the assistant's, got {record.get('prompt')!r}"
            )
        records.append(record)
    if not records:
        raise ValueError(f"prompts: {where} contains no prompts")
    return records


def _is_prompt(prompt: Any) -> bool:
    if isinstance(prompt, str) or not isinstance(prompt, list):
        return bool(prompt) and isinstance(prompt, str)
    said = [message for message in prompt if isinstance(message, dict)]
    texts = [isinstance(m.get(k), str) for m in said for k in ("role", "content")]
    return len(said) == len(prompt) > 0 and all(texts) and said[-1]["role"] != "assistant"


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            "prompts: Parquet and data sets need datasets: pip install 'fastrl-kernels[data]'"
        ) from error
    datasets.disable_progress_bars()
    return datasets


def _reason(error: BaseException) -> str:
    """Return the innermost cause in one line, as libraries wrap it in messages without content."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())}"

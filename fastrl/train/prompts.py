"""Prompts, which are read, tokenized, and dealt to steps in an order set by seed and step."""

import glob
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from fastrl.train import arithmetic, long_addition
from fastrl.train.chat import Chat
from fastrl.train.config import RunConfig

Record = dict[str, Any]
Item = TypeVar("Item")

#: The embedded tasks.
TASKS = {"arithmetic": arithmetic.split, "long_addition": long_addition.split}
_FILES = (".jsonl", ".parquet")


class Prompt(NamedTuple):
    """A record and its tokenized prompt.

    Attributes:
        record: the record as it was read.
        token_ids: the prompt.
        prefill: what the chat template has already written of the answer, such as ``<think>``.
        turn_end: what it writes behind an answer, such as ``<|im_end|>``.
    """

    record: Record
    token_ids: list[int]
    prefill: str = ""
    turn_end: str = ""

    @property
    def text(self) -> str:
        """The prompt as text, or the last message of a conversation."""
        prompt = self.record["prompt"]
        return str(prompt if isinstance(prompt, str) else prompt[-1]["content"])

    @property
    def judged(self) -> Record:
        """The record for rewards, with the ``"prefill"`` of the answer if there is one."""
        return {**self.record, "prefill": self.prefill} if self.prefill else self.record


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

    Prompts of more than ``max_prompt_tokens`` are left out.

    Raises:
        ValueError: Every prompt is longer, or one cannot be tokenized, or there is no chat
            template, or the template does not read an argument.
    """
    templated = config.chat_template is not None
    talks = templated or not all(isinstance(record["prompt"], str) for record in records)
    template = Chat(tokenizer, config.chat_template) if talks else None
    prompts, shortest = [], None
    for record in records:
        prompt, prefill, turn_end = record["prompt"], "", ""
        chat = template if templated or not isinstance(prompt, str) else None
        try:
            text = prompt if chat is None else chat.render(prompt)
            token_ids = tokenizer(text, add_special_tokens=chat is None)["input_ids"]
        except Exception as error:  # templates are programs, and tokenizers raise nothing narrower
            raise ValueError(
                f"prompts: {str(prompt)[:80]!r} cannot be tokenized: {_reason(error)}"
            ) from error
        if not token_ids:
            raise ValueError(f"prompts: {str(prompt)[:80]!r} has no tokens")
        if chat is not None:
            prefill = chat.prefill if text.endswith(chat.prefill) else ""
            turn_end = chat.turn_end
        if prefill and "prefill" in record:
            raise ValueError(
                "prompts: a record must not have a field 'prefill', under which rewards get what "
                f"the chat template writes of the answer: {prefill!r}"
            )
        if shortest is None or len(token_ids) < shortest:
            shortest = len(token_ids)
        if len(token_ids) <= config.max_prompt_tokens:
            prompts.append(Prompt(record, token_ids, prefill, turn_end))
    if not prompts:
        raise ValueError(
            f"max_prompt_tokens must be at least {shortest}, the length of the shortest prompt, "
            f"got {config.max_prompt_tokens}"
        )
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
        place = f"{where} row {number}"
        if not isinstance(row, dict):
            raise ValueError(f"{place}: must be an object, got {row!r}")  # noqa: TRY004
        record = _renamed(row, place, config.columns)
        if (wrong := _wrong_prompt(record["prompt"])) is not None:
            raise ValueError(
                f'{place}: "prompt" must be text, or messages with role and content, the last not '
                f"the assistant's, got {repr(record['prompt'])[:200]}{wrong}"
            )
        records.append(record)
    if not records:
        raise ValueError(f"prompts: {where} contains no prompts")
    return records


def _renamed(row: Record, place: str, columns: tuple[str, str]) -> Record:
    """Return a row with the named columns as prompt and answer, in place of others so called."""
    record = {name: value for name, value in row.items() if name not in columns}
    for target, name in zip(("prompt", "answer"), columns, strict=True):
        struct, field = _inside(row, name)
        if field in struct:
            record[target] = struct[field]
        elif (target, name) != ("answer", "answer"):  # which not every reward needs
            hint = "; name those with prompt and answer, such as --columns question solution"
            raise ValueError(
                f"columns: {place} has no {name!r}, only {', '.join(row)}"
                f"{hint if columns == ('prompt', 'answer') else ''}"
            )
    return record


def _inside(row: Record, name: str) -> tuple[Record, str]:
    """Return the struct that has a column, and its name in it; ``struct.field`` is inside one."""
    struct, _, field = name.partition(".")
    if name in row or not isinstance(row.get(struct), dict):
        return row, name
    return _inside(row[struct], field)


def _wrong_prompt(prompt: Any) -> str | None:
    """Return None for a prompt, or what to do about something else, if that is known."""
    if isinstance(prompt, str) or not isinstance(prompt, list):
        return None if prompt and isinstance(prompt, str) else ""
    said = [message for message in prompt if isinstance(message, dict)]
    if any({"from", "value"} <= message.keys() for message in said):
        return ": rename from and value (ShareGPT) to role and content"
    if any(isinstance(message.get("content"), list) for message in said):
        return ": join the parts of a content to one text"
    texts = [isinstance(m.get(k), str) for m in said for k in ("role", "content")]
    if not (len(said) == len(prompt) > 0 and all(texts)):
        return ""
    return None if said[-1]["role"] != "assistant" else ": drop the answer of the assistant"


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

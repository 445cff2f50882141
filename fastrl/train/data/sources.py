"""Where prompts are read from: JSONL and Parquet files, and data sets of the hub or a directory."""

import glob
import os
from collections.abc import Iterable
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

from fastrl.train import extras
from fastrl.train.data.prompts import Columns, Record, as_record, read_jsonl
from fastrl.train.settings.data import DataSettings

# The readers of `datasets` for plain tables. Others decode media, run further libraries on what
# they find, or, before version 5, load pickles.
_FORMATS = ("parquet", "json", "csv", "arrow")
_PLAIN = (str, bytes, bool, int, float, Decimal, date, time, timedelta)


def read_records(config: DataSettings) -> tuple[list[Record], list[Record]]:
    """The records for training and the held-out ones, from the files or the data set.

    Raises:
        ValueError: They cannot be read, or a row is invalid; the message names file or data set,
            and row.
    """
    columns = Columns(config.prompt_column, config.answer_column)
    if config.dataset is not None:
        train, held_out = (
            _of_dataset(config, split, columns)
            for split in (config.train_split, config.held_out_split)
        )
        return train, held_out
    assert config.train_file is not None
    assert config.held_out_file is not None
    return _of_file(config.train_file, columns), _of_file(config.held_out_file, columns)


def _of_file(path: str, columns: Columns) -> list[Record]:
    if Path(path).suffix != ".parquet":
        return read_jsonl(path, columns)
    datasets = _datasets(path)
    if not Path(path).is_file():
        raise ValueError(f"{path} cannot be read: there is no such file")
    try:
        rows = datasets.load_dataset(
            "parquet", data_files=glob.escape(path), split="train", streaming=True
        )
        return _records(rows, path, columns)
    except RowError:
        raise
    except Exception as error:  # of pyarrow and of datasets
        raise ValueError(f"{path} cannot be read: {_reason(error)}") from error


def _of_dataset(config: DataSettings, split: str, columns: Columns) -> list[Record]:
    datasets = _datasets("dataset")
    assert config.dataset is not None
    where = f"dataset {config.dataset!r}"
    try:
        builder = datasets.load_dataset_builder(
            config.dataset, config.dataset_config, revision=config.dataset_revision
        )
        _check_format(builder, where)
        builder.download_and_prepare()
        rows = builder.as_dataset(split=split)
        return _records(rows, f"{where} split {split!r}", columns)
    except RowError:
        raise
    except ConnectionError as error:
        raise ValueError(
            f"{where} is neither in the cache nor a directory, and the hub cannot be reached: "
            f"{_reason(error)}"
        ) from error
    except Exception as error:  # of a library that reads what others wrote
        if not os.path.exists(config.dataset):
            where += ": there is no such directory, and on the hub it"
        raise ValueError(f"{where} cannot be read: {_reason(error)}") from error


def _check_format(builder: Any, where: str) -> None:
    kind = type(builder).__mro__[1].__module__.split(".")  # below a class made for the data set
    if kind[:2] != ["datasets", "packaged_modules"] or kind[2] not in _FORMATS:
        raise RowError(f"{where} must consist of files in {', '.join(_FORMATS)}, got {kind[-1]}")


class RowError(ValueError):
    """A row is invalid, or all are; the message says where."""


def _records(rows: Iterable[Any], where: str, columns: Columns) -> list[Record]:
    records: list[Record] = []
    for row in rows:
        here = f"{where} row {len(records) + 1}"
        for column, value in row.items():
            if (kind := _not_plain(value)) is not None:
                raise RowError(f"{here}: {column!r} must hold text, numbers or such, got {kind}")
        try:
            records.append(as_record(row, here, columns))
        except ValueError as error:
            raise RowError(str(error)) from error
    if not records:
        raise RowError(f"{where} holds no prompts")
    return records


def _not_plain(value: Any) -> str | None:
    """The type of the first value that is an image or the like; None without one."""
    if isinstance(value, (list, dict)):
        parts = value.values() if isinstance(value, dict) else value
        return next((kind for part in parts if (kind := _not_plain(part)) is not None), None)
    return None if value is None or isinstance(value, _PLAIN) else type(value).__name__


def _datasets(setting: str) -> Any:
    extras.require("datasets", extra="data", setting=setting)
    import datasets

    return datasets


def _reason(error: BaseException) -> str:
    """The innermost cause, in one line: libraries wrap it in messages without content."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())}"

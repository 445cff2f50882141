"""The settings of the prompts."""

import os
from dataclasses import dataclass
from typing import Literal

from fastrl.train.settings.options import option


@dataclass
class DataSettings:
    """Where the prompts come from."""

    task: Literal["arithmetic", "long_addition"] = option(
        "arithmetic",
        "Without a train_file, an embedded task: small sums, or sums of six digits whose steps are "
        "written out, about 180 characters.",
    )
    train_file: str | None = option(
        None,
        'JSONL or .parquet of {"prompt": ...} and what the reward needs; a prompt is text or a '
        'list of messages {"role": ..., "content": ...}. By default, the task.',
    )
    held_out_file: str | None = option(None, "The same of prompts that are only evaluated.")
    dataset: str | None = option(
        None, "A data set of the hub, or a directory of its files, instead of the two files."
    )
    dataset_config: str | None = option(None, "Configuration of the data set, such as main.")
    dataset_revision: str | None = option(None, "Its commit, branch or tag; by default the latest.")
    train_split: str = option("train", "Split of the data set for training.")
    held_out_split: str = option("test", "Split of the data set that is only evaluated.")
    prompt_column: str = option("prompt", "The column that holds the prompts.")
    answer_column: str = option("answer", "The column that the rewards find as answer.")
    chat_template: bool = option(
        False,
        "Make each prompt a user message of the chat template; prompts that are messages always "
        "use it.",
    )
    system_prompt: str | None = option(
        None, "System message of the prompts that have none of their own."
    )
    max_prompt_tokens: int = option(512, "A longer prompt is an error, never truncated.", least=1)

    @property
    def has_prompts(self) -> bool:
        """Whether files or a data set hold the prompts, and not an embedded task."""
        return self.train_file is not None or self.dataset is not None

    def check_data(self) -> None:
        """Raise a `ValueError` if settings of the data exclude one another."""
        check_both_files(self.train_file, self.held_out_file)
        if self.has_prompts and self.task != "arithmetic":
            given = "train_file" if self.dataset is None else "dataset"
            raise ValueError(f"{given} must not be given with an embedded task, got {self.task}")
        if self.dataset is not None and self.train_file is not None:
            raise ValueError("dataset must not be used with train_file and held_out_file")
        if self.dataset is None:
            for name in ("dataset_config", "dataset_revision", "train_split", "held_out_split"):
                if getattr(self, name) != getattr(type(self), name):
                    raise ValueError(f"{name} must be used with dataset")
        elif self.train_split == self.held_out_split:
            raise ValueError(f"held_out_split must not be train_split, {self.train_split!r}")
        if not self.has_prompts:
            for name in ("prompt_column", "answer_column", "system_prompt"):
                if getattr(self, name) != getattr(type(self), name):
                    raise ValueError(f"{name} must be used with train_file or dataset")
        if self.prompt_column == self.answer_column:
            raise ValueError(f"answer_column must not be prompt_column, {self.prompt_column!r}")


def check_both_files(train: str | None, held_out: str | None) -> None:
    """Raise a `ValueError` if only one of the files is given."""
    if (train is None) != (held_out is None):
        raise ValueError("held_out_file must be given if and only if train_file is")


def check_files_differ(train: str | None, held_out: str | None) -> None:
    """Raise a `ValueError` if both are the same file."""
    if train and held_out and os.path.realpath(train) == os.path.realpath(held_out):
        raise ValueError(f"held_out_file must not be train_file, got {held_out!r}")

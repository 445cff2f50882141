"""The settings of the prompts."""

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
        None, 'JSONL of {"prompt": ...} and what the reward needs; by default, the task.'
    )
    held_out_file: str | None = option(None, "JSONL of prompts that are only evaluated.")
    chat_template: bool = option(
        False, "Wrap each prompt as a user message with the chat template."
    )
    max_prompt_tokens: int = option(512, "A longer prompt is an error, never truncated.", least=1)

    def check_data(self) -> None:
        """Raise a `ValueError` if settings of the data exclude one another."""
        if (self.train_file is None) != (self.held_out_file is None):
            raise ValueError("held_out_file must be given if and only if train_file is")
        if self.train_file is not None and self.task != "arithmetic":
            raise ValueError(
                f"train_file must not be given with an embedded task, got task {self.task}"
            )

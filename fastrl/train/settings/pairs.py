"""The settings of the preference pairs, and of what a reward model learns from them."""

from dataclasses import dataclass

from fastrl.train.settings.data import check_both_files
from fastrl.train.settings.options import option


@dataclass
class PairSettings:
    """Preference pairs, and the loss on them."""

    train_file: str | None = option(
        None,
        'JSONL of {"prompt", "chosen", "rejected"} and optionally "margin"; by default, '
        "arithmetic.",
    )
    held_out_file: str | None = option(None, "JSONL of pairs that are only evaluated.")
    chat_template: bool = option(
        False, "Wrap prompt and completion as messages with the chat template."
    )
    max_length: int = option(
        512, "A prompt with a completion of more tokens is an error, never truncated.", least=1
    )
    pairs_per_step: int = option(128, "Pairs per step.", least=1)
    center_coef: float = option(
        0.0, "Weight of (reward of chosen + reward of rejected)^2, which centers at 0.", least=0
    )

    def check_pairs(self) -> None:
        """Raise a `ValueError` if settings of the pairs exclude one another."""
        check_both_files(self.train_file, self.held_out_file)

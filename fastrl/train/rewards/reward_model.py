"""A reward model as a reward function."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastrl.train.data.prompts import Record
from fastrl.train.data.scored_text import encode_scored
from fastrl.train.model.finite_weights import not_finite
from fastrl.train.model.sequence_scorer import check_context, load_scorer, score_sequences
from fastrl.train.model.stored_model import REWARD_MODEL, fingerprint, is_fingerprint
from fastrl.train.padding import by_length
from fastrl.train.run.checkpoint import latest
from fastrl.train.run.json_lines import replace_file


class Kept(NamedTuple):
    """What a run keeps of its reward model, to continue with the same one."""

    checkpoint: str | None  # its name, if ``reward_model`` is a run
    fingerprint: str  # of the weights


class RewardModel:
    """The reward function that scores prompt and completion with a reward model.

    The model reads the text of both, in its own tokens, and the end token. It computes in the dtype
    of its files, without gradients. Sequences of similar lengths are scored together; the rewards
    do not depend on which, up to rounding.

    Args:
        path: The directory or hub name of the model.
        checkpoint: The name of its directory if that is a checkpoint of a run.
        model: A sequence classification model with one label.
        tokenizer: Its tokenizer.
        tokens_per_batch: Most tokens that are scored together, padding included.
        chat_template: Whether prompts that are text become messages. A record whose prompt is
            messages always goes through the chat template of the reward model's tokenizer.
        system_prompt: The system message of conversations that have none of their own.
    """

    def __init__(
        self,
        path: str,
        checkpoint: str | None,
        model: Any,
        tokenizer: Any,
        *,
        tokens_per_batch: int,
        chat_template: bool,
        system_prompt: str | None,
    ) -> None:
        self.path, self.checkpoint = path, checkpoint
        self._model, self._tokenizer = model.requires_grad_(False).eval(), tokenizer
        self._tokens_per_batch = tokens_per_batch
        self._chat_template, self._system_prompt = chat_template, system_prompt

    def fingerprint(self) -> str:
        """A sum of the weights."""
        return fingerprint(self._model.named_parameters())

    @torch.no_grad()
    def __call__(
        self, prompts: list[str], completions: list[str], records: list[Record]
    ) -> list[float]:
        """The score of each prompt with its completion."""
        asked = [
            messages if isinstance(messages := record.get("prompt"), list) else prompt
            for prompt, record in zip(prompts, records, strict=True)
        ]
        sequences = encode_scored(
            self._tokenizer,
            asked,
            completions,
            chat_template=self._chat_template,
            system_prompt=self._system_prompt,
        )
        lengths = [len(sequence) for sequence in sequences]
        check_context(self._model, max(lengths, default=0), "reward_model: a prompt and completion")
        scored = [0.0] * len(sequences)
        for batch in by_length(lengths, self._tokens_per_batch):
            values = score_sequences(self._model, [sequences[i] for i in batch]).tolist()
            for i, value in zip(batch, values, strict=True):
                scored[i] = value
        return scored


def load_reward_model(
    path: str,
    device: str | torch.device,
    *,
    tokens_per_batch: int = 16384,
    chat_template: bool = False,
    system_prompt: str | None = None,
    trust_remote_code: bool = False,
    kept: Kept | None = None,
) -> RewardModel:
    """Load a reward model.

    Args:
        path: A directory or hub name of a sequence classification model with one label, in
            safetensors; or a run of `fastrl.train.reward`, of which it is the last checkpoint.
        device: Where it computes.
        tokens_per_batch: See `RewardModel`.
        chat_template: See `RewardModel`.
        system_prompt: See `RewardModel`.
        trust_remote_code: Whether code of the directory or of the hub may run.
        kept: What it must be, if a run is resumed.

    Raises:
        ValueError: There is no such model, or it is not a reward model, or not the one in ``kept``.
    """
    checkpoint = _checkpoint(path, kept)
    found = path if checkpoint is None else str(checkpoint)
    model, tokenizer, _ = load_scorer(
        found, device, setting="reward_model", trust_remote_code=trust_remote_code
    )
    if (name := not_finite(model)) is not None:
        raise ValueError(f"reward_model must have finite weights, got a NaN or infinity in {name}")
    if chat_template and tokenizer.chat_template is None:
        raise ValueError(f"reward_model must have a chat template, got none in {path!r}")
    loaded = RewardModel(
        found,
        None if checkpoint is None else checkpoint.name,
        model,
        tokenizer,
        tokens_per_batch=tokens_per_batch,
        chat_template=chat_template,
        system_prompt=system_prompt,
    )
    if kept is not None and kept.fingerprint != loaded.fingerprint():
        raise ValueError(
            f"reward_model: {found} has other weights than when the run began, {_ADVICE}"
        )
    return loaded


_ADVICE = "and rewards of different models are not comparable: restore it, or choose another --name"


def _checkpoint(path: str, kept: Kept | None) -> Path | None:
    """The checkpoint that is used if ``path`` is a run."""
    try:
        last = latest(Path(path) / "checkpoints")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"reward_model must be a directory or hub name, got {path!r}: {error}"
        ) from error
    if kept is None:
        return last
    if kept.checkpoint is None:
        return None
    began_with = Path(path) / "checkpoints" / kept.checkpoint
    if not began_with.is_dir():
        where = "" if began_with.is_absolute() else f" (looked for in {Path.cwd()})"
        raise ValueError(
            f"reward_model: the run began with {began_with}, which is gone{where}, {_ADVICE}"
        )
    return began_with


def keep(model: RewardModel, run: Path) -> None:
    """Let the directory of a run know its reward model, unless it does."""
    if not (run / REWARD_MODEL).exists():
        kept = Kept(model.checkpoint, model.fingerprint())
        replace_file(run / REWARD_MODEL, json.dumps(kept._asdict(), indent=2) + "\n")


def read_kept(run: Path) -> Kept | None:
    """What `keep` wrote; None if the run is of an earlier version.

    Raises:
        ValueError: The file is damaged or cannot be read.
    """
    path = run / REWARD_MODEL
    if not path.exists():
        return None
    try:
        kept = Kept(**json.loads(path.read_text()))
        named = kept.checkpoint is None or re.fullmatch(r"step-\d+", kept.checkpoint)
        whole = named and is_fingerprint(kept.fingerprint)
    except (OSError, ValueError, TypeError, RecursionError):
        whole = False
    if not whole:
        raise ValueError(
            f"resume: {path} is damaged; delete it if the reward model is still the same"
        )
    return kept

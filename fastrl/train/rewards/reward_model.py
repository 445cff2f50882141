"""A reward model as a reward function."""

from pathlib import Path

import torch

from fastrl.train.data.prompts import Record
from fastrl.train.data.scored_text import encode_scored
from fastrl.train.model.finite_weights import not_finite
from fastrl.train.model.sequence_scorer import check_context, load_scorer, score_sequences
from fastrl.train.padding import by_length
from fastrl.train.rewards.scoring import RewardFunction
from fastrl.train.run.checkpoint import latest


def load_reward_model(
    path: str,
    device: str | torch.device,
    *,
    tokens_per_batch: int = 16384,
    chat_template: bool = False,
    system_prompt: str | None = None,
    trust_remote_code: bool = False,
) -> RewardFunction:
    """The reward function that scores prompt and completion with a reward model.

    The model reads the text of both, in its own tokens, and the end token. It computes in the dtype
    of its files, without gradients. Sequences of similar lengths are scored together; the rewards
    do not depend on which, up to rounding.

    Args:
        path: A directory or hub name of a sequence classification model with one label, in
            safetensors; or a run of `fastrl.train.reward`, of which it is the last checkpoint.
        device: Where it computes.
        tokens_per_batch: Most tokens that are scored together, padding included.
        chat_template: Whether prompts that are text become messages. A record whose prompt is
            messages always goes through the chat template of the reward model's tokenizer.
        system_prompt: The system message of conversations that have none of their own.
        trust_remote_code: Whether code of the directory or of the hub may run.

    Returns:
        A function of prompts, completions and records that returns a float for each.

    Raises:
        ValueError: There is no such model, or it is not a reward model.
    """
    checkpoint = latest(Path(path) / "checkpoints")
    model, tokenizer, _ = load_scorer(
        path if checkpoint is None else str(checkpoint),
        device,
        setting="reward_model",
        trust_remote_code=trust_remote_code,
    )
    if (name := not_finite(model)) is not None:
        raise ValueError(f"reward_model must have finite weights, got a NaN or infinity in {name}")
    if chat_template and tokenizer.chat_template is None:
        raise ValueError(f"reward_model must have a chat template, got none in {path!r}")
    model.requires_grad_(False).eval()

    @torch.no_grad()
    def rewards(prompts: list[str], completions: list[str], records: list[Record]) -> list[float]:
        asked = [
            messages if isinstance(messages := record.get("prompt"), list) else prompt
            for prompt, record in zip(prompts, records, strict=True)
        ]
        sequences = encode_scored(
            tokenizer,
            asked,
            completions,
            chat_template=chat_template,
            system_prompt=system_prompt,
        )
        lengths = [len(sequence) for sequence in sequences]
        check_context(model, max(lengths, default=0), "reward_model: a prompt and completion")
        scored = [0.0] * len(sequences)
        for batch in by_length(lengths, tokens_per_batch):
            values = score_sequences(model, [sequences[i] for i in batch]).tolist()
            for i, value in zip(batch, values, strict=True):
                scored[i] = value
        return scored

    return rewards

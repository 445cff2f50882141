"""From the completions of any engine to a rollout."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fastrl.train.data.prompts import Prompt
from fastrl.train.rollout import Rollout


class Completion(NamedTuple):
    """A completion, on the CPU."""

    token_ids: Tensor  # [T], up to and including its end
    logprobs: Tensor  # float32 [T], at the temperature
    ended: bool  # false if it reached the length limit without an end


def rollout_of(
    prompts: list[Prompt], completions: list[Completion], tokenizer: Any, device: torch.device
) -> Rollout:
    """The completions as tensors on ``device``; those of a prompt are consecutive."""
    check_finite(completions)
    group_size = len(completions) // len(prompts)
    token_ids = [completion.token_ids for completion in completions]
    lengths = torch.tensor([len(ids) for ids in token_ids])
    padded = pad_sequence(token_ids, batch_first=True, padding_value=tokenizer.pad_token_id)
    logprobs = pad_sequence([completion.logprobs for completion in completions], batch_first=True)
    return Rollout(
        prompts=[prompt.token_ids for prompt in prompts],
        prompt_of=torch.arange(len(prompts)).repeat_interleave(group_size),
        token_ids=padded.to(device),
        mask=(torch.arange(padded.shape[1]) < lengths[:, None]).to(device),
        logprobs=logprobs.to(device),
        truncated=torch.tensor([not completion.ended for completion in completions]).to(device),
    )


def texts_of(completions: list[Completion], tokenizer: Any) -> list[str]:
    """The completions as strings, without special tokens."""
    return [
        tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True)
        for completion in completions
    ]


def check_finite(completions: list[Completion]) -> None:
    """Raise a `FloatingPointError` if a token was sampled from logits that are not finite."""
    for completion in completions:
        if not completion.logprobs.isfinite().all():
            raise FloatingPointError(
                "the logits are not finite while sampling: the model's weights are damaged, or too "
                "large for its precision"
            )

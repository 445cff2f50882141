"""Sampling: from prompts to completions and the tensors of the losses."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.train.prompts import Prompt


class Rollout(NamedTuple):
    """N sequences: prompts padded on the left to P tokens, completions on the right to T."""

    input_ids: Tensor  # [N, P + T]
    attention_mask: Tensor  # [N, P + T]
    token_ids: Tensor  # [N, T], the completions
    mask: Tensor  # bool [N, T], true up to and including the end token

    def rows(self, index: Tensor) -> "Rollout":
        """The sequences at ``index``."""
        return Rollout(*(tensor[index] for tensor in self))


@torch.no_grad()
def generate(
    model: Any,
    tokenizer: Any,
    prompts: list[Prompt],
    *,
    max_new_tokens: int,
    temperature: float | None,
    group_size: int = 1,
) -> tuple[Rollout, list[str]]:
    """Sample ``group_size`` completions of each prompt; greedily if ``temperature`` is None.

    The distribution is exactly softmax(logits / temperature), as the loss assumes: no top-k, no
    top-p, no penalties, whatever the model's defaults are.

    Returns:
        The rollout, a prompt's completions in consecutive rows, and the completions as strings.
    """
    encoded = tokenizer.pad(
        {"input_ids": [prompt.token_ids for prompt in prompts for _ in range(group_size)]},
        padding_side="left",
        return_tensors="pt",
    ).to(model.device)
    ids, prompt_mask = encoded["input_ids"], encoded["attention_mask"]
    choice: dict[str, Any] = {"do_sample": False}
    if temperature is not None:
        choice = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    out = model.generate(
        input_ids=ids,
        attention_mask=prompt_mask,
        max_new_tokens=max_new_tokens,
        use_cache=True,
        **choice,
    )
    token_ids = out[:, ids.shape[1] :]
    mask = completion_mask(token_ids, model.generation_config.eos_token_id)
    token_ids = token_ids.masked_fill(~mask, tokenizer.pad_token_id)
    attention_mask = torch.cat([prompt_mask, mask.to(prompt_mask.dtype)], 1)
    completions = tokenizer.batch_decode(token_ids, skip_special_tokens=True)
    return Rollout(torch.cat([ids, token_ids], 1), attention_mask, token_ids, mask), completions


def completion_mask(token_ids: Tensor, end_ids: int | list[int]) -> Tensor:
    """True up to and including the first end token: choosing to stop is an action too."""
    ends = torch.isin(token_ids, torch.as_tensor(end_ids, device=token_ids.device))
    return ends.cumsum(1) - ends.long() == 0

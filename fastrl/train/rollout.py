"""What was sampled: the completions of a step, with what the losses need of them."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from fastrl.train.prompts import Prompt


class Completion(NamedTuple):
    """A completion, on the CPU."""

    token_ids: Tensor  # [T], up to and including its end
    logprobs: Tensor  # float32 [T], of the sampler at the temperature
    ended: bool  # false if it reached the length limit without an end
    sampled: Tensor | None = None  # bool [T], false where a tool or the user wrote; None: all true


class Rollout(NamedTuple):
    """N completions, padded on the right to T tokens, and the prompts they continue.

    Only values per token are padded. What enters the model is packed: `fastrl.train.packing`.
    """

    prompts: list[list[int]]  # token ids of the different prompts
    prompt_of: Tensor  # [N], on the CPU: the index of each completion's prompt
    token_ids: Tensor  # [N, T]
    mask: Tensor  # bool [N, T], the tokens that the policy sampled, up to and including the end
    logprobs: Tensor  # float32 [N, T], of the sampler at the temperature; 0 where masked
    truncated: Tensor  # bool [N], true if the completion reached the length limit without an end

    @property
    def lengths(self) -> list[int]:
        """The sampled tokens of each completion, with its end token."""
        return self.mask.sum(1).tolist()

    def rows(self, index: Tensor) -> "Rollout":
        """The completions at ``index``."""
        at = index.to(self.mask.device)
        per_row = (self.token_ids, self.mask, self.logprobs, self.truncated)
        return Rollout(self.prompts, self.prompt_of[index.cpu()], *(each[at] for each in per_row))

    def counted(self, truncated: str) -> Tensor:
        """The mask of the tokens in the loss: without truncated completions if ``"mask"``."""
        return self.mask & ~self.truncated[:, None] if truncated == "mask" else self.mask


def rollout_of(
    prompts: list[Prompt], completions: list[Completion], device: torch.device
) -> Rollout:
    """The completions as tensors on ``device``; those of a prompt are consecutive.

    Raises:
        ValueError: A completion has no tokens, or not a log-probability and a mask for each.
        FloatingPointError: A token was sampled from logits that are not finite.
    """
    masks = []
    for one in completions:
        sampled = torch.ones(len(one.token_ids), dtype=torch.bool)
        sampled = sampled if one.sampled is None else one.sampled
        if not len(one.token_ids) == len(one.logprobs) == len(sampled) or not sampled.any():
            raise ValueError(
                "sampler: a completion must have at least one sampled token, and a log-probability "
                f"and a mask for each, got {len(one.token_ids)} tokens, {len(one.logprobs)} "
                f"log-probabilities, a mask of {len(sampled)} with {int(sampled.sum())} true"
            )
        masks.append(sampled)
    mask = pad_sequence(masks, batch_first=True)
    logprobs = pad_sequence([one.logprobs.float() for one in completions], batch_first=True)
    logprobs = logprobs.where(mask, 0.0)
    if not logprobs.isfinite().all():
        raise FloatingPointError(
            "the logits are not finite while sampling: the model's weights are damaged, or too "
            "large for its precision"
        )
    return Rollout(
        prompts=[prompt.token_ids for prompt in prompts],
        prompt_of=torch.arange(len(prompts)).repeat_interleave(len(completions) // len(prompts)),
        token_ids=pad_sequence([one.token_ids for one in completions], batch_first=True).to(device),
        mask=mask.to(device),
        logprobs=logprobs.to(device),
        truncated=torch.tensor([not one.ended for one in completions], device=device),
    )


def concatenate(rollouts: list[Rollout]) -> Rollout:
    """The completions of several rollouts as one, each padded to the longest."""
    length = max(rollout.mask.shape[1] for rollout in rollouts)
    begins = torch.tensor([0] + [len(rollout.prompts) for rollout in rollouts]).cumsum(0)

    def joined(tensors: Any) -> Tensor:
        return torch.cat([pad(tensor, (0, length - tensor.shape[1])) for tensor in tensors])

    return Rollout(
        [prompt for rollout in rollouts for prompt in rollout.prompts],
        torch.cat([r.prompt_of + begin for r, begin in zip(rollouts, begins[:-1], strict=True)]),
        joined(rollout.token_ids for rollout in rollouts),
        joined(rollout.mask for rollout in rollouts),
        joined(rollout.logprobs for rollout in rollouts),
        torch.cat([rollout.truncated for rollout in rollouts]),
    )

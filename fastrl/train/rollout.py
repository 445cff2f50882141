"""What was sampled: the completions of a step, with what the losses need of them."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class Rollout(NamedTuple):
    """N completions, padded on the right to T tokens, and the prompts they continue.

    Only values per token are padded. What enters the model is packed: `fastrl.train.packing`.
    """

    prompts: list[list[int]]  # token ids of the different prompts
    prompt_of: Tensor  # [N], on the CPU: the index of each completion's prompt
    token_ids: Tensor  # [N, T]
    mask: Tensor  # bool [N, T], true up to and including the end token
    logprobs: Tensor  # float32 [N, T], of the sampler at the temperature; 0 where masked
    truncated: Tensor  # bool [N], true if the completion reached the length limit without an end

    @property
    def lengths(self) -> list[int]:
        """The tokens of each completion, with its end token."""
        return self.mask.sum(1).tolist()

    def rows(self, index: Tensor) -> "Rollout":
        """The completions at ``index``."""
        at = index.to(self.mask.device)
        return Rollout(
            self.prompts,
            self.prompt_of[index.cpu()],
            self.token_ids[at],
            self.mask[at],
            self.logprobs[at],
            self.truncated[at],
        )

    def counted(self, truncated: str) -> Tensor:
        """The mask of the tokens in the loss: without truncated completions if ``"mask"``."""
        return self.mask & ~self.truncated[:, None] if truncated == "mask" else self.mask


def concatenate(rollouts: list[Rollout]) -> Rollout:
    """The completions of several rollouts as one, each padded to the longest."""
    length = max(rollout.mask.shape[1] for rollout in rollouts)
    prompts: list[list[int]] = []
    prompt_of = []
    for rollout in rollouts:
        prompt_of.append(rollout.prompt_of + len(prompts))
        prompts += rollout.prompts

    def joined(values: list[Tensor]) -> Tensor:
        return torch.cat([pad(tensor, (0, length - tensor.shape[1])) for tensor in values])

    return Rollout(
        prompts,
        torch.cat(prompt_of),
        joined([rollout.token_ids for rollout in rollouts]),
        joined([rollout.mask for rollout in rollouts]),
        joined([rollout.logprobs for rollout in rollouts]),
        torch.cat([rollout.truncated for rollout in rollouts]),
    )

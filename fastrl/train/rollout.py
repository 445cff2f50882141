"""The sampled completions of a step, with the values that the losses need."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from fastrl import KeptTokens, TopKLogprobs
from fastrl.train.prompts import Prompt


class Completion(NamedTuple):
    """A completion, with tensors on the CPU.

    Attributes:
        token_ids: integers `[T]`, up to and including the end token.
        logprobs: log-probabilities under the sampler at its temperature, in nats, float32 `[T]`.
        ended: whether the completion has an end; False if it reached the length limit without one.
        sampled: bool `[T]`, False for tokens that a tool or the user wrote; None means all True.
        kept: the sets from which the T tokens were sampled; None means the whole vocabulary.
        top_logprobs: the K most likely tokens of each distribution that was sampled from, `[T, K]`,
            for ``score_centering``.

    Examples:
        >>> import torch
        >>> from fastrl.train.rollout import Completion
        >>> Completion(torch.tensor([5, 1]), torch.tensor([-0.7, -0.1]), ended=True).kept is None
        True
    """

    token_ids: Tensor
    logprobs: Tensor
    ended: bool
    sampled: Tensor | None = None
    kept: KeptTokens | None = None
    top_logprobs: TopKLogprobs | None = None


class TokenCount(NamedTuple):
    """Tokens of prompts and completions that an engine computed."""

    real: int
    padded: int  # with padding


#: Takes the place of a completion that a user's sampler could not make.
_ABSENT = Completion(
    torch.zeros(1, dtype=torch.int64), torch.zeros(1), True, torch.zeros(1, dtype=torch.bool)
)


class Rollout(NamedTuple):
    """N completions, padded on the right to T tokens, and the prompts they continue.

    A completion that does not exist has a mask without tokens. Only values per token are padded.
    The model gets packed rows: `fastrl.train.packing`.
    """

    prompts: list[list[int]]  # token ids of the different prompts
    prompt_of: Tensor  # [N], on the CPU: the index of each completion's prompt
    token_ids: Tensor  # [N, T]
    mask: Tensor  # bool [N, T], the tokens that the policy sampled, up to and including the end
    logprobs: Tensor  # float32 [N, T], of the sampler at the temperature; 0 where masked
    truncated: Tensor  # bool [N], true if the completion reached the length limit without an end
    kept: KeptTokens | None = None  # of the N T tokens, in rows; None: of the whole vocabulary
    top_logprobs: TopKLogprobs | None = None  # [N, T, K], for score centering

    @property
    def lengths(self) -> list[int]:
        """The number of sampled tokens of each completion, including its end token."""
        return self.mask.sum(1).tolist()

    def rows(self, index: Tensor) -> "Rollout":
        """Return the completions at ``index``."""
        at = index.to(self.mask.device)
        kept, top, length = self.kept, self.top_logprobs, self.mask.shape[1]
        if kept is not None:
            kept = kept.take(
                (at[:, None] * length + torch.arange(length, device=at.device)).flatten()
            )
        return Rollout(
            self.prompts,
            self.prompt_of[index.cpu()],
            self.token_ids[at],
            self.mask[at],
            self.logprobs[at],
            self.truncated[at],
            kept,
            None if top is None else TopKLogprobs(*(values[at] for values in top)),
        )

    def counted(self, truncated: str) -> Tensor:
        """Return the mask of the tokens in the loss; ``"mask"`` omits truncated completions."""
        return self.mask & ~self.truncated[:, None] if truncated == "mask" else self.mask


def rows_by_length(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Return rows of similar lengths that fit ``limit`` tokens, padded to their longest."""
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if not batches or (len(batches[-1]) + 1) * lengths[row] > limit:
            batches.append([])
        batches[-1].append(row)
    return batches


def rollout_of(
    prompts: list[Prompt],
    completions: Sequence[Completion | None],
    device: torch.device,
    counts: list[int] | None = None,
) -> Rollout:
    """Return completions as tensors on ``device``; completions of a prompt are consecutive.

    Each prompt has as many, unless there are ``counts``. None is a completion that does not exist:
    it has no tokens.

    Raises:
        ValueError: A completion has no tokens, or a token has no log-probability or mask.
        FloatingPointError: A token was sampled from logits that are not finite.
    """
    counts = counts or [len(completions) // len(prompts)] * len(prompts)
    masks, made = [], [_ABSENT if one is None else one for one in completions]
    for one in made:
        sampled = torch.ones(len(one.token_ids), dtype=torch.bool)
        sampled = sampled if one.sampled is None else one.sampled
        if not len(one.token_ids) == len(one.logprobs) == len(sampled) or not (
            sampled.any() or one is _ABSENT
        ):
            raise ValueError(
                "sampler: a completion must have at least one sampled token, and a log-probability "
                f"and a mask for each, got {len(one.token_ids)} tokens, {len(one.logprobs)} "
                f"log-probabilities, a mask of {len(sampled)} with {int(sampled.sum())} true"
            )
        masks.append(sampled)
    mask = pad_sequence(masks, batch_first=True)
    logprobs = pad_sequence([one.logprobs.float() for one in made], batch_first=True)
    logprobs = logprobs.where(mask, 0.0)
    if not logprobs.isfinite().all():
        raise FloatingPointError(
            "the logits are not finite while sampling: the model's weights are damaged, or too "
            "large for its precision"
        )
    return Rollout(
        prompts=[prompt.token_ids for prompt in prompts],
        prompt_of=torch.arange(len(prompts)).repeat_interleave(torch.tensor(counts)),
        token_ids=pad_sequence([one.token_ids for one in made], batch_first=True).to(device),
        mask=mask.to(device),
        logprobs=logprobs.to(device),
        truncated=torch.tensor([not one.ended for one in made], device=device),
        kept=_padded([one.kept for one in made], mask, device),
        top_logprobs=_joined([(one.top_logprobs, 1) for one in made], mask.shape[1], device),
    )


def _padded(kept: list[KeptTokens | None], mask: Tensor, device: torch.device) -> KeptTokens | None:
    """Return the sets of the completions' tokens, with empty sets as padding."""
    if all(one is None for one in kept):
        return None
    counts = torch.zeros(mask.shape, dtype=torch.int64)
    for row, one in enumerate(kept):
        if one is not None:
            counts[row, : len(one.offsets) - 1] = one.counts()
    token_ids = torch.cat([one.token_ids for one in kept if one is not None])
    return KeptTokens(token_ids, pad(counts.flatten().cumsum(0), (1, 0))).to(device)


def concatenate(rollouts: list[Rollout]) -> Rollout:
    """Return the completions of several rollouts as one, padded to the longest."""
    length = max(rollout.mask.shape[1] for rollout in rollouts)
    kept = None
    if any(rollout.kept is not None for rollout in rollouts):
        kept = KeptTokens.concatenate([_kept(rollout, length) for rollout in rollouts])
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
        kept,
        _joined([(r.top_logprobs, len(r.mask)) for r in rollouts], length, rollouts[0].mask.device),
    )


def _joined(
    parts: list[tuple[TopKLogprobs | None, int]], length: int, device: torch.device
) -> TopKLogprobs | None:
    """Return the tokens of some completions each, padded to ``length`` and the largest K."""
    widths = [top.token_ids.shape[-1] for top, _ in parts if top is not None]
    if not widths:
        return None
    shape, begin = (sum(count for _, count in parts), length, max(widths)), 0
    ids = torch.full(shape, -1, dtype=torch.int32, device=device)
    logprobs = torch.full(shape, -torch.inf, device=device)
    for top, count in parts:
        if top is not None:
            tokens, width = top.token_ids.shape[-2:]
            ids[begin : begin + count, :tokens, :width] = top.token_ids
            logprobs[begin : begin + count, :tokens, :width] = top.logprobs
        begin += count
    return TopKLogprobs(ids, logprobs)


def _kept(rollout: Rollout, length: int) -> KeptTokens:
    """Return the sets of a rollout's tokens, padded to another length."""
    shape, device = rollout.mask.shape, rollout.mask.device
    if rollout.kept is None:
        return KeptTokens.from_lists([[]] * (shape[0] * length), device=device)
    counts = pad(rollout.kept.counts().view(shape), (0, length - shape[1]))
    offsets = pad(counts.flatten().cumsum(0), (1, 0))
    return KeptTokens(rollout.kept.token_ids, offsets)

"""Choosing the next tokens, so that a sample depends only on its logits and its random numbers."""

import torch
from torch import Tensor
from transformers import LogitsProcessor

_AT_ONCE = 2**24  # scores, which bounds the memory of their probabilities


def choose(scores: Tensor, temperature: float, uniforms: Tensor | None) -> tuple[Tensor, Tensor]:
    """Draw a token from softmax(scores / temperature) for each row, by the inverse of its CDF.

    Args:
        scores: Logits, float32 [N, V].
        temperature: Positive.
        uniforms: Numbers in [0, 1), float64 [N]; None chooses the most likely tokens.

    Returns:
        Token ids [N] and their log-probabilities, float32 [N]: NaN if the row has no distribution,
        because a logit is NaN or infinite or all are -inf. Otherwise the token has a positive
        probability.
    """
    logprobs = (scores.float() / temperature).log_softmax(-1)
    token_ids = logprobs.argmax(-1, keepdim=True)
    if uniforms is not None:
        cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
        target = uniforms[:, None] * cumulative[:, -1:]
        drawn = torch.searchsorted(cumulative, target, right=True)
        drawn = drawn.clamp(max=scores.shape[-1] - 1)
        # A parallel sum need not be monotonic to the last bit, so check what it found.
        possible = logprobs.gather(-1, drawn).exp() > 0
        token_ids = torch.where(possible, drawn, token_ids)
    return token_ids.squeeze(-1), logprobs.gather(-1, token_ids).squeeze(-1)


class TokenChoice(LogitsProcessor):
    """Chooses the tokens of ``generate(do_sample=False)``, and records their log-probabilities.

    It is the last processor: `transformers` adds its own before, and those for sampling not at all.

    Attributes:
        token_ids: The chosen tokens [N] of each step.
        logprobs: Their log-probabilities at the temperature, float32 [N].
    """

    def __init__(self, temperature: float, uniforms: Tensor | None) -> None:
        self.token_ids: list[Tensor] = []
        self.logprobs: list[Tensor] = []
        self._temperature, self._uniforms = temperature, uniforms

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Choose a token for each row of ``scores`` [N, V], and forbid all others in place."""
        parts = []
        step = len(self.token_ids)
        for rows in torch.arange(len(scores)).split(max(1, _AT_ONCE // scores.shape[-1])):
            span = slice(int(rows[0]), int(rows[-1]) + 1)
            uniforms = None if self._uniforms is None else self._uniforms[span, step]
            parts.append(choose(scores[span], self._temperature, uniforms))
        token_ids, logprobs = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        self.token_ids.append(token_ids)
        self.logprobs.append(logprobs)
        return scores.fill_(-torch.inf).scatter_(1, token_ids[:, None], 0.0)

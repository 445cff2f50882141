"""The interface of an engine that samples completions."""

from typing import NamedTuple, Protocol

from fastrl.train.data.prompts import Prompt
from fastrl.train.rollout import Rollout


class TokenCount(NamedTuple):
    """Tokens of prompts and completions that an engine computed."""

    real: int
    padded: int  # real ones and padding


class Sampler(Protocol):
    """An engine that samples from softmax(logits / temperature), and from nothing else.

    Attributes:
        tokens: What the last call of `sample` or `greedy` computed.
    """

    tokens: TokenCount

    def sample(self, prompts: list[Prompt], group_size: int) -> tuple[Rollout, list[str]]:
        """Sample ``group_size`` completions of each prompt.

        Equal states of torch's generator on the CPU give equal samples.

        Returns:
            The rollout and the completions as strings; those of a prompt are consecutive.

        Raises:
            FloatingPointError: The logits are not finite.
            RuntimeError: The engine failed.
        """

    def greedy(self, prompts: list[Prompt]) -> tuple[list[str], list[int]]:
        """Complete each prompt with the most likely tokens; uses no random numbers.

        Returns:
            The completions as strings, and their numbers of tokens, with the end token.

        Raises:
            FloatingPointError: The logits are not finite.
            RuntimeError: The engine failed.
        """

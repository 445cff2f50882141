"""The valid tokens of a policy loss and their inputs."""

from __future__ import annotations

import dataclasses

import numpy as np

from ..bounded import Bounded


@dataclasses.dataclass
class Tokens:
    """The valid tokens, `[n]`, and the sequence of each."""

    logprobs: Bounded
    advantages: Bounded
    sequence: np.ndarray
    count: int  # sequences
    old: Bounded | None = None
    ref: Bounded | None = None
    rollout: Bounded | None = None
    entropy: Bounded | None = None
    policy_weights: Bounded | None = None

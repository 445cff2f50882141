"""`use_fastrl(trainer)` for the trainers of TRL.

    trainer = GRPOTrainer(model=..., reward_funcs=..., args=..., train_dataset=...)
    use_fastrl(trainer)
    trainer.train()

The adapter that `trainers.py` names for the class replaces methods of the instance.
"""

from __future__ import annotations

from typing import Any

from fastrl.backend import Backend
from fastrl.integrations.trl.handle import Choices
from fastrl.integrations.trl.handle import Handle as Handle
from fastrl.integrations.trl.trainers import SUPPORT as SUPPORT
from fastrl.integrations.trl.trainers import handle_of
from fastrl.integrations.trl.vllm_replay import (
    vllm_returns_kept_tokens as vllm_returns_kept_tokens,
)

TESTED = (
    "Tested on instances of `GRPOTrainer` and `RLOOTrainer` with TRL 1.15 and 1.16, and of the "
    "other trainers with TRL 1.16."
)


def use_fastrl(
    trainer: Any,
    *,
    fused: bool | None = None,
    packed: bool | None = None,
    packed_tokens: int | None = None,
    replay_kept_tokens: bool = False,
    score_centering: int | None = None,
    backend: Backend = "auto",
) -> Handle:
    """Let a TRL trainer compute log-probabilities, and its loss if possible, with fastrl.

    `docs/support.md` lists the trainers and their options. In the fused loss of `GRPOTrainer` and
    `RLOOTrainer`, log-ratios saturate at 80 (both log-ratios of the bias-corrected KL at 40), where
    TRL's overflow: a run that has diverged continues with finite gradients instead of NaN. The
    metric `fastrl/saturated_ratio_fraction` is the share of saturated tokens; the first batch with
    such a token gives a RuntimeWarning.

    Hooks on the LM head do not fire, as in TRL, because the head computes no logits. If there are
    any, a UserWarning says so.

    Args:
        trainer: an instance of a supported trainer, before `train()`.
        fused: None computes loss and gradient in one pass where `docs/support.md` says so; True
            requires it; False replaces only log-probabilities and entropies.
        packed: None runs each micro-batch as one row without padding, in which equal beginnings of
            sequences, such as the prompt of a group, are computed once, and on the padded batch
            where that is not possible; a line in the log says which. True requires it; False
            leaves the padded batch. Positions restart with each sequence, as for one alone.
        packed_tokens: the most tokens of a row, unless one sequence is longer. A micro-batch with
            more runs in several rows, each of which is computed again in the backward, so that the
            activations of one row exist at a time. None means one row. On one device only.
        replay_kept_tokens: whether to compute old, reference and new log-probabilities over the
            tokens that `top_p`, `top_k` or `min_p` kept when each token was sampled, by
            `transformers` or by vLLM in a trainer made in `vllm_returns_kept_tokens()`. They are
            then the sampler's log-probabilities; TRL's are over the whole vocabulary.
        score_centering: K subtracts the sampler's expected score from the update of a `GRPOTrainer`
            (arXiv 2609.20807), with the K most likely tokens of `transformers` or a colocated vLLM
            at each place; see `fastrl.TopKLogprobs`. None leaves TRL's loss.
        backend: `auto`, or the backend for the chunks.

    Returns:
        A `Handle` with `undo()`, which is also a context manager. `fused` tells whether the loss is
        fused, and `reason` why it is not; `packed` and `packed_reason` tell the same of rows.

    Raises:
        TypeError: `trainer` is of another class; the message names the function that fits it.
            `packed`, `packed_tokens` or `score_centering` is of another type.
        ValueError: the trainer or one of its options is not supported; the trainer is unchanged.

    Examples:
        >>> from fastrl.integrations.trl import use_fastrl
        >>> handle = use_fastrl(trainer)  # doctest: +SKIP
        >>> handle.fused, handle.reason  # doctest: +SKIP
        (True, None)
    """
    choices = Choices(fused, packed, packed_tokens, replay_kept_tokens, score_centering, backend)
    return handle_of(trainer, choices)

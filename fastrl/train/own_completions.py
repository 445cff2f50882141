"""Completions from the user's own rollout function, checked before training on them."""

from collections.abc import Callable
from typing import Any

import torch

from fastrl import KeptTokens, Objective, TopKLogprobs
from fastrl.ops._companions.sampler_arguments import check_sampler, sampler_arguments
from fastrl.ops._lens.kept import check_kept
from fastrl.ops.kept_tokens import kept_arguments
from fastrl.train.config import RunConfig
from fastrl.train.loading import context_of
from fastrl.train.rollout import Completion
from fastrl.train.vocabulary import row_count


def checked_completion(
    one: Any, prompt: list[int], model: Any, config: RunConfig, *, greedy: bool
) -> Completion:
    """Return a completion from a user's function, with tensors of the right types.

    Raises:
        ValueError: The completion does not fit the model or the settings.
    """
    try:
        ids = torch.as_tensor(one.token_ids)
        logprobs = torch.as_tensor(one.logprobs, dtype=torch.float32)
        sampled = None if one.sampled is None else torch.as_tensor(one.sampled).bool()
        ids, ended = ids.long(), bool(one.ended)
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"sampler must return completions of tensors: {error}") from error
    vocabulary = row_count(model)
    context = context_of(model) or len(prompt) + len(ids)
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise ValueError(f"sampler must return ids from 0 to {vocabulary - 1}, got {ids}")
    if (logprobs > 1e-3).any():
        raise ValueError(f"sampler must return log-probabilities up to 0, got {logprobs}")
    if len(prompt) + len(ids) > context:
        raise ValueError(
            f"sampler must return at most {context - len(prompt)} tokens for a prompt of "
            f"{len(prompt)}, since the model's context is {context}, got {len(ids)}"
        )
    of_ids, every = ids.cpu(), torch.ones(len(ids), dtype=torch.bool)
    kept = getattr(one, "kept", None)
    if kept is not None:
        kept = _checked(
            kept,
            "kept tokens that fit",
            lambda sets: check_kept(kept_arguments(sets, of_ids), every, vocabulary),
        )
    of_sampler = slice(None) if sampled is None else sampled.cpu()
    if config.keeps_tokens and not greedy:
        if kept is None or bool((kept.counts() == 0)[of_sampler].any()):
            raise ValueError(
                "sampler must return the kept tokens (Completion.kept) of each token that it "
                "sampled with top_p, top_k or min_p: without them the trainer's "
                "log-probabilities are over the whole vocabulary, and every ratio is biased"
            )
        lacking = kept.lacking(of_ids)[of_sampler]
        if lacking.sum() > max(1, 0.1 * len(lacking)):  # by rounding, one of thousands
            raise ValueError(
                "sampler must return kept tokens that contain the sampled token, got "
                f"{int(lacking.sum())} of {len(lacking)} sampled tokens outside their set"
            )
    top = None
    if config.score_centering is not None and not greedy:
        objective = Objective(score_centering=True)
        top = _checked(
            getattr(one, "top_logprobs", None),
            "the most likely tokens (Completion.top_logprobs) with score_centering",
            lambda top: check_sampler(
                sampler_arguments(top, objective, None, of_ids), every, vocabulary
            ),
        )
    return Completion(ids, logprobs, ended, sampled, kept, top)


def _checked(value: Any, what: str, check: Callable[[Any], None]) -> Any:
    """Return what a user's function gave for each token, on the CPU, where values are checked."""
    try:
        value = value.to("cpu") if isinstance(value, (KeptTokens, TopKLogprobs)) else value
        check(value)
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"sampler must return {what}: {error}") from error
    return value
